//! What the formats have in common: a matrix is tiles of 16 rows, a tile is a run of cells, and a cell holds a few
//! columns of the tile's 16 rows in the order in which the kernels load them.

#![allow(unsafe_code)]

use half::{bf16, f16};

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

/// The packed unit of a weight format.
pub(crate) trait Cell: Zeroable + Send + Sync {
    /// Packs a tile: `rows` are the file's bytes of its 16 rows, `cells` as many as those make.
    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]);

    /// The columns in a cell.
    const COLS: usize;

    /// The value at a row below 16 and a column below [`COLS`](Self::COLS).
    fn value(&self, row: usize, col: usize) -> f32;
}

/// A cell of unscaled floats: one column.
pub(crate) trait FloatCell: Cell {
    fn load<S: Simd>(&self, simd: S) -> S::F;
}

/// A cell of small unsigned codes, in blocks of 32 columns: value = scale · (code - [`OFFSET`](Self::OFFSET)) + minimum.
pub(crate) trait QuantizedCell: Cell {
    /// Bytes of one row of the cell in the file.
    const FILE_BYTES: usize;
    /// What is subtracted from the codes; with 128 codes take all 8 bits, otherwise at most 7.
    const OFFSET: i32;
    /// Scales per block: one for 32 columns, or two for 16 each.
    const SCALES: usize;
    /// Whether there is a minimum.
    const HAS_MINIMUM: bool;

    /// Packs the file's blocks of 16 rows.
    fn pack(&mut self, rows: [&[u8]; TILE_ROWS]);

    /// The codes of block `block`, arranged as [`Codes`].
    fn codes<S: Simd>(&self, simd: S, block: usize) -> [S::U; 8];
    /// Scale `index`, below [`SCALES`](Self::SCALES), of block `block` for each row.
    fn scale<S: Simd>(&self, simd: S, block: usize, index: usize) -> S::F;
    /// The minimum of block `block` for each row.
    #[inline(always)]
    fn minimum<S: Simd>(&self, simd: S, _block: usize) -> S::F {
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

/// Column `col`, below 32, of `row` in packed nibbles.
pub(crate) fn nibble(nibbles: &Nibbles, row: usize, col: usize) -> u8 {
    let byte = nibbles[col / 4 % 4][4 * row + col % 4];
    if col < 16 { byte & 15 } else { byte >> 4 }
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

macro_rules! float_cell {
    ($value:ty, $bytes:literal, $load:ident) => {
        impl Cell for [$value; TILE_ROWS] {
            const COLS: usize = 1;

            fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
                let rows = rows.map(|row| row.as_chunks::<$bytes>().0);
                for (col, cell) in cells.iter_mut().enumerate() {
                    *cell = rows.map(|row| <$value>::from_le_bytes(row[col]));
                }
            }

            fn value(&self, row: usize, _col: usize) -> f32 {
                f32::from(self[row])
            }
        }

        impl FloatCell for [$value; TILE_ROWS] {
            #[inline(always)]
            fn load<S: Simd>(&self, simd: S) -> S::F {
                simd.$load(self)
            }
        }
    };
}

float_cell!(f32, 4, load);
float_cell!(f16, 2, load_f16);
float_cell!(bf16, 2, load_bf16);

/// Declares that a `repr(C)` struct of numbers is one.
macro_rules! zeroable {
    ($cell:ty) => {
        // SAFETY: a struct of arrays of numbers, all of which are valid as zero bytes.
        unsafe impl Zeroable for $cell {}
    };
}

zeroable!(super::q4_0::Q4_0);
zeroable!(super::q4_1::Q4_1);
zeroable!(super::q8_0::Q8_0);
zeroable!(super::q4_k::Q4K);
zeroable!(super::q6_k::Q6K);
