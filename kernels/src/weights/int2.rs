//! Integers of 2 bits in groups of 32 and more, as GPTQ writes them, and of 3 bits: these with a plane of their top bits.
//!
//! A file's row here is a sequence of groups: f16 scale, a byte with the zero point, which is below 8, then for each 32
//! values 8 bytes of their lower two bits and, of 3 bits, 4 bytes of their top ones, value 0 in the lowest.

use std::array::from_fn;

use half::f16;

use super::cell::{
    BLOCK, Cell, Crumbs, Plane, QuantizedCell, TILE_ROWS, add_plane, crumb, half_at, pack_blocks, plane_bit, set_bit,
    set_crumb, unpack_crumbs,
};
use super::zero_points::ZeroPoints;
use crate::simd::Simd;

/// Bytes before a group's codes.
const HEAD: usize = 3;

/// `32 · BLOCKS` columns of 16 rows in `(128 + 64 · PLANES) · BLOCKS + 40` bytes: 2.16 and 3.16 bits per value in groups of
/// 128, 2.08 and 3.08 in groups of 256, as of rows by one scale. A plane makes codes of 3 bits.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(crate) struct Int2<const BLOCKS: usize, const PLANES: usize> {
    crumbs: [Crumbs; BLOCKS],
    top: [[Plane; PLANES]; BLOCKS],
    scales: [f16; TILE_ROWS],
    zero_points: ZeroPoints,
}

impl<const BLOCKS: usize, const PLANES: usize> Int2<BLOCKS, PLANES> {
    /// Bytes of a block's codes in the file.
    const BLOCK_BYTES: usize = 8 + 4 * PLANES;
}

impl<const BLOCKS: usize, const PLANES: usize> Cell for Int2<BLOCKS, PLANES> {
    const COLS: usize = BLOCKS * BLOCK;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        pack_blocks(cells, rows);
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        let (block, col) = (col / BLOCK, col % BLOCK);
        let top = self.top[block].iter().fold(0, |_, plane| plane_bit(plane, row, col) << 2);
        let code = crumb(&self.crumbs[block], row, col) | top;
        self.scales[row].to_f32() * (f32::from(code) - f32::from(self.zero_points.all()[row]))
    }
}

impl<const BLOCKS: usize, const PLANES: usize> QuantizedCell for Int2<BLOCKS, PLANES> {
    const FILE_BYTES: usize = HEAD + Self::BLOCK_BYTES * BLOCKS;
    const CODE_BITS: u32 = 2 + PLANES as u32;
    const OFFSET: i32 = 0;
    const SCALES: usize = 1;
    const MINIMUMS: usize = 1;

    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]) {
        (self.crumbs, self.top) = ([[[0; 64]; 2]; BLOCKS], [[[0; 64]; PLANES]; BLOCKS]);
        self.zero_points = ZeroPoints::of(rows.map(zero_point));
        for (row, group) in rows.into_iter().enumerate() {
            self.scales[row] = half_at(group, 0);
            for (block, bytes) in blocks(group, Self::BLOCK_BYTES).enumerate() {
                for (col, code) in codes_of(bytes).into_iter().enumerate() {
                    set_crumb(&mut self.crumbs[block], row, col, code & 3);
                    self.top[block].iter_mut().for_each(|plane| set_bit(plane, row, col, code >> 2));
                }
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8] {
        let mut codes = unpack_crumbs(simd, &self.crumbs[block]);
        for plane in &self.top[block] {
            codes = add_plane(simd, codes, plane, 2);
        }
        codes
    }

    #[inline(always)]
    fn scale<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        simd.load_f16(&self.scales)
    }

    #[inline(always)]
    fn minimum<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        self.zero_points.minimums(simd, &self.scales)
    }
}

/// The zero point of a file's group.
pub(crate) fn zero_point(group: &[u8]) -> u8 {
    group[2] & 7
}

/// The blocks of a file's group, of so many bytes.
pub(crate) fn blocks(group: &[u8], block_bytes: usize) -> impl Iterator<Item = &[u8]> {
    group[HEAD..].chunks_exact(block_bytes)
}

/// The codes of a file's block.
pub(crate) fn codes_of(block: &[u8]) -> [u8; BLOCK] {
    let (low, top) = block.split_at(8);
    let top = |i: usize| top.get(i / 8).map_or(0, |bits| bits >> (i % 8) & 1);
    from_fn(|i| low[i / 4] >> (i % 4 * 2) & 3 | top(i) << 2)
}
