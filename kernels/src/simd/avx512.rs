//! AVX-512 with VNNI: one 512-bit register per vector. With BF16 beside them pairs of bf16 are multiplied by one
//! instruction, and the rest is the same.

#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::transmute;

use half::{bf16, f16};

use super::{LANES, Simd, pair_bits};

/// Proof that the processor has AVX-512 F, BW, VL, DQ and VNNI, and BF16 where `BF16`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const BF16: bool>(());

impl<const BF16: bool> Avx512<BF16> {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni")
            && (!BF16 || is_x86_feature_detected!("avx512bf16"))
            && super::avx2::Avx2::<false>::detect().is_some();
        found.then_some(Avx512(()))
    }

    /// What every such processor has.
    pub(crate) fn without_bf16(self) -> Avx512<false> {
        Avx512(())
    }
}

/// A method body of intrinsics that need only the features themselves and references of the right size.
macro_rules! simd {
    ($($body:tt)*) => {
        // SAFETY: an `Avx512` exists only where `detect` found every feature that these intrinsics need, and each
        // pointer comes from a reference to an array of exactly the bytes that the unaligned access touches.
        unsafe { $($body)* }
    };
}

/// Value `part` of each pair; only for what an [`Avx512`] does.
#[inline(always)]
fn of_pairs(pairs: __m512i, part: usize) -> __m512 {
    simd!(_mm512_castsi512_ps(match part {
        0 => _mm512_slli_epi32::<16>(pairs),
        _ => _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)),
    }))
}

impl<const BF16: bool> Simd for Avx512<BF16> {
    type F = __m512;
    type I = __m512i;
    type U = __m512i;
    type P = __m512i;

    const REGISTERS: bool = true;
    const MANY_REGISTERS: bool = true;
    const WIDE_PRODUCTS: bool = true;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        simd!(_mm512_set1_ps(value))
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        simd!(_mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        simd!(_mm512_storeu_ps(to.as_mut_ptr(), value))
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        simd!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        simd!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        simd!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        simd!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        simd!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        simd!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        simd!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn sum(self, value: Self::F) -> f32 {
        simd! {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps::<1>(value));
            super::avx2::sum_of_8(eight)
        }
    }
    #[inline(always)]
    fn largest(self, value: Self::F) -> f32 {
        simd!(_mm512_reduce_max_ps(value))
    }
    #[inline(always)]
    fn keep_first(self, lanes: usize, value: Self::F, other: Self::F) -> Self::F {
        let mask = if lanes >= LANES { u16::MAX } else { (1 << lanes) - 1 };
        simd!(_mm512_mask_blend_ps(mask, other, value))
    }

    #[inline(always)]
    fn add_pairs(self, sum: Self::F, pairs: &[[bf16; 2]; LANES], values: [bf16; 2]) -> Self::F {
        if !BF16 {
            return self.add_pairs_in_two(sum, pairs, values);
        }
        simd! {
            let pairs = _mm512_loadu_si512(pairs.as_ptr().cast());
            let values = _mm512_set1_epi32(pair_bits(values));
            _mm512_dpbf16_ps(sum, transmute::<__m512i, __m512bh>(pairs), transmute::<__m512i, __m512bh>(values))
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        simd!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_of_pairs(self, from: &[[bf16; 2]; LANES], part: usize) -> Self::F {
        of_pairs(simd!(_mm512_loadu_si512(from.as_ptr().cast())), part)
    }
    #[inline(always)]
    fn splat_of_pair(self, pair: [bf16; 2], part: usize) -> Self::F {
        of_pairs(simd!(_mm512_set1_epi32(pair_bits(pair))), part)
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> Self::F {
        simd!(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        simd!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
    }

    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::I {
        simd!(_mm512_set1_epi32(value))
    }
    #[inline(always)]
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I {
        simd!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_i32(self, a: Self::I, b: Self::I) -> Self::I {
        simd!(_mm512_sub_epi32(a, b))
    }
    #[inline(always)]
    fn shift_left<const BITS: u32>(self, value: Self::I) -> Self::I {
        simd!(_mm512_slli_epi32::<BITS>(value))
    }
    #[inline(always)]
    fn sum_i32(self, value: Self::I) -> i32 {
        simd!(_mm512_reduce_add_epi32(value))
    }
    #[inline(always)]
    fn to_f32(self, value: Self::I) -> Self::F {
        simd!(_mm512_cvtepi32_ps(value))
    }
    #[inline(always)]
    fn round(self, value: Self::F) -> Self::I {
        simd!(_mm512_cvt_roundps_epi32::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(value))
    }
    #[inline(always)]
    fn store_i8(self, value: Self::I, to: &mut [i8; LANES]) {
        simd!(_mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(value)))
    }
    #[inline(always)]
    fn power_of_two(self, exponent: Self::I) -> Self::F {
        simd! {
            let biased = _mm512_add_epi32(exponent, _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    fn prefetch(self, start: *const u8, lines: usize) {
        for line in 0..lines {
            // SAFETY: a prefetch of an address that is not mapped does nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(64 * line).cast()) };
        }
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; 64]) -> Self::U {
        simd!(_mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn store_bytes(self, value: Self::U, to: &mut [u8; 64]) {
        simd!(_mm512_storeu_si512(to.as_mut_ptr().cast(), value))
    }
    #[inline(always)]
    fn low_nibbles(self, value: Self::U) -> Self::U {
        simd!(_mm512_and_si512(value, _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn high_nibbles(self, value: Self::U) -> Self::U {
        simd!(_mm512_and_si512(_mm512_srli_epi16::<4>(value), _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn with_crumbs(self, nibbles: Self::U, crumbs: Self::U, quarter: usize) -> Self::U {
        simd! {
            let shifted = match quarter {
                0 => _mm512_slli_epi16::<4>(crumbs),
                1 => _mm512_slli_epi16::<2>(crumbs),
                2 => crumbs,
                _ => _mm512_srli_epi16::<2>(crumbs),
            };
            // nibbles | (shifted & 0x30)
            _mm512_ternarylogic_epi32::<0xf8>(nibbles, shifted, _mm512_set1_epi8(0x30))
        }
    }

    #[inline(always)]
    fn bits(self, value: Self::U, shift: i32, mask: u8) -> Self::U {
        simd! {
            let count = _mm_cvtsi32_si128(shift.abs());
            let shifted = match shift < 0 {
                true => _mm512_srl_epi16(value, count),
                false => _mm512_sll_epi16(value, count),
            };
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask as i8))
        }
    }
    #[inline(always)]
    fn or_bytes(self, a: Self::U, b: Self::U) -> Self::U {
        simd!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U {
        simd! {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, indices)
        }
    }

    #[inline(always)]
    fn open(self, sum: Self::I) -> Self::P {
        sum
    }
    #[inline(always)]
    fn multiply(self, products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P {
        let values = i32::from_ne_bytes(values.map(|value| value as u8));
        simd!(_mm512_dpbusd_epi32(products, codes, _mm512_set1_epi32(values)))
    }
    #[inline(always)]
    fn multiply_biased(self, products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P {
        self.multiply(products, codes, values)
    }
    #[inline(always)]
    fn close(self, _sum: Self::I, products: Self::P) -> Self::I {
        products
    }
    #[inline(always)]
    fn start_biased(self, negated_sum_of_values: Self::I) -> Self::I {
        self.shift_left::<7>(negated_sum_of_values)
    }
}
