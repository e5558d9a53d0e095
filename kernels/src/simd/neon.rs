//! NEON with dot products: four 128-bit registers per vector, lanes 0–3 in the first.

#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use half::{bf16, f16};

use super::{LANES, Simd, pair_bits};

/// Proof that the processor has NEON and its dot products of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod");
        found.then_some(Neon(()))
    }
}

/// A method body of intrinsics that need only the features themselves and references of the right size.
macro_rules! simd {
    ($($body:tt)*) => {
        // SAFETY: a `Neon` exists only where `detect` found every feature that these intrinsics need, and each pointer
        // comes from a reference to an array of at least the elements that the unaligned access touches.
        unsafe { $($body)* }
    };
}

/// One intrinsic for each of the four registers: `each!(a, b => vaddq_f32(a, b))`.
macro_rules! each {
    ($($vector:ident),+ => $result:expr) => {
        [0, 1, 2, 3].map(|quarter| {
            $(let $vector = $vector[quarter];)+
            simd!($result)
        })
    };
}

/// Value `part` of each pair; only for what a [`Neon`] does.
#[inline(always)]
fn of_pairs(pairs: uint32x4_t, part: usize) -> float32x4_t {
    simd!(vreinterpretq_f32_u32(match part {
        0 => vshlq_n_u32::<16>(pairs),
        _ => vandq_u32(pairs, vdupq_n_u32(0xffff_0000)),
    }))
}

impl Simd for Neon {
    type F = [float32x4_t; 4];
    type I = [int32x4_t; 4];
    type U = [uint8x16_t; 4];
    type P = [int32x4_t; 4];

