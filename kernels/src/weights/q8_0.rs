//! Q8_0: 32 values of 8 signed bits with one scale. In the file: f16 scale, then 32 bytes.

use std::slice;

use half::f16;

use super::cell::{BLOCK, Cell, Codes, QuantizedCell, TILE_ROWS, code, copy_codes, half_at, load_codes, pack_blocks};
use crate::simd::Simd;

/// 32 columns of 16 rows in 544 bytes: 8.5 bits per value, as in the file. Codes are stored plus 128.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Q8_0 {
    codes: Codes,
    scales: [f16; TILE_ROWS],
}

impl Cell for Q8_0 {
    const COLS: usize = BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        self.scales[row].to_f32() * (f32::from(code(slice::from_ref(&self.codes), row, col)) - 128.0)
    }
}

impl QuantizedCell for Q8_0 {
    const FILE_BYTES: usize = 34;
    const CODE_BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, block) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(block, 0);
            copy_codes(slice::from_mut(&mut self.codes), row, &block[2..], 0x80);
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, _block: usize) -> [S::U; 8] {
        load_codes(simd, &self.codes)
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        simd.load_f16(&self.scales)
    }
}
