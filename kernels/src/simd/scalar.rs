//! Lanes as arrays: the reference, and what runs where no vector set is known.

use half::{bf16, f16};

use super::{LANES, Simd, widened};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar;

#[inline(always)]
fn map<A: Copy, B: Copy, R: Copy + Default>(a: [A; LANES], b: [B; LANES], f: impl Fn(A, B) -> R) -> [R; LANES] {
    let mut out = [R::default(); LANES];
    for lane in 0..LANES {
        out[lane] = f(a[lane], b[lane]);
    }
    out
}

impl Simd for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type U = [u8; 64];
    type P = [i32; LANES];

    const REGISTERS: bool = false;
    const MANY_REGISTERS: bool = false;
    const WIDE_PRODUCTS: bool = true;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        [value; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        *from
    }
    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        *to = value;
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = c;
        for lane in 0..LANES {
            out[lane] = a[lane].mul_add(b[lane], c[lane]);
        }
        out
    }
    #[inline(always)]
    fn sum(self, mut value: Self::F) -> f32 {
        for width in [8, 4, 2, 1] {
            for lane in 0..width {
                value[lane] += value[lane + width];
            }
        }
        value[0]
    }
    #[inline(always)]
    fn largest(self, value: Self::F) -> f32 {
        value.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn keep_first(self, lanes: usize, value: Self::F, mut other: Self::F) -> Self::F {
        let lanes = lanes.min(LANES);
        other[..lanes].copy_from_slice(&value[..lanes]);
        other
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        from.map(f16::to_f32)
    }
    #[inline(always)]
    fn splat_of_pair(self, pair: [bf16; 2], part: usize) -> Self::F {
        self.splat(widened(pair[part]))
    }
    #[inline(always)]
    fn load_of_pairs(self, from: &[[bf16; 2]; LANES], part: usize) -> Self::F {
        from.map(|pair| widened(pair[part]))
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> Self::F {
        from.map(f32::from)
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        from.map(f32::from)
    }

    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::I {
        [value; LANES]
    }
    #[inline(always)]
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I {
        map(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn sub_i32(self, a: Self::I, b: Self::I) -> Self::I {
        map(a, b, i32::wrapping_sub)
    }
    #[inline(always)]
    fn shift_left<const BITS: u32>(self, value: Self::I) -> Self::I {
        value.map(|lane| lane << BITS)
    }
    #[inline(always)]
    fn sum_i32(self, value: Self::I) -> i32 {
        value.into_iter().fold(0, i32::wrapping_add)
    }
    #[inline(always)]
    fn to_f32(self, value: Self::I) -> Self::F {
        value.map(|lane| lane as f32)
    }
    #[inline(always)]
    fn round(self, value: Self::F) -> Self::I {
        value.map(|lane| lane.round_ties_even() as i32)
    }
    #[inline(always)]
    fn store_i8(self, value: Self::I, to: &mut [i8; LANES]) {
        *to = value.map(|lane| lane as i8);
    }
    #[inline(always)]
    fn power_of_two(self, exponent: Self::I) -> Self::F {
        exponent.map(|n| f32::from_bits(((n + 127) << 23) as u32))
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; 64]) -> Self::U {
        *from
    }
    #[inline(always)]
    fn store_bytes(self, value: Self::U, to: &mut [u8; 64]) {
        *to = value;
    }
    #[inline(always)]
    fn low_nibbles(self, value: Self::U) -> Self::U {
        value.map(|byte| byte & 15)
    }
    #[inline(always)]
    fn high_nibbles(self, value: Self::U) -> Self::U {
        value.map(|byte| byte >> 4)
    }
    #[inline(always)]
    fn with_crumbs(self, mut nibbles: Self::U, crumbs: Self::U, quarter: usize) -> Self::U {
        for (nibble, crumb) in nibbles.iter_mut().zip(crumbs) {
            *nibble |= (crumb >> (2 * quarter) & 3) << 4;
        }
        nibbles
    }

    #[inline(always)]
    fn bits(self, value: Self::U, shift: i32, mask: u8) -> Self::U {
        value.map(|byte| if shift < 0 { byte >> -shift } else { byte << shift } & mask)
    }
    #[inline(always)]
    fn or_bytes(self, a: Self::U, b: Self::U) -> Self::U {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U {
        indices.map(|index| table[usize::from(index)])
    }

    #[inline(always)]
    fn open(self, sum: Self::I) -> Self::P {
        sum
    }
    #[inline(always)]
    fn multiply(self, mut products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P {
        for lane in 0..LANES {
            for i in 0..4 {
                products[lane] += i32::from(codes[4 * lane + i]) * i32::from(values[i]);
            }
        }
        products
    }
    #[inline(always)]
    fn multiply_biased(self, mut products: Self::P, codes: Self::U, values: [i8; 4]) -> Self::P {
        for lane in 0..LANES {
            for i in 0..4 {
                products[lane] += (i32::from(codes[4 * lane + i]) - 128) * i32::from(values[i]);
            }
        }
        products
    }
    #[inline(always)]
    fn close(self, _sum: Self::I, products: Self::P) -> Self::I {
        products
    }
    #[inline(always)]
    fn start_biased(self, _negated_sum_of_values: Self::I) -> Self::I {
        [0; LANES]
    }
}
