//! MXFP4 (OCP Microscaling Formats 1.0): 32 floats of a sign, two bits of exponent and one of mantissa under one shared
//! power of two. In the file: the power's exponent plus 127, then 16 bytes that pair value i with i + 16.

use super::cell::{BLOCK, Cell, Nibbles, QuantizedCell, TILE_ROWS, copy_nibbles, lookup_nibbles, nibble, pack_blocks};
use crate::simd::Simd;

/// Twice the sixteen values, which makes them whole, plus 16.
pub(crate) const DOUBLED: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

/// 32 columns of 16 rows in 272 bytes: 4.25 bits per value, as in the file.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub(crate) struct Mxfp4 {
    nibbles: Nibbles,
    exponents: [u8; TILE_ROWS],
}

impl Cell for Mxfp4 {
    const COLS: usize = BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let doubled = DOUBLED[usize::from(nibble(&self.nibbles, row, col))];
        let power = f32::from_bits(u32::from(self.exponents[row]) << 23);
        0.5 * power * (f32::from(doubled) - 16.0)
    }
}

impl QuantizedCell for Mxfp4 {
    const FILE_BYTES: usize = 17;
    const CODE_BITS: u32 = 5;
    const OFFSET: i32 = 16;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, block) in rows.into_iter().enumerate() {
            self.exponents[row] = block[0];
            copy_nibbles(&mut self.nibbles, row, &block[1..17]);
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, _block: usize) -> [S::U; 8] {
        lookup_nibbles(simd, &self.nibbles, &DOUBLED)
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        let exponents = simd.sub_i32(simd.round(simd.load_u8(&self.exponents)), simd.splat_i32(127));
        simd.mul(simd.splat(0.5), simd.power_of_two(exponents))
    }
}
