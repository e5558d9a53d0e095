//! bitsandbytes' 4 bits: 64 indices into sixteen numbers from -1 to 1, which the block's largest magnitude multiplies
//! (Dettmers et al. 2023). In a file's row here: that magnitude in f16, then for each 32 values 16 bytes that pair value i
//! with i + 16.
//!
//! The numbers are no multiples of one that fits a byte: rounded to 1/127 they are off by 0.4 to 0.5 % of their own size, root
//! mean square, and in bf16 by 0.11 %. As the sum of two bytes, of steps of 1/127 and of 1/32512, by 0.0016 %, and each block
//! is multiplied twice.

use half::f16;

use super::WeightType;
use super::cell::{
    BLOCK, Cell, Nibbles, QuantizedCell, TILE_ROWS, copy_nibbles, half_at, lookup_nibbles, nibble, pack_blocks,
};
use crate::simd::Simd;

/// What NF4's indices name (Dettmers et al. 2023, appendix E).
pub(crate) const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// What FP4's name: a sign, two bits of exponent, and one of mantissa, but for the smallest.
pub(crate) const FP4: [f32; 16] = [
    0.0,
    1.0 / 192.0,
    2.0 / 3.0,
    1.0,
    1.0 / 3.0,
    0.5,
    1.0 / 6.0,
    0.25,
    0.0,
    -1.0 / 192.0,
    -2.0 / 3.0,
    -1.0,
    -1.0 / 3.0,
    -0.5,
    -1.0 / 6.0,
    -0.25,
];

/// The numbers that the indices of such a type name; `None` for any other type.
pub(super) fn numbers(weight_type: WeightType) -> Option<&'static [f32; 16]> {
    match weight_type {
        WeightType::NF4 => Some(&NF4),
        WeightType::FP4 => Some(&FP4),
        _ => None,
    }
}

/// Columns that share a largest magnitude.
const GROUP: usize = 64;

/// Steps of the coarse byte from 0 to 1.
const COARSE: f32 = 127.0;
/// And of the fine one.
const FINE: f32 = 256.0 * COARSE;

/// 64 columns of 16 rows in 544 bytes: 4.25 bits per value. The numbers are FP4's or NF4's.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Bnb4<const IS_FP4: bool> {
    nibbles: [Nibbles; GROUP / BLOCK],
    largest: [f16; TILE_ROWS],
}

impl<const IS_FP4: bool> Bnb4<IS_FP4> {
    /// The coarse and the fine byte of each number, plus 128.
    const BYTES: [[u8; 16]; 2] = if IS_FP4 { bytes(&FP4) } else { bytes(&NF4) };
}

/// The nearest sums of two bytes, plus 128 each.
const fn bytes(numbers: &[f32; 16]) -> [[u8; 16]; 2] {
    let (mut bytes, mut i) = ([[0; 16]; 2], 0);
    while i < 16 {
        let rounding = if numbers[i] < 0.0 { -0.5 } else { 0.5 };
        let steps = (numbers[i] * FINE + rounding) as i32;
        let coarse = (steps + 128) >> 8;
        (bytes[0][i], bytes[1][i]) = ((coarse + 128) as u8, (steps - 256 * coarse + 128) as u8);
        i += 1;
    }
    bytes
}

impl<const IS_FP4: bool> Cell for Bnb4<IS_FP4> {
    const COLS: usize = GROUP;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let index = usize::from(nibble(&self.nibbles[col / BLOCK], row, col % BLOCK));
        let [coarse, fine] = Self::BYTES.map(|bytes| f32::from(bytes[index]) - 128.0);
        self.largest[row].to_f32() * ((256.0 * coarse + fine) / FINE)
    }
}

impl<const IS_FP4: bool> QuantizedCell for Bnb4<IS_FP4> {
    const FILE_BYTES: usize = 2 + GROUP / 2;
    const CODE_BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 0;
    const PARTS: usize = 2;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, group) in rows.into_iter().enumerate() {
            self.largest[row] = half_at(group, 0);
            for (nibbles, pairs) in self.nibbles.iter_mut().zip(group[2..].chunks_exact(BLOCK / 2)) {
                copy_nibbles(nibbles, row, pairs);
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        lookup_nibbles(simd, &self.nibbles[block / 2], &Self::BYTES[block % 2])
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, block: usize, _index: usize) -> S::F {
        let step = if block.is_multiple_of(2) { 1.0 / COARSE } else { 1.0 / FINE };
        simd.mul(simd.load_f16(&self.largest), simd.splat(step))
    }
}

/// The values of a file's group.
pub(crate) fn values<'a>(numbers: &'a [f32; 16], group: &'a [u8]) -> impl Iterator<Item = f32> + 'a {
    let index = |col: usize| group[2 + col / BLOCK * 16 + col % 16] >> (col / 16 % 2 * 4) & 15;
    (0..GROUP).map(move |col| half_at(group, 0).to_f32() * numbers[usize::from(index(col))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_bytes_are_as_near_as_they_can_be() {
        for (numbers, [coarse, fine]) in [(NF4, Bnb4::<false>::BYTES), (FP4, Bnb4::<true>::BYTES)] {
            for i in 0..16 {
                let steps = 256 * (i32::from(coarse[i]) - 128) + i32::from(fine[i]) - 128;
                let error = f64::from(steps) / f64::from(FINE) - f64::from(numbers[i]);
                assert!(error.abs() <= 0.51 / f64::from(FINE), "{}: {error:e}", numbers[i]);
            }
        }
    }
}
