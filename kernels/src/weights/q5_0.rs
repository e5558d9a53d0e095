//! Q5_0: 32 values of 5 bits, minus 16, with one scale. In the file: f16 scale, 4 bytes with the values' top bits, then
//! 16 bytes of the lower ones that pair value i with i + 16.

use half::f16;

use super::cell::{
    BLOCK, Cell, Nibbles, Plane, QuantizedCell, TILE_ROWS, add_plane, copy_nibbles, half_at, nibble, pack_blocks,
    pack_top_bits, plane_bit, unpack_nibbles,
};
use crate::simd::Simd;

/// 32 columns of 16 rows in 352 bytes: 5.5 bits per value, as in the file.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Q5_0 {
    nibbles: Nibbles,
    top: Plane,
    scales: [f16; TILE_ROWS],
}

impl Cell for Q5_0 {
    const COLS: usize = BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let code = nibble(&self.nibbles, row, col) | plane_bit(&self.top, row, col) << 4;
        self.scales[row].to_f32() * (f32::from(code) - 16.0)
    }
}

impl QuantizedCell for Q5_0 {
    const FILE_BYTES: usize = 22;
    const CODE_BITS: u32 = 5;
    const OFFSET: i32 = 16;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        self.top = [0; 64];
        for (row, block) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(block, 0);
            pack_top_bits(&mut self.top, row, &block[2..6]);
            copy_nibbles(&mut self.nibbles, row, &block[6..22]);
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, _block: usize) -> [S::U; 8] {
        add_plane(simd, unpack_nibbles(simd, &self.nibbles), &self.top, 4)
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        simd.load_f16(&self.scales)
    }
}
