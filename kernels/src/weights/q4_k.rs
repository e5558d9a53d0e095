//! Q4_K: 256 values of 4 bits in eight blocks of 32, each with a 6-bit scale and a 6-bit minimum under one f16 factor
//! for the scales and one for the minimums, which are subtracted. In the file: both factors, 12 bytes of scales and
//! minimums, then 128 bytes of which each 32 pair value i of one block with value i of the next.

use half::f16;

use super::cell::{BLOCK, Cell, Nibbles, QuantizedCell, TILE_ROWS, half_at, nibble, pack_blocks, unpack_nibbles, word};
use crate::simd::Simd;

/// 256 columns of 16 rows in 2368 bytes: 4.63 bits per value, against 4.5 in the file, because scales and minimums
/// take 8 bits each.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Q4K {
    nibbles: [Nibbles; 8],
    scales: [[u8; TILE_ROWS]; 8],
    minimums: [[u8; TILE_ROWS]; 8],
    scale_factors: [f16; TILE_ROWS],
    minimum_factors: [f16; TILE_ROWS],
}

impl Cell for Q4K {
    const COLS: usize = 8 * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let block = col / BLOCK;
        let scale = self.scale_factors[row].to_f32() * f32::from(self.scales[block][row]);
        let minimum = self.minimum_factors[row].to_f32() * f32::from(self.minimums[block][row]);
        scale * f32::from(nibble(&self.nibbles[block], row, col % BLOCK)) - minimum
    }
}

impl QuantizedCell for Q4K {
    const FILE_BYTES: usize = 144;
    const CODE_BITS: u32 = 4;
    const OFFSET: i32 = 0;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 1;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, bytes) in rows.into_iter().enumerate() {
            self.scale_factors[row] = half_at(bytes, 0);
            self.minimum_factors[row] = half_at(bytes, 2);
            for block in 0..8 {
                (self.scales[block][row], self.minimums[block][row]) = scale_and_minimum(&bytes[4..16], block);
                for j in 0..4 {
                    let at = 16 + block / 2 * 32 + 4 * j;
                    let (first, second) = (word(bytes, at), word(bytes, at + 16));
                    let shift = block % 2 * 4;
                    for i in 0..4 {
                        self.nibbles[block][j][4 * row + i] = first[i] >> shift & 15 | (second[i] >> shift & 15) << 4;
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        unpack_nibbles(simd, &self.nibbles[block])
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

/// The 6-bit scale and minimum of a block from the 12 packed bytes: blocks 0–3 have a byte each for both, whose top two
/// bits are the top bits of blocks 4–7.
pub(crate) fn scale_and_minimum(packed: &[u8], block: usize) -> (u8, u8) {
    if block < 4 {
        return (packed[block] & 63, packed[block + 4] & 63);
    }
    let low = packed[block + 4];
    (low & 15 | packed[block - 4] >> 6 << 4, low >> 4 | packed[block] >> 6 << 4)
}
