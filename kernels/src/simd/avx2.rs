//! AVX2 with FMA and F16C: two 256-bit registers per vector, lanes 0–7 in the first. With AVX-VNNI beside them dot
//! products are one instruction, and the rest is the same.

#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{LANES, Simd, pair_bits};

/// Proof that the processor has AVX2, FMA and F16C, and AVX-VNNI where `VNNI`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        found.then_some(Avx2(()))
    }
}

/// A method body of intrinsics that need only the features themselves and references of the right size.
macro_rules! simd {
    ($($body:tt)*) => {
        // SAFETY: an `Avx2` exists only where `detect` found every feature that these intrinsics need, and each
        // pointer comes from a reference to an array of at least the bytes that the unaligned access touches.
        unsafe { $($body)* }
    };
}

/// The tree of [`Simd::sum`] below its first level.
///
/// # Safety
/// The processor has AVX.
#[inline(always)]
pub(super) unsafe fn sum_of_8(eight: __m256) -> f32 {
    // SAFETY: AVX by this function's own condition.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

/// Value `part` of each pair; only for what an [`Avx2`] does.
#[inline(always)]
fn of_pairs(pairs: __m256i, part: usize) -> __m256 {
    simd!(_mm256_castsi256_ps(match part {
        0 => _mm256_slli_epi32::<16>(pairs),
        _ => _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)),
    }))
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type U = [__m256i; 2];
    type P = [__m256i; 2];

    const REGISTERS: bool = true;
    const MANY_REGISTERS: bool = false;
    const WIDE_PRODUCTS: bool = VNNI;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        simd!([_mm256_set1_ps(value); 2])
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        simd!([_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))])
    }
    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        simd! {
            _mm256_storeu_ps(to.as_mut_ptr(), value[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), value[1]);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        simd!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        simd!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        simd!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        simd!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        simd!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        simd!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        simd!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn sum(self, value: Self::F) -> f32 {
        simd!(sum_of_8(_mm256_add_ps(value[0], value[1])))
    }
    #[inline(always)]
    fn largest(self, value: Self::F) -> f32 {
        simd! {
            let eight = _mm256_max_ps(value[0], value[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn keep_first(self, lanes: usize, value: Self::F, other: Self::F) -> Self::F {
        simd! {
            let count = _mm256_set1_epi32(lanes.min(LANES) as i32);
            let low = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            let high = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
            [
                _mm256_blendv_ps(other[0], value[0], _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(other[1], value[1], _mm256_castsi256_ps(high)),
            ]
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        simd! {
            let from = from.as_ptr().cast::<__m128i>();
            [_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))]
        }
    }
    #[inline(always)]
    fn load_of_pairs(self, from: &[[bf16; 2]; LANES], part: usize) -> Self::F {
        let from = from.as_ptr().cast::<__m256i>();
        [of_pairs(simd!(_mm256_loadu_si256(from)), part), of_pairs(simd!(_mm256_loadu_si256(from.add(1))), part)]
    }
    #[inline(always)]
    fn splat_of_pair(self, pair: [bf16; 2], part: usize) -> Self::F {
        [of_pairs(simd!(_mm256_set1_epi32(pair_bits(pair))), part); 2]
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> Self::F {
        simd! {
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            let high = _mm_unpackhi_epi64(bytes, bytes);
            [_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high))]
        }
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        simd! {
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            let high = _mm_unpackhi_epi64(bytes, bytes);
            [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))]
        }
    }

    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::I {
        simd!([_mm256_set1_epi32(value); 2])
    }
    #[inline(always)]
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I {
        simd!([_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])])
    }
    #[inline(always)]
    fn sub_i32(self, a: Self::I, b: Self::I) -> Self::I {
        simd!([_mm256_sub_epi32(a[0], b[0]), _mm256_sub_epi32(a[1], b[1])])
    }
    #[inline(always)]
    fn shift_left<const BITS: u32>(self, value: Self::I) -> Self::I {
        simd! {
            let bits = _mm_cvtsi32_si128(BITS as i32);
            [_mm256_sll_epi32(value[0], bits), _mm256_sll_epi32(value[1], bits)]
        }
    }
    #[inline(always)]
    fn sum_i32(self, value: Self::I) -> i32 {
        simd! {
            let eight = _mm256_add_epi32(value[0], value[1]);
            let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
        }
    }
    #[inline(always)]
    fn to_f32(self, value: Self::I) -> Self::F {
        simd!([_mm256_cvtepi32_ps(value[0]), _mm256_cvtepi32_ps(value[1])])
    }
    #[inline(always)]
    fn round(self, value: Self::F) -> Self::I {
        // The default rounding mode, which Rust never changes, is to nearest even.
        simd!([_mm256_cvtps_epi32(value[0]), _mm256_cvtps_epi32(value[1])])
    }
    #[inline(always)]
    fn store_i8(self, value: Self::I, to: &mut [i8; LANES]) {
        simd! {
            let low_bytes = _mm256_set1_epi32(0xff);
            let (low, high) = (_mm256_and_si256(value[0], low_bytes), _mm256_and_si256(value[1], low_bytes));
            // Packing works within 128-bit halves: 0–3, 8–11 | 4–7, 12–15; the permutation restores the order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
    }
    #[inline(always)]
    fn power_of_two(self, exponent: Self::I) -> Self::F {
        simd! {
            let bias = _mm256_set1_epi32(127);
            let power = [_mm256_add_epi32(exponent[0], bias), _mm256_add_epi32(exponent[1], bias)];
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(power[0])),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(power[1])),
            ]
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
        simd! {
            let from = from.as_ptr().cast::<__m256i>();
            [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))]
        }
    }
    #[inline(always)]
    fn store_bytes(self, value: Self::U, to: &mut [u8; 64]) {
        simd! {
            let to = to.as_mut_ptr().cast::<__m256i>();
            _mm256_storeu_si256(to, value[0]);
            _mm256_storeu_si256(to.add(1), value[1]);
        }
    }
    #[inline(always)]
    fn low_nibbles(self, value: Self::U) -> Self::U {
        simd! {
            let mask = _mm256_set1_epi8(15);
            [_mm256_and_si256(value[0], mask), _mm256_and_si256(value[1], mask)]
        }
    }
    #[inline(always)]
    fn high_nibbles(self, value: Self::U) -> Self::U {
        simd! {
            let mask = _mm256_set1_epi8(15);
            [
                _mm256_and_si256(_mm256_srli_epi16::<4>(value[0]), mask),
                _mm256_and_si256(_mm256_srli_epi16::<4>(value[1]), mask),
            ]
        }
    }
    #[inline(always)]
    fn with_crumbs(self, nibbles: Self::U, crumbs: Self::U, quarter: usize) -> Self::U {
        let mut out = nibbles;
        for half in 0..2 {
            simd! {
                let shifted = match quarter {
                    0 => _mm256_slli_epi16::<4>(crumbs[half]),
                    1 => _mm256_slli_epi16::<2>(crumbs[half]),
                    2 => crumbs[half],
                    _ => _mm256_srli_epi16::<2>(crumbs[half]),
                };
                out[half] = _mm256_or_si256(nibbles[half], _mm256_and_si256(shifted, _mm256_set1_epi8(0x30)));
            }
        }
        out
    }

    #[inline(always)]
    fn bits(self, value: Self::U, shift: i32, mask: u8) -> Self::U {
        let mut out = value;
        for half in 0..2 {
            simd! {
                let count = _mm_cvtsi32_si128(shift.abs());
                let shifted = match shift < 0 {
                    true => _mm256_srl_epi16(value[half], count),
                    false => _mm256_sll_epi16(value[half], count),
                };
                out[half] = _mm256_and_si256(shifted, _mm256_set1_epi8(mask as i8));
            }
        }
        out
    }
    #[inline(always)]
    fn or_bytes(self, a: Self::U, b: Self::U) -> Self::U {
        simd!([_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])])
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U {
        simd! {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, indices[0]), _mm256_shuffle_epi8(table, indices[1])]
        }
    }

    #[inline(always)]
    fn open(self, sum: Self::I) -> Self::P {
        if VNNI { sum } else { self.splat_i32(0) }
    }
    #[inline(always)]
    fn multiply(self, products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P {
        let values = i32::from_ne_bytes(values.map(|value| value as u8));
        let mut out = products;
        for half in 0..2 {
            out[half] = simd! {
                let values = _mm256_set1_epi32(values);
                if VNNI {
                    _mm256_dpbusd_avx_epi32(products[half], codes[half], values)
                } else {
                    add_pairs(products[half], codes[half], values)
                }
            };
        }
        out
    }
    #[inline(always)]
    fn multiply_biased(self, products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P {
        if VNNI {
            return self.multiply(products, codes, values);
        }
        let values = i32::from_ne_bytes(values.map(|value| value as u8));
        let mut out = products;
        for half in 0..2 {
            simd! {
                // Unsigned codes up to 255 would saturate the pairs, so the sign moves to the values:
                // |code - 128| · ±value is at most 128 · 127, and a pair at most 32512.
                let signed = _mm256_xor_si256(codes[half], _mm256_set1_epi8(-128));
                let values = _mm256_sign_epi8(_mm256_set1_epi32(values), signed);
                // One product fills the pairs: there is none yet that it could be added to.
                out[half] = _mm256_maddubs_epi16(_mm256_abs_epi8(signed), values);
            }
        }
        out
    }
    #[inline(always)]
    fn close(self, sum: Self::I, products: Self::P) -> Self::I {
        if VNNI {
            return products;
        }
        simd! {
            let ones = _mm256_set1_epi16(1);
            [_mm256_add_epi32(sum[0], _mm256_madd_epi16(products[0], ones)),
             _mm256_add_epi32(sum[1], _mm256_madd_epi16(products[1], ones))]
        }
    }
    #[inline(always)]
    fn start_biased(self, negated_sum_of_values: Self::I) -> Self::I {
        if VNNI { self.shift_left::<7>(negated_sum_of_values) } else { self.splat_i32(0) }
    }
}

/// `sums` and the products of codes, below 128, with values, two of them added: at most 2 · 127 · 127 = 32258, and a run of
/// such pairs fits by its length.
///
/// The compiler knows how to add in another order, one sum of a tile after the other, and then keeps every value of all of
/// them on the stack: so it is not told what is added.
///
/// # Safety
/// The processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_pairs(mut sums: __m256i, codes: __m256i, values: __m256i) -> __m256i {
    // SAFETY: AVX2 by this function's own condition; registers alone are touched.
    unsafe {
        asm!(
            "vpmaddubsw {pairs}, {codes}, {values}",
            "vpaddw {sums}, {sums}, {pairs}",
            pairs = out(ymm_reg) _,
            sums = inout(ymm_reg) sums,
            codes = in(ymm_reg) codes,
            values = in(ymm_reg) values,
            options(nomem, nostack, preserves_flags)
        );
    }
    sums
}
