//! Q4_0: 32 values of 4 bits, minus 8, with one scale. In the file: f16 scale, then 16 bytes that pair value i with
//! i + 16.

use half::f16;

use super::cell::{BLOCK, Cell, Nibbles, QuantizedCell, TILE_ROWS, half_at, nibble, pack_blocks, unpack_nibbles, word};
use crate::simd::Simd;

/// 32 columns of 16 rows in 288 bytes: 4.5 bits per value, as in the file.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Q4_0 {
    nibbles: Nibbles,
    scales: [f16; TILE_ROWS],
}

impl Cell for Q4_0 {
    const COLS: usize = BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        self.scales[row].to_f32() * (f32::from(nibble(&self.nibbles, row, col)) - 8.0)
    }
}

impl QuantizedCell for Q4_0 {
    const FILE_BYTES: usize = 18;
    const CODE_BITS: u32 = 4;
    const OFFSET: i32 = 8;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, block) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(block, 0);
            for j in 0..4 {
                self.nibbles[j][4 * row..][..4].copy_from_slice(&word(block, 2 + 4 * j));
            }
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
}
