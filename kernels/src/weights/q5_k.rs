//! Q5_K: Q4_K with a fifth bit. In the file: both factors, 12 bytes of scales and minimums, 32 bytes of which bit b
//! belongs to the values of block b, then 128 bytes of which each 32 pair value i of one block with value i of the next.

use half::f16;

use super::cell::{
    BLOCK, Cell, Nibbles, Plane, QuantizedCell, TILE_ROWS, add_plane, half_at, nibble, pack_blocks, plane_bit, set_bit,
    set_nibble, unpack_nibbles,
};
use super::q4_k::scale_and_minimum;
use crate::simd::Simd;

/// 256 columns of 16 rows in 2880 bytes: 5.63 bits per value, against 5.5 in the file, because scales and minimums
/// take 8 bits each.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Q5K {
    nibbles: [Nibbles; 8],
    top: [Plane; 8],
    scales: [[u8; TILE_ROWS]; 8],
    minimums: [[u8; TILE_ROWS]; 8],
    scale_factors: [f16; TILE_ROWS],
    minimum_factors: [f16; TILE_ROWS],
}

impl Cell for Q5K {
    const COLS: usize = 8 * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let (block, col) = (col / BLOCK, col % BLOCK);
        let code = nibble(&self.nibbles[block], row, col) | plane_bit(&self.top[block], row, col) << 4;
        let scale = self.scale_factors[row].to_f32() * f32::from(self.scales[block][row]);
        let minimum = self.minimum_factors[row].to_f32() * f32::from(self.minimums[block][row]);
        scale * f32::from(code) - minimum
    }
}

impl QuantizedCell for Q5K {
    const FILE_BYTES: usize = 176;
    const CODE_BITS: u32 = 5;
    const OFFSET: i32 = 0;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 1;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        (self.nibbles, self.top) = ([[[0; 64]; 4]; 8], [[0; 64]; 8]);
        for (row, bytes) in rows.into_iter().enumerate() {
            self.scale_factors[row] = half_at(bytes, 0);
            self.minimum_factors[row] = half_at(bytes, 2);
            for block in 0..8 {
                (self.scales[block][row], self.minimums[block][row]) = scale_and_minimum(&bytes[4..16], block);
                for col in 0..BLOCK {
                    let low = bytes[48 + block / 2 * 32 + col] >> (block % 2 * 4) & 15;
                    set_nibble(&mut self.nibbles[block], row, col, low);
                    set_bit(&mut self.top[block], row, col, bytes[16 + col] >> block & 1);
                }
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        add_plane(simd, unpack_nibbles(simd, &self.nibbles[block]), &self.top[block], 4)
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, block: usize, _index: usize) -> S::F {
        simd.mul(simd.load_f16(&self.scale_factors), simd.load_u8(&self.scales[block]))
    }

    #[inline(always)]
    fn minimum<S: Simd>(&self, simd: S, block: usize, _index: usize) -> S::F {
        let minimum = simd.mul(simd.load_f16(&self.minimum_factors), simd.load_u8(&self.minimums[block]));
        simd.sub(simd.splat(0.0), minimum)
    }
}