    const REGISTERS: bool = true;
    const MANY_REGISTERS: bool = false;
    const WIDE_PRODUCTS: bool = true;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        simd!([vdupq_n_f32(value); 4])
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        quarters::<4, _>(from).map(|from| simd!(vld1q_f32(from.as_ptr())))
    }
    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        for (quarter, to) in to.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            simd!(vst1q_f32(to.as_mut_ptr(), value[quarter]));
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each!(a, b => vaddq_f32(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each!(a, b => vsubq_f32(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each!(a, b => vmulq_f32(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each!(a, b => vdivq_f32(a, b))
    }
    // The instructions for maxima and minima treat zeros of two signs and NaN in their own way.
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        each!(a, b => vbslq_f32(vcgtq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        each!(a, b => vbslq_f32(vcltq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each!(a, b, c => vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    fn sum(self, value: Self::F) -> f32 {
        simd! {
            let eight = [vaddq_f32(value[0], value[2]), vaddq_f32(value[1], value[3])];
            let four = vaddq_f32(eight[0], eight[1]);
            vaddv_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }
    #[inline(always)]
    fn largest(self, value: Self::F) -> f32 {
        simd!(vmaxvq_f32(vmaxq_f32(vmaxq_f32(value[0], value[1]), vmaxq_f32(value[2], value[3]))))
    }
    #[inline(always)]
    fn keep_first(self, lanes: usize, value: Self::F, other: Self::F) -> Self::F {
        // How many of each register's lanes.
        let counts = [0, 4, 8, 12].map(|first| lanes.min(LANES) as i32 - first);
        each!(counts, value, other => {
            let mask = vcltq_s32(vld1q_s32([0, 1, 2, 3].as_ptr()), vdupq_n_s32(counts));
            vbslq_f32(mask, value, other)
        })
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        quarters::<4, _>(from).map(|from| simd!(widen_f16(vld1_u16(from.as_ptr().cast()))))
    }
    #[inline(always)]
    fn load_of_pairs(self, from: &[[bf16; 2]; LANES], part: usize) -> Self::F {
        quarters::<4, _>(from).map(|from| of_pairs(simd!(vld1q_u32(from.as_ptr().cast())), part))
    }
    #[inline(always)]
    fn splat_of_pair(self, pair: [bf16; 2], part: usize) -> Self::F {
        [of_pairs(simd!(vdupq_n_u32(pair_bits(pair).cast_unsigned())), part); 4]
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> Self::F {
        simd! {
            let bytes = vld1q_u8(from.as_ptr());
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes)));
            [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)]
                .map(|four| vcvtq_f32_u32(vmovl_u16(four)))
        }
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        simd! {
            let bytes = vld1q_s8(from.as_ptr());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
            [vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)]
                .map(|four| vcvtq_f32_s32(vmovl_s16(four)))
        }
    }

    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::I {
        simd!([vdupq_n_s32(value); 4])
    }
    #[inline(always)]
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I {
        each!(a, b => vaddq_s32(a, b))
    }
    #[inline(always)]
    fn sub_i32(self, a: Self::I, b: Self::I) -> Self::I {
        each!(a, b => vsubq_s32(a, b))
    }
    #[inline(always)]
    fn shift_left<const BITS: u32>(self, value: Self::I) -> Self::I {
        each!(value => vshlq_s32(value, vdupq_n_s32(BITS as i32)))
    }
    #[inline(always)]
    fn sum_i32(self, value: Self::I) -> i32 {
        simd!(vaddvq_s32(vaddq_s32(vaddq_s32(value[0], value[1]), vaddq_s32(value[2], value[3]))))
    }
    #[inline(always)]
    fn to_f32(self, value: Self::I) -> Self::F {
        each!(value => vcvtq_f32_s32(value))
    }
    #[inline(always)]
    fn round(self, value: Self::F) -> Self::I {
        each!(value => vcvtnq_s32_f32(value))
    }
    #[inline(always)]
    fn store_i8(self, value: Self::I, to: &mut [i8; LANES]) {
        simd! {
            let low = vcombine_s16(vmovn_s32(value[0]), vmovn_s32(value[1]));
            let high = vcombine_s16(vmovn_s32(value[2]), vmovn_s32(value[3]));
            vst1q_s8(to.as_mut_ptr(), vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        }
    }
    #[inline(always)]
    fn power_of_two(self, exponent: Self::I) -> Self::F {
        each!(exponent => vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(exponent, vdupq_n_s32(127)))))
    }

    #[inline(always)]
    fn prefetch(self, start: *const u8, lines: usize) {
        for line in 0..lines {
            let address = start.wrapping_add(64 * line);
            // SAFETY: a prefetch of an address that is not mapped does nothing.
            unsafe {
                asm!("prfm pldl2keep, [{address}]", address = in(reg) address, options(nostack, preserves_flags))
            };
        }
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; 64]) -> Self::U {
        quarters::<16, _>(from).map(|from| simd!(vld1q_u8(from.as_ptr())))
    }
    #[inline(always)]
    fn store_bytes(self, value: Self::U, to: &mut [u8; 64]) {
        for (quarter, to) in to.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            simd!(vst1q_u8(to.as_mut_ptr(), value[quarter]));
        }
    }
    #[inline(always)]
    fn low_nibbles(self, value: Self::U) -> Self::U {
        each!(value => vandq_u8(value, vdupq_n_u8(15)))
    }
    #[inline(always)]
    fn high_nibbles(self, value: Self::U) -> Self::U {
        each!(value => vshrq_n_u8::<4>(value))
    }
    #[inline(always)]
    fn with_crumbs(self, nibbles: Self::U, crumbs: Self::U, quarter: usize) -> Self::U {
        self.or_bytes(nibbles, self.bits(crumbs, 4 - 2 * quarter as i32, 0x30))
    }

    #[inline(always)]
    fn bits(self, value: Self::U, shift: i32, mask: u8) -> Self::U {
        each!(value => vandq_u8(vshlq_u8(value, vdupq_n_s8(shift as i8)), vdupq_n_u8(mask)))
    }
    #[inline(always)]
    fn or_bytes(self, a: Self::U, b: Self::U) -> Self::U {
        each!(a, b => vorrq_u8(a, b))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U {
        each!(indices => vqtbl1q_u8(vld1q_u8(table.as_ptr()), indices))
    }

    #[inline(always)]
    fn open(self, sum: Self::I) -> Self::P {
        sum
    }
    #[inline(always)]
    fn multiply(self, products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P {
        let values = i32::from_ne_bytes(values.map(|value| value as u8));
        each!(products, codes => add_dots(products, vreinterpretq_s8_u8(codes), vreinterpretq_s8_s32(vdupq_n_s32(values))))
    }
    #[inline(always)]
    fn multiply_biased(self, products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P {
        // The flipped highest bit of an unsigned byte makes it 128 less, signed.
        let signed = each!(codes => veorq_u8(codes, vdupq_n_u8(128)));
        self.multiply(products, signed, values)
    }
    #[inline(always)]
    fn close(self, _sum: Self::I, products: Self::P) -> Self::I {
        products
    }
    #[inline(always)]
    fn start_biased(self, _negated_sum_of_values: Self::I) -> Self::I {
        self.splat_i32(0)
    }
}

/// The parts of an array that four registers hold.
#[inline(always)]
fn quarters<const QUARTER: usize, T>(all: &[T]) -> [&[T; QUARTER]; 4] {
    match all.as_chunks().0 {
        [a, b, c, d] => [a, b, c, d],
        _ => unreachable!("{} are four times {QUARTER}", all.len()),
    }
}

/// `sums` and, in each lane, the dot product of its four codes and values. The standard library's own is not stable.
///
/// # Safety
/// The processor has NEON and its dot products.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn add_dots(mut sums: int32x4_t, codes: int8x16_t, values: int8x16_t) -> int32x4_t {
    // SAFETY: the features by this function's own condition; registers alone are touched.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {codes:v}.16b, {values:v}.16b",
            sums = inout(vreg) sums,
            codes = in(vreg) codes,
            values = in(vreg) values,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// The standard library has no stable type of four f16.
///
/// # Safety
/// The processor has NEON.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn widen_f16(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: NEON by this function's own condition; registers alone are touched.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}
