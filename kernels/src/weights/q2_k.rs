//! Q2_K: 256 values of 2 bits in sixteen groups of 16, each with a 4-bit scale and a 4-bit minimum under one f16 factor
//! for the scales and one for the minimums, which are subtracted. In the file: 16 bytes with a scale in the low and a
//! minimum in the high nibble, 64 bytes of which each 32 hold four blocks, two bits each, then both factors.

use half::f16;

use super::cell::{
    BLOCK, Cell, Crumbs, QuantizedCell, TILE_ROWS, crumb, half_at, pack_blocks, set_crumb, unpack_crumbs,
};
use crate::simd::Simd;

/// 256 columns of 16 rows in 1344 bytes: 2.63 bits per value, as in the file.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Q2K {
    crumbs: [Crumbs; 8],
    /// For each group of 16 columns: the scale in the low nibble, the minimum in the high one.
    groups: [[[u8; TILE_ROWS]; 2]; 8],
    scale_factors: [f16; TILE_ROWS],
    minimum_factors: [f16; TILE_ROWS],
}

impl Cell for Q2K {
    const COLS: usize = 8 * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let (block, col) = (col / BLOCK, col % BLOCK);
        let group = self.groups[block][col / 16][row];
        let scale = self.scale_factors[row].to_f32() * f32::from(group & 15);
        let minimum = self.minimum_factors[row].to_f32() * f32::from(group >> 4);
        scale * f32::from(crumb(&self.crumbs[block], row, col)) - minimum
    }
}

impl QuantizedCell for Q2K {
    const FILE_BYTES: usize = 84;
    const CODE_BITS: u32 = 2;
    const OFFSET: i32 = 0;
    const SCALES: usize = 2;
    const MINIMUMS: usize = 2;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        self.crumbs = [[[0; 64]; 2]; 8];
        for (row, bytes) in rows.into_iter().enumerate() {
            self.scale_factors[row] = half_at(bytes, 80);
            self.minimum_factors[row] = half_at(bytes, 82);
            for block in 0..8 {
                for half in 0..2 {
                    self.groups[block][half][row] = bytes[2 * block + half];
                }
                for col in 0..BLOCK {
                    let code = bytes[16 + block / 4 * 32 + col] >> (block % 4 * 2) & 3;
                    set_crumb(&mut self.crumbs[block], row, col, code);
                }
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        unpack_crumbs(simd, &self.crumbs[block])
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, block: usize, index: usize) -> S::F {
        let (scales, _) = simd.load_nibbles(&self.groups[block][index]);
        simd.mul(simd.load_f16(&self.scale_factors), scales)
    }

    #[inline(always)]
    fn minimum<S: Simd>(&self, simd: S, block: usize, index: usize) -> S::F {
        let (_, minimums) = simd.load_nibbles(&self.groups[block][index]);
        simd.sub(simd.splat(0.0), simd.mul(simd.load_f16(&self.minimum_factors), minimums))
    }
}
