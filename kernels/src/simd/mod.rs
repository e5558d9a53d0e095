//! Sixteen-lane vectors: the one vocabulary in which every op is written once.
//!
//! [`Simd`] is implemented by tokens that exist only where the processor has the features (`Avx512`, `Avx2`, `Neon`) and by
//! `Scalar`, which is the reference. All of them compute the same bits: products and sums are fused alike, and
//! reductions add the same tree. So "scalar against vector" is a test of equality.
//!
//! Rules for code written over `Simd`: mark it `#[inline(always)]`, and keep vectors out of closures given to iterator
//! adaptors. Only what is inlined into the function with the target features is compiled with them.

mod dispatch;
mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use half::{bf16, f16};

pub(crate) use dispatch::Kernel;
pub use dispatch::{Kernels, UnknownKernels};

/// Lanes of every vector of 32-bit values.
pub(crate) const LANES: usize = 16;

/// Vectors of 16 f32, of 16 i32, and of 64 bytes, which are four for each of the 16 lanes.
pub(crate) trait Simd: Copy {
    /// 16 × f32.
    type F: Copy;
    /// 16 × i32.
    type I: Copy;
    /// 64 × u8.
    type U: Copy;
    /// Sums of products of bytes, as wide as the processor makes them at first: 16 × i32, or 32 × i16, two to a lane.
    type P: Copy;

    /// Whether vectors are kept in registers at all. Where they are not, tiles of several sums win nothing, and loops
    /// that make one sum after another are a fraction of the code to compile.
    const REGISTERS: bool;
    /// Whether there are registers for tiles of 24 vectors; otherwise for about six.
    const MANY_REGISTERS: bool;

    /// Whether products of bytes are as wide as their sum at once, so that a run of them may have any length.
    const WIDE_PRODUCTS: bool;

