//! Integers of 4 bits in groups of 32, as GPTQ, AWQ and compressed-tensors write them. Wider groups have a minimum instead of a
//! zero point ([`super::grouped`]); in so narrow ones it would be a twelfth of the weights.
//!
//! A file's row here is a sequence of groups: f16 scale, a byte with the zero point, which is below 16, then 16 bytes that pair
//! value i with i + 16.

use half::f16;

use super::cell::{
    BLOCK, Cell, Nibbles, QuantizedCell, TILE_ROWS, copy_nibbles, half_at, nibble, pack_blocks, unpack_nibbles,
};
use super::zero_points::ZeroPoints;
use crate::simd::Simd;

/// 32 columns of 16 rows in 296 bytes: 4.63 bits per value.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(crate) struct Int4G32 {
    nibbles: Nibbles,
    scales: [f16; TILE_ROWS],
    zero_points: ZeroPoints,
}

impl Cell for Int4G32 {
    const COLS: usize = BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let code = nibble(&self.nibbles, row, col);
        self.scales[row].to_f32() * (f32::from(code) - f32::from(self.zero_points.all()[row]))
    }
}

impl QuantizedCell for Int4G32 {
    const FILE_BYTES: usize = 19;
    const CODE_BITS: u32 = 4;
    const OFFSET: i32 = 0;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 1;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        self.zero_points = ZeroPoints::of(rows.map(zero_point));
        for (row, group) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(group, 0);
            copy_nibbles(&mut self.nibbles, row, nibbles(group));
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, _block: usize) -> [S::U; 8] {
        unpack_nibbles(simd, &self.nibbles)
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        simd.load_f16(&self.scales)
    }

    #[inline(always)]
    fn minimum<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        self.zero_points.minimums(simd, &self.scales)
    }
}

/// The zero point of a file's group.
pub(crate) fn zero_point(group: &[u8]) -> u8 {
    group[2] & 15
}

/// The codes of a file's group.
pub(crate) fn nibbles(group: &[u8]) -> &[u8] {
    &group[3..]
}
