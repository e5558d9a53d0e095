//! What the formats have in common: a matrix is tiles of 16 rows, a tile is a run of cells, and a cell holds a few
//! columns of the tile's 16 rows in the order in which the kernels load them.

#![allow(unsafe_code)]

use half::f16;

use crate::buffer::Zeroable;
use crate::simd::{LANES, Simd};

/// Rows of a tile: one per lane.
pub(crate) const TILE_ROWS: usize = LANES;

/// Columns that share an activation scale.
pub(crate) const BLOCK: usize = 32;

/// Codes of one block of 16 rows in one byte each: vector j, lane r holds columns `4j..4j + 4` of row r.
pub(crate) type Codes = [[u8; 64]; 8];

/// Codes of one block of 16 rows in 4 bits each: the low nibbles of vector j are vector j of [`Codes`], the high
/// nibbles vector j + 4.
pub(crate) type Nibbles = [[u8; 64]; 4];

/// Codes of one block of 16 rows in 2 bits each: bits `2q..2q + 2` of vector h are vector `4h + q` of [`Codes`].
pub(crate) type Crumbs = [[u8; 64]; 2];

/// One bit of every code of a block of 16 rows: bit j belongs to vector j of [`Codes`].
pub(crate) type Plane = [u8; 64];

/// The packed unit of a weight format.
pub(crate) trait Cell: Zeroable + Send + Sync {
    /// Packs a tile: `rows` are the file's bytes of its 16 rows, `cells` as many as those make.
    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]);

    /// The columns in a cell.
    const COLS: usize;

    /// The value at a row below 16 and a column below [`COLS`](Self::COLS).
    fn value(&self, row: usize, col: usize) -> f32;
}

/// A cell of small unsigned codes, in blocks of 32 columns: value = scale · (code - [`OFFSET`](Self::OFFSET)) + minimum.
pub(crate) trait QuantizedCell: Cell {
    /// Bytes of one row of the cell in the file.
    const FILE_BYTES: usize;
    /// Bits of a code.
    const CODE_BITS: u32;
    /// What is subtracted from the codes: with 8 bits 128.
    const OFFSET: i32;
    /// Scales per block: one for 32 columns, or two for 16 each.
    const SCALES: usize;
    /// Minimums per block: none, one for 32 columns, or two for 16 each.
    const MINIMUMS: usize;
    /// Parts whose sum a weight is. Each block of columns is so many blocks of the cell, one after the other, that have codes
    /// and scales of their own.
    const PARTS: usize = 1;

    /// Packs the file's blocks of 16 rows.
    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]);

    /// The codes of block `block`, arranged as [`Codes`].
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8];
    /// Scale `index`, below [`SCALES`](Self::SCALES), of block `block` for each row.
    fn scale<S: Simd>(&self, simd: S, block: usize, index: usize) -> S::F;
    /// Minimum `index`, below [`MINIMUMS`](Self::MINIMUMS), of block `block` for each row.
    #[inline(always)]
    fn minimum<S: Simd>(&self, simd: S, _block: usize, _index: usize) -> S::F {
        simd.splat(0.0)
    }
}

/// [`Cell::pack_tile`] for quantized cells.
pub(crate) fn pack_blocks<C: QuantizedCell>(cells: &mut [C], rows: &[&[u8]; TILE_ROWS]) {
    for (i, cell) in cells.iter_mut().enumerate() {
        cell.pack(rows.map(|row| &row[i * C::FILE_BYTES..][..C::FILE_BYTES]));
    }
}

/// Four bytes of `bytes` from `at`.
pub(crate) fn word(bytes: &[u8], at: usize) -> [u8; 4] {
    [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]
}

/// The f16 at `at`.
pub(crate) fn half_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Column `col` of `row` in blocks of codes.
pub(crate) fn code(blocks: &[Codes], row: usize, col: usize) -> u8 {
    blocks[col / BLOCK][col % BLOCK / 4][4 * row + col % 4]
}

/// Copies a row's codes of the file into blocks, each with the bits of `flip` turned over.
pub(crate) fn copy_codes(blocks: &mut [Codes], row: usize, from: &[u8], flip: u8) {
    for (codes, from) in blocks.iter_mut().zip(from.chunks_exact(BLOCK)) {
        for j in 0..8 {
            codes[j][4 * row..][..4].copy_from_slice(&word(from, 4 * j).map(|byte| byte ^ flip));
        }
    }
}

/// Codes that are bytes already.
#[inline(always)]
pub(crate) fn load_codes<S: Simd>(simd: S, from: &Codes) -> [S::U; 8] {
    let mut codes = [simd.load_bytes(&from[0]); 8];
    for j in 1..8 {
        codes[j] = simd.load_bytes(&from[j]);
    }
    codes
}

/// Column `col`, below 32, of `row` in packed nibbles.
pub(crate) fn nibble(nibbles: &Nibbles, row: usize, col: usize) -> u8 {
    let byte = nibbles[col / 4 % 4][4 * row + col % 4];
    if col < 16 { byte & 15 } else { byte >> 4 }
}

/// Writes column `col` of `row` into nibbles that are zero there.
pub(crate) fn set_nibble(nibbles: &mut Nibbles, row: usize, col: usize, code: u8) {
    nibbles[col / 4 % 4][4 * row + col % 4] |= code << (col / 16 * 4);
}

/// Copies a row's 16 bytes of the file that pair column i with i + 16.
pub(crate) fn copy_nibbles(nibbles: &mut Nibbles, row: usize, pairs: &[u8]) {
    for j in 0..4 {
        nibbles[j][4 * row..][..4].copy_from_slice(&pairs[4 * j..][..4]);
    }
}

