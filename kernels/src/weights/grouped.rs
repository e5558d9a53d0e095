//! Integers in groups wider than a block, as GPTQ, AWQ and compressed-tensors write them, put into one row-major form.
//!
//! A file's row here is a sequence of groups. Four bits: f16 scale, f16 minimum (`-scale · zero point`) unless 8 is zero, then
//! for each 32 values 16 bytes that pair value i with i + 16. Eight bits: f16 scale, then signed bytes.

use half::f16;

use super::cell::{
    BLOCK, Cell, Codes, Nibbles, QuantizedCell, TILE_ROWS, code, copy_codes, copy_nibbles, half_at, load_codes, nibble,
    pack_blocks, unpack_nibbles,
};
use crate::simd::Simd;

/// `32 · BLOCKS` columns of 16 rows in `256 · BLOCKS + 32` bytes, and 32 more with a minimum: 4.25 bits per value in groups of 128,
/// 4.5 in groups of 64. Without one a code stands for as many steps as it is above 8: at 4.13 and 4.25 bits, and in groups of 32,
/// which are GGUF's Q4_0, at 4.5.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Int4<const BLOCKS: usize, const MINIMUMS: usize> {
    nibbles: [Nibbles; BLOCKS],
    scales: [f16; TILE_ROWS],
    minimums: [[f16; TILE_ROWS]; MINIMUMS],
}

impl<const BLOCKS: usize, const MINIMUMS: usize> Cell for Int4<BLOCKS, MINIMUMS> {
    const COLS: usize = BLOCKS * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let code = i32::from(nibble(&self.nibbles[col / BLOCK], row, col % BLOCK)) - Self::OFFSET;
        let product = self.scales[row].to_f32() * code as f32;
        self.minimums.iter().fold(product, |value, minimums| value + minimums[row].to_f32())
    }
}

impl<const BLOCKS: usize, const MINIMUMS: usize> QuantizedCell for Int4<BLOCKS, MINIMUMS> {
    const FILE_BYTES: usize = 2 + 2 * MINIMUMS + 16 * BLOCKS;
    const CODE_BITS: u32 = 4;
    const OFFSET: i32 = if MINIMUMS == 0 { 8 } else { 0 };
    const SCALES: usize = 1;
    const MINIMUMS: usize = MINIMUMS;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, group) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(group, 0);
            for (index, minimums) in self.minimums.iter_mut().enumerate() {
                minimums[row] = half_at(group, 2 + 2 * index);
            }
            for (nibbles, pairs) in self.nibbles.iter_mut().zip(group[2 + 2 * MINIMUMS..].chunks_exact(BLOCK / 2)) {
                copy_nibbles(nibbles, row, pairs);
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        unpack_nibbles(simd, &self.nibbles[block])
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        simd.load_f16(&self.scales)
    }

    #[inline(always)]
    fn minimum<S: Simd>(&self, simd: S, _block: usize, index: usize) -> S::F {
        simd.load_f16(&self.minimums[index])
    }
}

/// `32 · BLOCKS` columns of 16 rows in `512 · BLOCKS + 32` bytes: 8.13 bits per value in groups of 128, 8.25 in groups of
/// 64. Codes are stored plus 128.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Int8<const BLOCKS: usize> {
    codes: [Codes; BLOCKS],
    scales: [f16; TILE_ROWS],
}

impl<const BLOCKS: usize> Cell for Int8<BLOCKS> {
    const COLS: usize = BLOCKS * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        self.scales[row].to_f32() * (f32::from(code(&self.codes, row, col)) - 128.0)
    }
}

impl<const BLOCKS: usize> QuantizedCell for Int8<BLOCKS> {
    const FILE_BYTES: usize = 2 + BLOCK * BLOCKS;
    const CODE_BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 0;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        for (row, group) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(group, 0);
            copy_codes(&mut self.codes, row, &group[2..], 0x80);
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
}
