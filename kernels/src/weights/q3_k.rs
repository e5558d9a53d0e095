//! Q3_K: 256 values of 3 bits, minus 4, with a 6-bit scale, minus 32, for each 16 and one f16 factor. In the file: 32
//! bytes of which bit b is the top bit of the values of block b, 64 bytes of which each 32 hold four blocks' lower bits,
//! 12 bytes of scales, the factor.

use half::f16;

use super::cell::{
    BLOCK, Cell, Crumbs, Plane, QuantizedCell, TILE_ROWS, add_plane, crumb, half_at, pack_blocks, plane_bit, set_bit,
    set_crumb, unpack_crumbs,
};
use crate::simd::Simd;

/// 256 columns of 16 rows in 1824 bytes: 3.56 bits per value, against 3.44 in the file, because scales take 8 bits each.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Q3K {
    crumbs: [Crumbs; 8],
    top: [Plane; 8],
    scales: [[[i8; TILE_ROWS]; 2]; 8],
    factors: [f16; TILE_ROWS],
}

impl Cell for Q3K {
    const COLS: usize = 8 * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let (block, col) = (col / BLOCK, col % BLOCK);
        let code = crumb(&self.crumbs[block], row, col) | plane_bit(&self.top[block], row, col) << 2;
        let scale = self.factors[row].to_f32() * f32::from(self.scales[block][col / 16][row]);
        scale * (f32::from(code) - 4.0)
    }
}

impl QuantizedCell for Q3K {
    const FILE_BYTES: usize = 110;
    const CODE_BITS: u32 = 3;
    const OFFSET: i32 = 4;
    const SCALES: usize = 2;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        (self.crumbs, self.top) = ([[[0; 64]; 2]; 8], [[0; 64]; 8]);
        for (row, bytes) in rows.into_iter().enumerate() {
            self.factors[row] = half_at(bytes, 108);
            for block in 0..8 {
                for half in 0..2 {
                    self.scales[block][half][row] = q3_k_scale(&bytes[96..108], 2 * block + half);
                }
                for col in 0..BLOCK {
                    let low = bytes[32 + block / 4 * 32 + col] >> (block % 4 * 2) & 3;
                    set_crumb(&mut self.crumbs[block], row, col, low);
                    set_bit(&mut self.top[block], row, col, bytes[col] >> block & 1);
                }
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        add_plane(simd, unpack_crumbs(simd, &self.crumbs[block]), &self.top[block], 2)
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, block: usize, index: usize) -> S::F {
        simd.mul(simd.load_f16(&self.factors), simd.load_i8(&self.scales[block][index]))
    }
}

/// The scale of group `group` from the 12 packed bytes: eight bytes pair the low nibbles of groups i and i + 8, four
/// bytes hold the top two bits of groups i, i + 4, i + 8 and i + 12.
pub(crate) fn q3_k_scale(packed: &[u8], group: usize) -> i8 {
    let low = packed[group % 8] >> (group / 8 * 4) & 15;
    let high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}