    fn splat(self, value: f32) -> Self::F;
    fn load(self, from: &[f32; LANES]) -> Self::F;
    fn store(self, value: Self::F, to: &mut [f32; LANES]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The lanes added as a binary tree: lane i with i + 8, then i + 4, i + 2, i + 1.
    fn sum(self, value: Self::F) -> f32;
    /// The largest lane.
    fn largest(self, value: Self::F) -> f32;
    /// `value` in the first `lanes` lanes, `other` in the rest.
    fn keep_first(self, lanes: usize, value: Self::F, other: Self::F) -> Self::F;

    /// Adds to each lane the products of its pair with `values`: the second is added first, each sum is rounded once. So
    /// does `vdpbf16ps`, for which values and sums below 2⁻¹²⁶ are zeros.
    #[inline(always)]
    fn add_pairs(self, sum: Self::F, pairs: &[[bf16; 2]; LANES], values: [bf16; 2]) -> Self::F {
        self.add_pairs_in_two(sum, pairs, values)
    }
    /// The same where no instruction does it.
    #[inline(always)]
    fn add_pairs_in_two(self, sum: Self::F, pairs: &[[bf16; 2]; LANES], values: [bf16; 2]) -> Self::F {
        let seconds = self.fma(self.load_of_pairs(pairs, 1), self.splat_of_pair(values, 1), sum);
        self.fma(self.load_of_pairs(pairs, 0), self.splat_of_pair(values, 0), seconds)
    }
    /// Value `part`, below 2, of a pair.
    fn splat_of_pair(self, pair: [bf16; 2], part: usize) -> Self::F;

    fn load_f16(self, from: &[f16; LANES]) -> Self::F;
    /// Value `part`, below 2, of each pair.
    fn load_of_pairs(self, from: &[[bf16; 2]; LANES], part: usize) -> Self::F;
    fn load_u8(self, from: &[u8; LANES]) -> Self::F;
    fn load_i8(self, from: &[i8; LANES]) -> Self::F;

    fn splat_i32(self, value: i32) -> Self::I;
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i32(self, a: Self::I, b: Self::I) -> Self::I;
    /// `value · 2^BITS`.
    fn shift_left<const BITS: u32>(self, value: Self::I) -> Self::I;
    fn sum_i32(self, value: Self::I) -> i32;
    fn to_f32(self, value: Self::I) -> Self::F;
    /// To the nearest integer, ties to even; the values fit i32.
    fn round(self, value: Self::F) -> Self::I;
    /// The low byte of each lane.
    fn store_i8(self, value: Self::I, to: &mut [i8; LANES]);
    /// 2ⁿ for n in -126..=127; 0 for -127 and infinity for 128.
    fn power_of_two(self, exponent: Self::I) -> Self::F;

    fn load_bytes(self, from: &[u8; 64]) -> Self::U;
    fn store_bytes(self, value: Self::U, to: &mut [u8; 64]);
    fn low_nibbles(self, value: Self::U) -> Self::U;
    fn high_nibbles(self, value: Self::U) -> Self::U;
    /// `nibbles | two << 4`, where `two` are bits `2 · quarter` and `2 · quarter + 1` of each byte of `crumbs`.
    fn with_crumbs(self, nibbles: Self::U, crumbs: Self::U, quarter: usize) -> Self::U;

    /// The bits of each byte moved up by `shift` places, or down by as many where it is negative; those of `mask`, none
    /// of which came from another byte.
    fn bits(self, value: Self::U, shift: i32, mask: u8) -> Self::U;
    fn or_bytes(self, a: Self::U, b: Self::U) -> Self::U;
    /// The entries of `table` that bytes below 16 name.
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U;

    /// Opens a run of products that are added to `sum`: [`multiply`](Self::multiply) at most [`longest_run`] times, or
    /// [`multiply_biased`](Self::multiply_biased) once, any number of times with [`WIDE_PRODUCTS`](Self::WIDE_PRODUCTS); then
    /// [`close`](Self::close).
    fn open(self, sum: Self::I) -> Self::P;
    /// Adds to each lane the products of its four codes, below 128, with `values`, none of which is -128.
    fn multiply(self, products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P;
    /// Adds to each lane the products of its four codes, each minus 128, with `values`, none of which is -128.
    fn multiply_biased(self, products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P;
    /// `sum`, which the run was opened with, and its products.
    fn close(self, sum: Self::I, products: Self::P) -> Self::I;
    /// Where sums of biased products start, given the negated sum of all `values` that will come.
    fn start_biased(self, negated_sum_of_values: Self::I) -> Self::I;

    /// The low and the high nibbles of sixteen bytes.
    #[inline(always)]
    fn load_nibbles(self, from: &[u8; LANES]) -> (Self::F, Self::F) {
        let bytes = self.load_u8(from);
        // A sixteenth lies at most 15/16 above the high nibble: less than half away after 15/32 are taken off.
        let high = self.to_f32(self.round(self.fma(bytes, self.splat(1.0 / 16.0), self.splat(-15.0 / 32.0))));
        (self.fma(high, self.splat(-16.0), bytes), high)
    }

    /// Asks the cache for `lines` lines of 64 bytes from `start`, which may lie anywhere.
    #[inline(always)]
    fn prefetch(self, start: *const u8, lines: usize) {
        let _ = (start, lines);
    }

    /// Loads up to 16 values, zero in the lanes beyond.
    #[inline(always)]
    fn load_partial(self, from: &[f32]) -> Self::F {
        match from.first_chunk() {
            Some(lanes) => self.load(lanes),
            None => {
                let mut lanes = [0.0; LANES];
                lanes[..from.len()].copy_from_slice(from);
                self.load(&lanes)
            }
        }
    }

    /// Stores the first lanes, as many as `to` has.
    #[inline(always)]
    fn store_partial(self, value: Self::F, to: &mut [f32]) {
        match to.first_chunk_mut() {
            Some(lanes) => self.store(value, lanes),
            None => {
                let mut lanes = [0.0; LANES];
                self.store(value, &mut lanes);
                to.copy_from_slice(&lanes[..to.len()]);
            }
        }
    }

    /// Stores the low bytes of the first lanes, as many as `to` has.
    #[inline(always)]
    fn store_i8_partial(self, value: Self::I, to: &mut [i8]) {
        match to.first_chunk_mut() {
            Some(lanes) => self.store_i8(value, lanes),
            None => {
                let mut lanes = [0; LANES];
                self.store_i8(value, &mut lanes);
                to.copy_from_slice(&lanes[..to.len()]);
            }
        }
    }

    /// eˣ to about 2 ulp; arguments are clamped to -87.3..=88.3, so the result is normal and finite.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        let x = self.max(self.min(x, self.splat(88.3)), self.splat(-87.3));
        let n = self.round(self.mul(x, self.splat(std::f32::consts::LOG2_E)));
        // x - n·ln 2 in two steps, the first of which is exact (Cody and Waite).
        let whole = self.to_f32(n);
        let r = self.fma(whole, self.splat(-0.693_359_4), x);
        let r = self.fma(whole, self.splat(2.121_944_4e-4), r);
        // Taylor to degree 7: the remainder is below 2⁻²⁶ for |r| ≤ ln 2 / 2.
        let mut p = self.splat(1.0 / 5040.0);
        for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = self.fma(p, r, self.splat(coefficient));
        }
        self.mul(p, self.power_of_two(n))
    }
}

/// To the nearest, ties to even; NaNs stay NaNs. Without a branch, so that the compiler makes vectors of it.
#[inline(always)]
pub(crate) fn nearest_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding could carry a NaN's low bits into an infinity; a quiet bit keeps it one.
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

/// The same value; unlike the crate's own, without a look at NaNs.
#[inline(always)]
pub(crate) fn widened(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// A pair as it lies in memory, the first in the low half.
#[inline(always)]
fn pair_bits([first, second]: [bf16; 2]) -> i32 {
    (u32::from(second.to_bits()) << 16 | u32::from(first.to_bits())).cast_signed()
}

/// How many products of codes of so many bits may be added before they are widened: pairs of them fit 16 bits together.
pub(crate) const fn longest_run(code_bits: u32) -> usize {
    let largest_pair = 2 * 127 * ((1 << code_bits) - 1);
    if largest_pair > i16::MAX as usize { 1 } else { i16::MAX as usize / largest_pair }
}

#[cfg(test)]
mod tests;
