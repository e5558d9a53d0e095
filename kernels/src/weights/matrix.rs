//! The packed matrix: validated once, then only read.

use std::ops::Range;

use half::{bf16, f16};

use super::WeightType;
use super::bnb4::Bnb4;
use super::cell::{Cell, TILE_ROWS};
use super::float8::Float8;
use super::grouped::{Int4, Int8};
use super::int2::Int2;
use super::int4::Int4G32;
use super::uint8::Uint8;
use super::{iq4_nl::Iq4Nl, iq4_xs::Iq4Xs, mxfp4::Mxfp4};
use super::{q2_k::Q2K, q3_k::Q3K, q4_1::Q4_1, q4_k::Q4K};
use super::{q5_0::Q5_0, q5_1::Q5_1, q5_k::Q5K, q6_k::Q6K, q8_0::Q8_0};
use crate::Pool;
use crate::buffer::Buffer;

/// Why bytes do not make the matrix they should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A row does not hold whole blocks.
    #[error("a row of {cols} values is no whole number of {weight_type} blocks of {block_elements}")]
    PartialBlock {
        /// The type's name.
        weight_type: &'static str,
        /// Values per row.
        cols: usize,
        /// Values per block.
        block_elements: usize,
    },
    /// The bytes are too few or too many.
    #[error("{rows} rows of {cols} {weight_type} values take {expected} bytes, not {actual}")]
    Length {
        /// The type's name.
        weight_type: &'static str,
        /// Rows asked for.
        rows: usize,
        /// Values per row.
        cols: usize,
        /// Bytes that the shape takes.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// An order of columns that leaves an input out.
    #[error("the order of {cols} columns does not name each of {inputs} inputs once")]
    Order {
        /// Columns.
        cols: usize,
        /// Columns that have an input.
        inputs: usize,
    },
    /// A side is zero, or the size overflows.
    #[error("{rows} rows of {cols} values are no matrix")]
    Degenerate {
        /// Rows asked for.
        rows: usize,
        /// Values per row.
        cols: usize,
    },
}

/// What an order has for a column that multiplies nothing.
pub const NO_INPUT: u32 = u32::MAX;

/// Of a file's bytes that are read at a time: more than the threads of a large machine share, and little beside a model.
const STRIP_BYTES: usize = 16 << 20;

/// A weight matrix `[rows = outputs, cols = inputs]`, repacked into tiles of 16 rows at the file's own bits per weight.
///
/// Rows beyond a multiple of 16 are padded with zeros.
#[derive(Debug)]
pub struct PackedMatrix {
    weight_type: WeightType,
    rows: usize,
    cols: usize,
    tiles: Tiles,
    /// The input of each column, where that is not its own number.
    order: Option<Box<[u32]>>,
    inputs: usize,
}

/// The cells of all tiles, tile after tile, each from column 0 on.
#[derive(Debug)]
pub(crate) enum Tiles {
    F32(Buffer<[f32; TILE_ROWS]>),
    F16(Buffer<[f16; TILE_ROWS]>),
    BF16(Buffer<[[bf16; 2]; TILE_ROWS]>),
    Q4_0(Buffer<Int4<1, 0>>),
    Q4_1(Buffer<Q4_1>),
    Q8_0(Buffer<Q8_0>),
    Q4K(Buffer<Q4K>),
    Q6K(Buffer<Q6K>),
    Q5_0(Buffer<Q5_0>),
    Q5_1(Buffer<Q5_1>),
    Q2K(Buffer<Q2K>),
    Q3K(Buffer<Q3K>),
    Q5K(Buffer<Q5K>),
    IQ4NL(Buffer<Iq4Nl>),
    IQ4XS(Buffer<Iq4Xs>),
    MXFP4(Buffer<Mxfp4>),
    NF4(Buffer<Bnb4<false>>),
    FP4(Buffer<Bnb4<true>>),
    I2G32(Buffer<Int2<1, 0>>),
    I2G64(Buffer<Int2<2, 0>>),
    I2G128(Buffer<Int2<4, 0>>),
    I2G256(Buffer<Int2<8, 0>>),
    I3G32(Buffer<Int2<1, 1>>),
    I3G64(Buffer<Int2<2, 1>>),
    I3G128(Buffer<Int2<4, 1>>),
    I3G256(Buffer<Int2<8, 1>>),
    I4G32(Buffer<Int4G32>),
    I4G64(Buffer<Int4<2, 1>>),
    I4G128(Buffer<Int4<4, 1>>),
    S4G64(Buffer<Int4<2, 0>>),
    S4G128(Buffer<Int4<4, 0>>),
    I8G64(Buffer<Int8<2>>),
    I8G128(Buffer<Int8<4>>),
    U8G32(Buffer<Uint8<1>>),
    U8G64(Buffer<Uint8<2>>),
    F8G64(Buffer<Float8>),
}