/// Column `col`, below 32, of `row` in packed crumbs.
pub(crate) fn crumb(crumbs: &Crumbs, row: usize, col: usize) -> u8 {
    crumbs[col / 16][4 * row + col % 4] >> (col / 4 % 4 * 2) & 3
}

/// Writes column `col` of `row` into crumbs that are zero there.
pub(crate) fn set_crumb(crumbs: &mut Crumbs, row: usize, col: usize, code: u8) {
    crumbs[col / 16][4 * row + col % 4] |= code << (col / 4 % 4 * 2);
}

/// The bit of column `col`, below 32, of `row`.
pub(crate) fn plane_bit(plane: &Plane, row: usize, col: usize) -> u8 {
    plane[4 * row + col % 4] >> (col / 4) & 1
}

/// Writes the bit of column `col` of `row` into a plane that is zero there.
pub(crate) fn set_bit(plane: &mut Plane, row: usize, col: usize, bit: u8) {
    plane[4 * row + col % 4] |= bit << (col / 4);
}

/// Writes a row's 32 bits of the file, column 0 in the lowest.
pub(crate) fn pack_top_bits(plane: &mut Plane, row: usize, bits: &[u8]) {
    for col in 0..BLOCK {
        set_bit(plane, row, col, bits[col / 8] >> (col % 8) & 1);
    }
}

/// Packed crumbs as [`Codes`].
#[inline(always)]
pub(crate) fn unpack_crumbs<S: Simd>(simd: S, crumbs: &Crumbs) -> [S::U; 8] {
    let halves = [simd.load_bytes(&crumbs[0]), simd.load_bytes(&crumbs[1])];
    let mut codes = [halves[0]; 8];
    for j in 0..8 {
        codes[j] = simd.bits(halves[j / 4], -2 * (j as i32 % 4), 3);
    }
    codes
}

/// [`Codes`] with the bits of `plane` in place `to`, which is zero in all of them.
#[inline(always)]
pub(crate) fn add_plane<S: Simd>(simd: S, mut codes: [S::U; 8], plane: &Plane, to: i32) -> [S::U; 8] {
    let bits = simd.load_bytes(plane);
    for j in 0..8 {
        codes[j] = simd.or_bytes(codes[j], simd.bits(bits, to - j as i32, 1 << to));
    }
    codes
}

/// The entries of `table` that packed nibbles name, as [`Codes`].
#[inline(always)]
pub(crate) fn lookup_nibbles<S: Simd>(simd: S, nibbles: &Nibbles, table: &[u8; 16]) -> [S::U; 8] {
    let mut codes = unpack_nibbles(simd, nibbles);
    for j in 0..8 {
        codes[j] = simd.lookup(table, codes[j]);
    }
    codes
}

/// The two halves of packed nibbles, as [`Codes`].
#[inline(always)]
pub(crate) fn unpack_nibbles<S: Simd>(simd: S, nibbles: &Nibbles) -> [S::U; 8] {
    let [a, b, c, d] = [0, 1, 2, 3].map(|j: usize| &nibbles[j]);
    let [a, b, c, d] = [simd.load_bytes(a), simd.load_bytes(b), simd.load_bytes(c), simd.load_bytes(d)];
    [
        simd.low_nibbles(a),
        simd.low_nibbles(b),
        simd.low_nibbles(c),
        simd.low_nibbles(d),
        simd.high_nibbles(a),
        simd.high_nibbles(b),
        simd.high_nibbles(c),
        simd.high_nibbles(d),
    ]
}

/// Declares that a `repr(C)` struct of numbers is one.
macro_rules! zeroable {
    ($cell:ty) => {
        // SAFETY: a struct of arrays of numbers, all of which are valid as zero bytes.
        unsafe impl Zeroable for $cell {}
    };
}

zeroable!(super::q4_1::Q4_1);
zeroable!(super::q8_0::Q8_0);
zeroable!(super::q4_k::Q4K);
zeroable!(super::q6_k::Q6K);
zeroable!(super::q2_k::Q2K);
zeroable!(super::q3_k::Q3K);
zeroable!(super::q5_0::Q5_0);
zeroable!(super::q5_1::Q5_1);
zeroable!(super::q5_k::Q5K);
zeroable!(super::iq4_nl::Iq4Nl);
zeroable!(super::iq4_xs::Iq4Xs);
zeroable!(super::mxfp4::Mxfp4);
zeroable!(super::int4::Int4G32);
zeroable!(super::float8::Float8);

// SAFETY: a struct of arrays of numbers, all of which are valid as zero bytes.
unsafe impl<const BLOCKS: usize, const MINIMUMS: usize> Zeroable for super::grouped::Int4<BLOCKS, MINIMUMS> {}
// SAFETY: a struct of arrays of numbers, all of which are valid as zero bytes.
unsafe impl<const BLOCKS: usize> Zeroable for super::grouped::Int8<BLOCKS> {}
// SAFETY: a struct of arrays of numbers, all of which are valid as zero bytes.
unsafe impl<const BLOCKS: usize> Zeroable for super::uint8::Uint8<BLOCKS> {}
// SAFETY: a struct of arrays of numbers, all of which are valid as zero bytes.
unsafe impl<const IS_FP4: bool> Zeroable for super::bnb4::Bnb4<IS_FP4> {}
// SAFETY: a struct of arrays of numbers, all of which are valid as zero bytes.
unsafe impl<const BLOCKS: usize, const PLANES: usize> Zeroable for super::int2::Int2<BLOCKS, PLANES> {}
