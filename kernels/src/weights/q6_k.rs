//! Q6_K: 256 values of 6 bits, minus 32, with an 8-bit scale for each 16 and one f16 factor. In the file: 128 bytes of
//! low nibbles, 64 bytes of high pairs of bits, 16 scales, the factor.

use half::f16;

use super::cell::{BLOCK, Cell, Nibbles, QuantizedCell, TILE_ROWS, half_at, nibble, pack_blocks, unpack_nibbles};
use crate::simd::Simd;

/// 256 columns of 16 rows in 3360 bytes: 6.56 bits per value, as in the file.
///
/// Crumbs are the codes' upper two bits: bits `2q..2q + 2` of vector h belong to vector `4h + q` of the codes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Q6K {
    nibbles: [Nibbles; 8],
    crumbs: [[[u8; 64]; 2]; 8],
    scales: [[[i8; TILE_ROWS]; 2]; 8],
    factors: [f16; TILE_ROWS],
}

impl Cell for Q6K {
    const COLS: usize = 8 * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let (block, col) = (col / BLOCK, col % BLOCK);
        let (vector, byte) = (col / 4, 4 * row + col % 4);
        let crumb = self.crumbs[block][vector / 4][byte] >> (vector % 4 * 2) & 3;
        let code = nibble(&self.nibbles[block], row, col) | crumb << 4;
        let scale = self.factors[row].to_f32() * f32::from(self.scales[block][col / 16][row]);
        scale * (f32::from(code) - 32.0)
    }
}

impl QuantizedCell for Q6K {
    const FILE_BYTES: usize = 210;
    const CODE_BITS: u32 = 6;
    const OFFSET: i32 = 32;
    const SCALES: usize = 2;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        self.crumbs = [[[0; 64]; 2]; 8];
        for (row, bytes) in rows.into_iter().enumerate() {
            self.factors[row] = half_at(bytes, 208);
            for block in 0..8 {
                for half in 0..2 {
                    self.scales[block][half][row] = bytes[192 + 2 * block + half] as i8;
                }
                // A file's half block of 128 values is four of ours: two by low nibbles, two by high ones.
                let (part, quarter) = (block / 4, block % 4);
                let low = &bytes[part * 64 + quarter % 2 * 32..][..32];
                let high = &bytes[128 + part * 32..][..32];
                for col in 0..16 {
                    let nibble = |col: usize| low[col] >> (quarter / 2 * 4) & 15;
                    let byte = 4 * row + col % 4;
                    self.nibbles[block][col / 4][byte] = nibble(col) | nibble(col + 16) << 4;
                    for half in 0..2 {
                        let crumb = high[col + 16 * half] >> (2 * quarter) & 3;
                        self.crumbs[block][half][byte] |= crumb << (col / 4 * 2);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        let mut codes = unpack_nibbles(simd, &self.nibbles[block]);
        for half in 0..2 {
            let crumbs = simd.load_bytes(&self.crumbs[block][half]);
            for quarter in 0..4 {
                codes[4 * half + quarter] = simd.with_crumbs(codes[4 * half + quarter], crumbs, quarter);
            }
        }
        codes
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, block: usize, index: usize) -> S::F {
        simd.mul(simd.load_f16(&self.factors), simd.load_i8(&self.scales[block][index]))
    }
}