/// Evaluates an expression for the cells of whichever format.
macro_rules! for_any {
    ($tiles:expr, $cells:ident => $body:expr) => {
        match $tiles {
            Tiles::F32($cells) => $body,
            Tiles::F16($cells) => $body,
            Tiles::BF16($cells) => $body,
            Tiles::Q4_0($cells) => $body,
            Tiles::Q4_1($cells) => $body,
            Tiles::Q8_0($cells) => $body,
            Tiles::Q4K($cells) => $body,
            Tiles::Q6K($cells) => $body,
            Tiles::Q5_0($cells) => $body,
            Tiles::Q5_1($cells) => $body,
            Tiles::Q2K($cells) => $body,
            Tiles::Q3K($cells) => $body,
            Tiles::Q5K($cells) => $body,
            Tiles::IQ4NL($cells) => $body,
            Tiles::IQ4XS($cells) => $body,
            Tiles::MXFP4($cells) => $body,
            Tiles::NF4($cells) => $body,
            Tiles::FP4($cells) => $body,
            Tiles::I2G32($cells) => $body,
            Tiles::I2G64($cells) => $body,
            Tiles::I2G128($cells) => $body,
            Tiles::I2G256($cells) => $body,
            Tiles::I3G32($cells) => $body,
            Tiles::I3G64($cells) => $body,
            Tiles::I3G128($cells) => $body,
            Tiles::I3G256($cells) => $body,
            Tiles::I4G32($cells) => $body,
            Tiles::I4G64($cells) => $body,
            Tiles::I4G128($cells) => $body,
            Tiles::S4G64($cells) => $body,
            Tiles::S4G128($cells) => $body,
            Tiles::I8G64($cells) => $body,
            Tiles::I8G128($cells) => $body,
            Tiles::U8G32($cells) => $body,
            Tiles::U8G64($cells) => $body,
            Tiles::F8G64($cells) => $body,
        }
    };
}

impl Tiles {
    /// Those of a matrix of zeros.
    fn zeroed(weight_type: WeightType, rows: usize, cols: usize) -> Tiles {
        match weight_type {
            WeightType::F32 => Tiles::F32(cells(rows, cols)),
            WeightType::F16 => Tiles::F16(cells(rows, cols)),
            WeightType::BF16 => Tiles::BF16(cells(rows, cols)),
            WeightType::Q4_0 => Tiles::Q4_0(cells(rows, cols)),
            WeightType::Q4_1 => Tiles::Q4_1(cells(rows, cols)),
            WeightType::Q8_0 => Tiles::Q8_0(cells(rows, cols)),
            WeightType::Q4K => Tiles::Q4K(cells(rows, cols)),
            WeightType::Q6K => Tiles::Q6K(cells(rows, cols)),
            WeightType::Q5_0 => Tiles::Q5_0(cells(rows, cols)),
            WeightType::Q5_1 => Tiles::Q5_1(cells(rows, cols)),
            WeightType::Q2K => Tiles::Q2K(cells(rows, cols)),
            WeightType::Q3K => Tiles::Q3K(cells(rows, cols)),
            WeightType::Q5K => Tiles::Q5K(cells(rows, cols)),
            WeightType::IQ4NL => Tiles::IQ4NL(cells(rows, cols)),
            WeightType::IQ4XS => Tiles::IQ4XS(cells(rows, cols)),
            WeightType::MXFP4 => Tiles::MXFP4(cells(rows, cols)),
            WeightType::NF4 => Tiles::NF4(cells(rows, cols)),
            WeightType::FP4 => Tiles::FP4(cells(rows, cols)),
            WeightType::I2G32 => Tiles::I2G32(cells(rows, cols)),
            WeightType::I2G64 => Tiles::I2G64(cells(rows, cols)),
            WeightType::I2G128 => Tiles::I2G128(cells(rows, cols)),
            WeightType::I2G256 => Tiles::I2G256(cells(rows, cols)),
            WeightType::I3G32 => Tiles::I3G32(cells(rows, cols)),
            WeightType::I3G64 => Tiles::I3G64(cells(rows, cols)),
            WeightType::I3G128 => Tiles::I3G128(cells(rows, cols)),
            WeightType::I3G256 => Tiles::I3G256(cells(rows, cols)),
            WeightType::I4G32 => Tiles::I4G32(cells(rows, cols)),
            WeightType::I4G64 => Tiles::I4G64(cells(rows, cols)),
            WeightType::I4G128 => Tiles::I4G128(cells(rows, cols)),
            WeightType::S4G64 => Tiles::S4G64(cells(rows, cols)),
            WeightType::S4G128 => Tiles::S4G128(cells(rows, cols)),
            WeightType::I8G64 => Tiles::I8G64(cells(rows, cols)),
            WeightType::I8G128 => Tiles::I8G128(cells(rows, cols)),
            WeightType::U8G32 => Tiles::U8G32(cells(rows, cols)),
            WeightType::U8G64 => Tiles::U8G64(cells(rows, cols)),
            WeightType::F8G64 => Tiles::F8G64(cells(rows, cols)),
        }
    }
}

