//! IQ4_XS: 256 indices of 4 bits into IQ4_NL's values in eight blocks of 32, each with a 6-bit scale, minus 32, under
//! one f16 factor. In the file: the factor, two bytes with the scales' top bits, four with their low nibbles, then for
//! each block 16 bytes that pair value i with i + 16.

use half::f16;

use super::cell::{
    BLOCK, Cell, Nibbles, QuantizedCell, TILE_ROWS, copy_nibbles, half_at, lookup_nibbles, nibble, pack_blocks,
};
use super::iq4_nl::VALUES;
use crate::simd::Simd;

/// 256 columns of 16 rows in 2208 bytes: 4.31 bits per value, against 4.25 in the file, because scales take 8 bits each.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Iq4Xs {
    nibbles: [Nibbles; 8],
    scales: [[i8; TILE_ROWS]; 8],
    factors: [f16; TILE_ROWS],
}

impl Cell for Iq4Xs {
    const COLS: usize = 8 * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let block = col / BLOCK;
        let code = VALUES[usize::from(nibble(&self.nibbles[block], row, col % BLOCK))];
        let scale = self.factors[row].to_f32() * f32::from(self.scales[block][row]);
        scale * (f32::from(code) - 128.0)
    }
}

impl QuantizedCell for Iq4Xs {
    const FILE_BYTES: usize = 136;
    const CODE_BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, bytes) in rows.into_iter().enumerate() {
            self.factors[row] = half_at(bytes, 0);
            let high = u16::from_le_bytes([bytes[2], bytes[3]]);
            for block in 0..8 {
                let low = bytes[4 + block / 2] >> (block % 2 * 4) & 15;
                self.scales[block][row] = (low | ((high >> (2 * block) & 3) as u8) << 4) as i8 - 32;
                copy_nibbles(&mut self.nibbles[block], row, &bytes[8 + 16 * block..][..16]);
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        lookup_nibbles(simd, &self.nibbles[block], &VALUES)
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, block: usize, _index: usize) -> S::F {
        simd.mul(simd.load_f16(&self.factors), simd.load_i8(&self.scales[block]))
    }
}
