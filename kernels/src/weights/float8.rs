//! Eight-bit floats that share a scale, as integers of 8 bits: 32 of them under a power of two of their own, up to fifteen halvings
//! of the scale.
//!
//! A file's row here is a sequence of groups of 64: f16 scale, a byte with the halvings of the first 32 values in its low half and
//! those of the others in its high one, then signed bytes.

use half::f16;

use super::cell::{BLOCK, Cell, Codes, QuantizedCell, TILE_ROWS, code, copy_codes, half_at, load_codes, pack_blocks};
use crate::simd::Simd;

/// Columns that share a scale.
const GROUP: usize = 64;

/// 64 columns of 16 rows in 1072 bytes: 8.38 bits per value. Codes are stored plus 128.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub(crate) struct Float8 {
    codes: [Codes; GROUP / BLOCK],
    scales: [f16; TILE_ROWS],
    halvings: [u8; TILE_ROWS],
}

impl Cell for Float8 {
    const COLS: usize = GROUP;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        step(self.scales[row], self.halvings[row], col / BLOCK) * (f32::from(code(&self.codes, row, col)) - 128.0)
    }
}

impl QuantizedCell for Float8 {
    const FILE_BYTES: usize = 3 + GROUP;
    const CODE_BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, group) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(group, 0);
            self.halvings[row] = group[2];
            copy_codes(&mut self.codes, row, &group[3..], 0x80);
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        load_codes(simd, &self.codes[block])
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, block: usize, _index: usize) -> S::F {
        let (first, second) = simd.load_nibbles(&self.halvings);
        let halvings = simd.round(if block == 0 { first } else { second });
        let power = simd.power_of_two(simd.sub_i32(simd.splat_i32(0), halvings));
        simd.mul(simd.load_f16(&self.scales), power)
    }
}

/// What the codes of block `block` of a group multiply.
fn step(scale: f16, halvings: u8, block: usize) -> f32 {
    scale.to_f32() / f32::from(1_u16 << (halvings >> (4 * block) & 15))
}

/// The step and the codes of each 32 values of a file's group.
pub(crate) fn blocks(group: &[u8]) -> impl Iterator<Item = (f32, &[u8])> {
    let codes = group[3..].chunks_exact(BLOCK).enumerate();
    codes.map(|(block, codes)| (step(half_at(group, 0), group[2], block), codes))
}