impl PackedMatrix {
    /// Repacks the `bytes` of a row-major file tensor; the bytes are not needed afterwards.
    pub fn pack(
        pool: &Pool,
        weight_type: WeightType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Result<Self, ShapeError> {
        validated_row_bytes(weight_type, rows, cols, bytes.len())?;
        let mut packed = PackedMatrix::zeroed(weight_type, rows, cols)?;
        packed.fill(pool, 0..rows, bytes)?;
        Ok(packed)
    }

    /// A matrix of zeros, to be [`fill`](Self::fill)ed some rows at a time, so that it is never held beside all of the file's
    /// bytes. Its pages take memory when they are filled.
    pub fn zeroed(weight_type: WeightType, rows: usize, cols: usize) -> Result<Self, ShapeError> {
        checked_bytes(weight_type, rows, cols)?;
        let tiles = Tiles::zeroed(weight_type, rows, cols);
        Ok(PackedMatrix { weight_type, rows, cols, tiles, order: None, inputs: cols })
    }

    /// Rows that are filled at a time, one after the other: whole tiles of about [`STRIP_BYTES`] where a row has `row_bytes` in
    /// the file.
    pub fn strips(rows: usize, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
        let height = (STRIP_BYTES / row_bytes.max(1)).next_multiple_of(TILE_ROWS).max(TILE_ROWS);
        (0..rows).step_by(height).map(move |first| first..rows.min(first + height))
    }

    /// Repacks the `bytes` of some rows of a row-major file tensor.
    ///
    /// # Panics
    /// When the rows are no tiles of this matrix.
    pub fn fill(&mut self, pool: &Pool, rows: Range<usize>, bytes: &[u8]) -> Result<(), ShapeError> {
        let is_whole = rows.end == self.rows || rows.end.is_multiple_of(TILE_ROWS) && rows.end < self.rows;
        assert!(rows.start.is_multiple_of(TILE_ROWS) && is_whole, "rows {rows:?} of {} are no tiles", self.rows);
        let row_bytes = validated_row_bytes(self.weight_type, rows.len(), self.cols, bytes.len())?;
        let source = Source { rows: rows.len(), cols: self.cols, row_bytes, bytes };
        for_any!(&mut self.tiles, cells => source.pack(pool, cells, rows.start / TILE_ROWS));
        Ok(())
    }

    /// The same with column `c` multiplying input `order[c]`, or nothing where that is [`NO_INPUT`]: how GPTQ sorts inputs by
    /// weight before it groups them.
    pub fn ordered(self, order: &[u32]) -> Result<Self, ShapeError> {
        let inputs = check_order(self.cols, order)?;
        Ok(PackedMatrix { order: Some(order.into()), inputs, ..self })
    }

    /// The input of each column, where that is not its own number.
    pub fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Inputs: as many as columns, but where an order leaves some of these without one.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The type of the file's values.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Resident bytes.
    pub fn bytes(&self) -> usize {
        for_any!(&self.tiles, cells => size_of_val::<[_]>(cells))
    }

    /// Writes row `row` as f32 into `out`, a value for each input: the gather of a token embedding.
    ///
    /// # Panics
    /// When `row` is out of range or `out` has another length.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.inputs, "a row has {} values", self.inputs);
        let Some(order) = &self.order else { return self.dequantize_columns(row, out) };
        let mut columns = vec![0.0; self.cols];
        self.dequantize_columns(row, &mut columns);
        let named = order.iter().zip(columns).filter(|(input, _)| **input != NO_INPUT);
        named.for_each(|(&input, value)| out[input as usize] = value);
    }

    fn dequantize_columns(&self, row: usize, out: &mut [f32]) {
        for_any!(&self.tiles, cells => dequantize(tile(cells, self.cols, row / TILE_ROWS), row % TILE_ROWS, out));
    }

    pub(crate) fn tiles(&self) -> &Tiles {
        &self.tiles
    }
}

/// How many inputs the order of `cols` columns names; refuses one that does not name each of them once.
pub(crate) fn check_order(cols: usize, order: &[u32]) -> Result<usize, ShapeError> {
    let inputs = order.iter().filter(|input| **input != NO_INPUT).count();
    let mut seen = vec![false; inputs];
    let once = |&input: &u32| seen.get_mut(input as usize).is_some_and(|seen| !std::mem::replace(seen, true));
    match order.len() == cols && inputs > 0 && order.iter().filter(|input| **input != NO_INPUT).all(once) {
        true => Ok(inputs),
        false => Err(ShapeError::Order { cols, inputs }),
    }
}

