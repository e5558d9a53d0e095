//! Integers of 8 bits around a zero point, as GPTQ and compressed-tensors write them: `scale · (code - zero point)`.
//!
//! A file's row here is a sequence of groups of 32 or 64: f16 scale, a byte with the zero point, then the codes.

use half::f16;

use super::cell::{BLOCK, Cell, Codes, QuantizedCell, TILE_ROWS, code, copy_codes, half_at, load_codes, pack_blocks};
use crate::simd::Simd;

/// `32 · BLOCKS` columns of 16 rows in `512 · BLOCKS + 48` bytes: 8.38 bits per value in groups of 64, 8.75 in groups of
/// 32.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub(crate) struct Uint8<const BLOCKS: usize> {
    codes: [Codes; BLOCKS],
    scales: [f16; TILE_ROWS],
    zero_points: [u8; TILE_ROWS],
}

impl<const BLOCKS: usize> Cell for Uint8<BLOCKS> {
    const COLS: usize = BLOCKS * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        self.scales[row].to_f32() * (f32::from(code(&self.codes, row, col)) - f32::from(self.zero_points[row]))
    }
}

impl<const BLOCKS: usize> QuantizedCell for Uint8<BLOCKS> {
    const FILE_BYTES: usize = 3 + BLOCK * BLOCKS;
    const CODE_BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 1;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, group) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(group, 0);
            self.zero_points[row] = group[2];
            copy_codes(&mut self.codes, row, &group[3..], 0);
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        load_codes(simd, &self.codes[block])
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        simd.load_f16(&self.scales)
    }

    /// What the zero point lies below 128.
    #[inline(always)]
    fn minimum<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        let below = simd.sub(simd.splat(128.0), simd.load_u8(&self.zero_points));
        simd.mul(simd.load_f16(&self.scales), below)
    }
}

/// The values of a file's group.
pub(crate) fn values(group: &[u8]) -> impl Iterator<Item = f32> + '_ {
    let (scale, zero_point) = (half_at(group, 0).to_f32(), f32::from(group[2]));
    group[3..].iter().map(move |code| scale * (f32::from(*code) - zero_point))
}
