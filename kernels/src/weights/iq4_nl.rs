//! IQ4_NL: 32 indices of 4 bits into sixteen values that lie closer together near zero, with one scale. In the file:
//! f16 scale, then 16 bytes that pair value i with i + 16.

use half::f16;

use super::cell::{
    BLOCK, Cell, Nibbles, QuantizedCell, TILE_ROWS, copy_nibbles, half_at, lookup_nibbles, nibble, pack_blocks,
};
use crate::simd::Simd;

/// The sixteen values (`ggml-common.h`, `kvalues_iq4nl`), plus 128.
pub(crate) const VALUES: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// 32 columns of 16 rows in 288 bytes: 4.5 bits per value, as in the file.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Iq4Nl {
    nibbles: Nibbles,
    scales: [f16; TILE_ROWS],
}

impl Cell for Iq4Nl {
    const COLS: usize = BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let code = VALUES[usize::from(nibble(&self.nibbles, row, col))];
        self.scales[row].to_f32() * (f32::from(code) - 128.0)
    }
}

impl QuantizedCell for Iq4Nl {
    const FILE_BYTES: usize = 18;
    const CODE_BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, block) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(block, 0);
            copy_nibbles(&mut self.nibbles, row, &block[2..18]);
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, _block: usize) -> [S::U; 8] {
        lookup_nibbles(simd, &self.nibbles, &VALUES)
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        simd.load_f16(&self.scales)
    }
}