/// The cells of tile `index` of a matrix of `cols` columns.
pub(crate) fn tile<C: Cell>(cells: &[C], cols: usize, index: usize) -> &[C] {
    let per_tile = cols.div_ceil(C::COLS);
    &cells[index * per_tile..][..per_tile]
}

fn dequantize<C: Cell>(cells: &[C], row: usize, out: &mut [f32]) {
    for (cell, out) in cells.iter().zip(out.chunks_mut(C::COLS)) {
        for (col, out) in out.iter_mut().enumerate() {
            *out = cell.value(row, col);
        }
    }
}

/// Bytes of a row in the file, where all rows have `actual` bytes together.
pub(crate) fn validated_row_bytes(
    weight_type: WeightType,
    rows: usize,
    cols: usize,
    actual: usize,
) -> Result<usize, ShapeError> {
    let [row_bytes, expected] = checked_bytes(weight_type, rows, cols)?;
    if actual != expected {
        return Err(ShapeError::Length { weight_type: weight_type.name(), rows, cols, expected, actual });
    }
    Ok(row_bytes)
}

/// Bytes of a row and of all rows in the file.
fn checked_bytes(weight_type: WeightType, rows: usize, cols: usize) -> Result<[usize; 2], ShapeError> {
    if rows == 0 || cols == 0 {
        return Err(ShapeError::Degenerate { rows, cols });
    }
    let (name, block_elements) = (weight_type.name(), weight_type.block_elements());
    if !cols.is_multiple_of(block_elements) {
        return Err(ShapeError::PartialBlock { weight_type: name, cols, block_elements });
    }
    let row_bytes = weight_type.row_bytes(cols).ok_or(ShapeError::Degenerate { rows, cols })?;
    let all = row_bytes.checked_mul(rows).ok_or(ShapeError::Degenerate { rows, cols })?;
    Ok([row_bytes, all])
}

/// The cells of a matrix of zeros.
fn cells<C: Cell>(rows: usize, cols: usize) -> Buffer<C> {
    Buffer::zeroed(rows.div_ceil(TILE_ROWS) * cols.div_ceil(C::COLS))
}

/// Some rows of a validated file tensor.
struct Source<'a> {
    rows: usize,
    cols: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

impl Source<'_> {
    /// Packs the rows into the tiles from `first_tile` on.
    fn pack<C: Cell>(&self, pool: &Pool, cells: &mut [C], first_tile: usize) {
        let per_tile = self.cols.div_ceil(C::COLS);
        let cells = &mut cells[first_tile * per_tile..][..self.rows.div_ceil(TILE_ROWS) * per_tile];
        let zeros = vec![0; self.row_bytes];
        pool.for_each(cells.chunks_exact_mut(per_tile).enumerate(), |(tile, cells)| {
            C::pack_tile(cells, &std::array::from_fn(|lane| self.row(tile * TILE_ROWS + lane).unwrap_or(&zeros)));
        });
    }

    fn row(&self, row: usize) -> Option<&[u8]> {
        (row < self.rows).then(|| &self.bytes[row * self.row_bytes..][..self.row_bytes])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::file_bytes;

    #[test]
    fn strips_make_the_same_matrix_as_all_rows_at_once() {
        let (pool, rows, cols) = (Pool::new(2).unwrap(), 2 * TILE_ROWS + 5, 256);
        for weight_type in WeightType::ALL {
            let bytes = file_bytes(weight_type, rows, cols, 3);
            let row_bytes = bytes.len() / rows;
            let whole = PackedMatrix::pack(&pool, weight_type, rows, cols, &bytes).unwrap();
            let mut filled = PackedMatrix::zeroed(weight_type, rows, cols).unwrap();
            for strip in PackedMatrix::strips(rows, STRIP_BYTES) {
                let bytes = &bytes[strip.start * row_bytes..strip.end * row_bytes];
                filled.fill(&pool, strip, bytes).unwrap();
            }
            let bytes_of =
                |matrix: &PackedMatrix| for_any!(&matrix.tiles, cells => cells.bytes(0..cells.len()).to_vec());
            assert!(bytes_of(&filled) == bytes_of(&whole), "{weight_type:?}");
        }
    }

    #[test]
    fn strips_are_whole_tiles_of_all_rows() {
        let strips: Vec<_> = PackedMatrix::strips(70, STRIP_BYTES / 20).collect();
        assert_eq!(strips, [0..32, 32..64, 64..70]);
        assert_eq!(PackedMatrix::strips(3, 0).map(|strip| strip.len()).collect::<Vec<_>>(), [3]);
    }
}
