//! Weight matrices on a device, in the layouts that `linear.cu` and `superblocks.cu` describe.

mod grouped;
mod int8;
mod strips;
mod superblocks;

use std::borrow::Cow;
use std::slice;

use half::{bf16, f16};

use super::{DriverError, Memory, Upload, View};
use crate::{Pool, ShapeError, WeightType};
pub use grouped::{Group, Grouped};
pub use int8::Int8;
use strips::{Words, as_bf16};
pub use superblocks::{Superblock, Superblocks};

/// Rows that a block of the kernels computes.
pub(super) const ROW_TILE: usize = 16;
/// Columns come in whole blocks of this.
const COL_BLOCK: usize = 32;
/// A part's results begin at a multiple of so many values: of 16 bytes.
const PART_ROWS: usize = 8;

/// A matrix `[outputs, inputs]`.
#[derive(Debug)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    values: Values,
    order: Option<Order>,
}

/// Columns in an order of their own.
#[derive(Debug)]
struct Order {
    /// The input of each column, or [`NO_INPUT`](crate::NO_INPUT).
    columns: Memory<u32>,
    /// Inputs.
    inputs: usize,
}

#[derive(Debug)]
pub(super) enum Values {
    /// Row after row.
    Bf16(Memory<bf16>),
    /// Codes of 4 or 5 bits with a scale and a minimum for each group of columns.
    Grouped { codes: Memory<u32>, scales: Memory<u32>, group: Group, bits: usize, affine: bool },
    /// Signed 8-bit codes with a scale for each 32 columns.
    Int8 { codes: Memory<u32>, scales: Memory<u32> },
    /// Codes of 2 to 6 bits in superblocks.
    Superblocks { codes: Memory<u32>, scales: Memory<u32>, kind: Superblock },
    /// 8-bit codes, row after row, with a scale for every `group` columns.
    Eight { codes: Memory<u8>, scales: Memory<f32>, group: usize, code: EightBits },
    /// Matrices of types that differ, outputs after outputs.
    Parts(Vec<Matrix>),
}

/// What 8 bits stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EightBits {
    /// A float of 4 bits of exponent and 3 of fraction, up to 448.
    E4m3,
    /// A signed integer.
    Int8,
}

/// Why a matrix could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The tensor is none of its type.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Columns do not come in whole blocks.
    #[error("a matrix of {cols} columns: the CUDA kernels multiply {COL_BLOCK} at a time")]
    Columns {
        /// There are so many.
        cols: usize,
    },
    /// The device refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl Matrix {
    /// Takes in a row-major file tensor. Q4_0 to Q5_1, the K-quants, IQ4_XS, Q8_0 and what has groups of 64 or 128 stay as they are,
    /// but for 2 and 3 bits, which become 4; IQ4_NL and MXFP4 become bytes of the same values, and NF4, FP4 and integers around a zero point rounded ones; floats, and MXFP4 whose scales are no f16, are rounded to bf16.
    pub fn load(
        to: &impl Upload,
        pool: &Pool,
        weight_type: WeightType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Result<Matrix, LoadError> {
        if weight_type == WeightType::BF16 {
            return Matrix::of_bf16(to, [rows, cols], &[bytes]);
        }
        let row_bytes = crate::weights::validated_row_bytes(weight_type, rows, cols, bytes.len())?;
        if let Some((group, bits)) = Grouped::form(weight_type) {
            let read = |rows, bytes: &[u8]| Some(Grouped::read(weight_type, rows, cols, bytes)?.map(|own| own.words()));
            if let Some(words) = strips::words(pool, row_bytes, bytes, read) {
                return Matrix::of_groups(to, [rows, cols], group, bits, &words?);
            }
        }
        if let Some(kind) = Superblock::of(weight_type) {
            let read = |rows, bytes: &[u8]| Some(Superblocks::read(kind, rows, cols, bytes).map(|own| own.words()));
            if let Some(words) = strips::words(pool, row_bytes, bytes, read) {
                return Matrix::of_superblocks(to, [rows, cols], kind, &words?);
            }
        }
        let read = |rows, bytes: &[u8]| Some(Int8::read(weight_type, rows, cols, bytes)?.map(|own| own.words()));
        if let Some(words) = strips::words(pool, row_bytes, bytes, read) {
            return Matrix::of_bytes(to, [rows, cols], &words?);
        }
        match weight_type {
            WeightType::I8G128 => {
                let (codes, scales) = split_groups(bytes, weight_type.block_bytes());
                Matrix::eight_bits(to, EightBits::Int8, [rows, cols], weight_type.block_elements(), &codes, &scales)
            }
            _ => Matrix::bf16(to, rows, cols, &as_bf16(pool, weight_type, rows, cols, bytes)?),
        }
    }

    /// Takes in file tensors of one input as one matrix, outputs after outputs: each its type, its rows and its bytes. Where
    /// their types differ all become bf16.
    pub fn stack(
        to: &impl Upload,
        pool: &Pool,
        cols: usize,
        tensors: &[(WeightType, usize, &[u8])],
    ) -> Result<Matrix, LoadError> {
        let rows = tensors.iter().map(|(_, rows, _)| rows).sum();
        match tensors {
            // What lies on the device as in the file is not put together first.
            _ if tensors.iter().all(|(kind, ..)| *kind == WeightType::BF16) => {
                Matrix::of_bf16(to, [rows, cols], &tensors.iter().map(|(.., bytes)| *bytes).collect::<Vec<_>>())
            }
            [(first, ..), others @ ..] if others.iter().all(|(other, ..)| other == first) => {
                let bytes = match tensors {
                    [(.., bytes)] => Cow::from(*bytes),
                    _ => tensors.iter().map(|(.., bytes)| *bytes).collect::<Vec<_>>().concat().into(),
                };
                Matrix::load(to, pool, *first, rows, cols, &bytes)
            }
            _ => {
                let values =
                    |(kind, rows, bytes): &(WeightType, usize, &[u8])| as_bf16(pool, *kind, *rows, cols, bytes);
                let values = tensors.iter().map(values).collect::<Result<Vec<_>, _>>()?;
                Matrix::bf16(to, rows, cols, &values.concat())
            }
        }
    }

    /// The same for [`linear`](super::ops::linear) alone: neighbours of one type are multiplied as one, where that begins at a row
    /// that a product may begin at.
    pub fn stack_types(
        to: &impl Upload,
        pool: &Pool,
        cols: usize,
        tensors: &[(WeightType, usize, &[u8])],
    ) -> Result<Matrix, LoadError> {
        let runs: Vec<_> = tensors.chunk_by(|(one, ..), (other, ..)| own_layout(*one) == own_layout(*other)).collect();
        let rows = |run: &[(WeightType, usize, &[u8])]| run.iter().map(|(_, rows, _)| rows).sum::<usize>();
        if runs.len() < 2 || !runs.iter().all(|run| rows(run).is_multiple_of(PART_ROWS)) {
            return Matrix::stack(to, pool, cols, tensors);
        }
        let parts = runs.iter().map(|run| Matrix::stack(to, pool, cols, run)).collect::<Result<Vec<_>, _>>()?;
        Ok(Matrix { rows: rows(tensors), cols, values: Values::Parts(parts), order: None })
    }

    /// What is multiplied at a time: itself, or its parts of several types.
    pub(super) fn parts(&self) -> &[Matrix] {
        match &self.values {
            Values::Parts(parts) => parts,
            _ => slice::from_ref(self),
        }
    }

    /// Takes in values, row after row.
    pub fn bf16(to: &impl Upload, rows: usize, cols: usize, values: &[bf16]) -> Result<Matrix, LoadError> {
        check(rows, cols, values.len())?;
        Ok(Matrix { rows, cols, values: Values::Bf16(to.upload(values)?), order: None })
    }

    /// The same of values in parts, one after the other.
    fn of_bf16(to: &impl Upload, [rows, cols]: [usize; 2], parts: &[&[u8]]) -> Result<Matrix, LoadError> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        crate::weights::validated_row_bytes(WeightType::BF16, rows, cols, bytes)?;
        check(rows, cols, rows * cols)?;
        Ok(Matrix { rows, cols, values: Values::Bf16(to.upload_bytes(parts)?), order: None })
    }

    /// Takes in codes of 4 or 5 bits in groups.
    pub fn grouped(to: &impl Upload, grouped: &Grouped) -> Result<Matrix, LoadError> {
        let shape = [grouped.rows(), grouped.cols()];
        Matrix::of_groups(to, shape, grouped.group(), grouped.bits(), &grouped.words())
    }

    fn of_groups(
        to: &impl Upload,
        [rows, cols]: [usize; 2],
        group: Group,
        bits: usize,
        words: &Words,
    ) -> Result<Matrix, LoadError> {
        check(rows, cols, rows * cols)?;
        let (codes, scales, affine) = (to.upload(&words.codes)?, to.upload(&words.scales)?, words.affine);
        Ok(Matrix { rows, cols, values: Values::Grouped { codes, scales, group, bits, affine }, order: None })
    }

    /// Takes in signed 8-bit codes in groups of 32.
    pub fn int8(to: &impl Upload, int8: &Int8) -> Result<Matrix, LoadError> {
        Matrix::of_bytes(to, [int8.rows(), int8.cols()], &int8.words())
    }

    fn of_bytes(to: &impl Upload, [rows, cols]: [usize; 2], words: &Words) -> Result<Matrix, LoadError> {
        check(rows, cols, rows * cols)?;
        let (codes, scales) = (to.upload(&words.codes)?, to.upload(&words.scales)?);
        Ok(Matrix { rows, cols, values: Values::Int8 { codes, scales }, order: None })
    }

    /// Takes in codes of 2 to 6 bits in superblocks.
    pub fn superblocks(to: &impl Upload, superblocks: &Superblocks) -> Result<Matrix, LoadError> {
        let shape = [superblocks.rows(), superblocks.cols()];
        Matrix::of_superblocks(to, shape, superblocks.kind(), &superblocks.words())
    }

    fn of_superblocks(
        to: &impl Upload,
        [rows, cols]: [usize; 2],
        kind: Superblock,
        words: &Words,
    ) -> Result<Matrix, LoadError> {
        check(rows, cols, rows * cols)?;
        let (codes, scales) = (to.upload(&words.codes)?, to.upload(&words.scales)?);
        Ok(Matrix { rows, cols, values: Values::Superblocks { codes, scales, kind }, order: None })
    }

    /// Takes in 8-bit codes, row after row, with a scale for every `group` columns of each row: a multiple of 128, or all.
    ///
    /// # Panics
    /// When the lengths do not match.
    pub fn eight_bits(
        to: &impl Upload,
        code: EightBits,
        [rows, cols]: [usize; 2],
        group: usize,
        codes: &[u8],
        scales: &[f32],
    ) -> Result<Matrix, LoadError> {
        check(rows, cols, codes.len())?;
        assert!(group >= cols || (group > 0 && group.is_multiple_of(128)), "groups of {group} columns");
        assert_eq!(scales.len(), rows * cols.div_ceil(group), "a scale for each group");
        let (codes, scales) = (to.upload(codes)?, to.upload(scales)?);
        Ok(Matrix { rows, cols, values: Values::Eight { codes, scales, group, code }, order: None })
    }

    /// The same with column `c` multiplying input `order[c]`, or nothing where that is [`NO_INPUT`](crate::NO_INPUT): how GPTQ
    /// sorts inputs by weight before it groups them.
    pub fn ordered(self, to: &impl Upload, order: &[u32]) -> Result<Matrix, LoadError> {
        let inputs = crate::weights::check_order(self.cols, order)?;
        Ok(Matrix { order: Some(Order { columns: to.upload(order)?, inputs }), ..self })
    }

    /// The input of each column, where that is not its own number.
    pub fn order(&self) -> Option<View<'_, u32>> {
        self.order.as_ref().map(|order| order.columns.view())
    }

    /// Whether its values are bf16, in the order of inputs.
    pub fn is_bf16(&self) -> bool {
        matches!(self.values, Values::Bf16(_)) && self.order.is_none()
    }

    /// What its codes stand for, where they have 8 bits and lie row after row.
    pub fn code(&self) -> Option<EightBits> {
        match &self.values {
            Values::Eight { code, .. } => Some(*code),
            _ => None,
        }
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
        self.order.as_ref().map_or(self.cols, |order| order.inputs)
    }

    /// Bytes that [`Matrix::load`] takes for a file tensor of this type: exactly where its columns come in superblocks, else nearly.
    pub fn bytes_of(weight_type: WeightType, rows: usize, cols: usize) -> u64 {
        let (row_by_row, bytes) = tile_bytes(weight_type);
        let rows = if row_by_row { rows } else { rows.next_multiple_of(ROW_TILE) };
        (rows as u64 * (cols * bytes) as u64).div_ceil((ROW_TILE * MEASURED_COLS) as u64)
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        let values = match &self.values {
            Values::Bf16(values) => values.view().bytes(),
            Values::Grouped { codes, scales, .. } => codes.view().bytes() + scales.view().bytes(),
            Values::Int8 { codes, scales } => codes.view().bytes() + scales.view().bytes(),
            Values::Superblocks { codes, scales, .. } => codes.view().bytes() + scales.view().bytes(),
            Values::Eight { codes, scales, .. } => codes.view().bytes() + scales.view().bytes(),
            Values::Parts(parts) => parts.iter().map(Matrix::bytes).sum(),
        };
        values + self.order().map_or(0, |order| order.bytes())
    }

    pub(super) fn values(&self) -> &Values {
        &self.values
    }
}

/// Columns of a tile that [`tile_bytes`] tells of.
const MEASURED_COLS: usize = 256;

/// Whether rows lie one after the other, and not in tiles; and the bytes that 16 rows of so many columns take on a device, codes and
/// scales.
fn tile_bytes(weight_type: WeightType) -> (bool, usize) {
    let values = ROW_TILE * MEASURED_COLS;
    let scales = |group: usize, bytes: usize| MEASURED_COLS / group * ROW_TILE * bytes;
    let grouped = |bits: usize, group: usize| (false, values * bits / 8 + scales(group, size_of::<u32>()));
    match (weight_type, Superblock::of(weight_type)) {
        (_, Some(kind)) => (false, values * kind.bits() / 8 + ROW_TILE * kind.scales_bytes()),
        (WeightType::Q4_0 | WeightType::Q4_1, _) => grouped(4, 32),
        (WeightType::I2G32 | WeightType::I3G32 | WeightType::I4G32, _) => grouped(4, 32),
        (WeightType::Q5_0 | WeightType::Q5_1, _) => grouped(5, 32),
        (WeightType::I2G64 | WeightType::I3G64 | WeightType::I4G64 | WeightType::S4G64, _) => grouped(4, 64),
        (WeightType::I2G128 | WeightType::I3G128 | WeightType::I4G128 | WeightType::S4G128, _) => grouped(4, 128),
        // Two groups of as many.
        (WeightType::I2G256 | WeightType::I3G256, _) => grouped(4, 128),
        (
            WeightType::Q8_0
            | WeightType::IQ4NL
            | WeightType::MXFP4
            | WeightType::NF4
            | WeightType::FP4
            | WeightType::I8G64
            | WeightType::U8G32
            | WeightType::U8G64
            | WeightType::F8G64,
            _,
        ) => (false, values + scales(32, size_of::<f16>())),
        (WeightType::I8G128, _) => (true, values + scales(128, size_of::<f32>())),
        _ => (true, values * size_of::<bf16>()),
    }
}

/// The type, if it stays what it is: others become bf16.
fn own_layout(weight_type: WeightType) -> Option<WeightType> {
    use WeightType::{BF16, F16, F32};
    (!matches!(weight_type, F32 | F16 | BF16)).then_some(weight_type)
}

fn check(rows: usize, cols: usize, values: usize) -> Result<(), LoadError> {
    assert!(rows > 0 && values == rows * cols, "{values} values are no matrix of {rows} x {cols}");
    if cols > 0 && cols.is_multiple_of(COL_BLOCK) { Ok(()) } else { Err(LoadError::Columns { cols }) }
}

/// Codes and scales of blocks that hold an f16 scale and then codes of 8 bits.
fn split_groups(bytes: &[u8], block_bytes: usize) -> (Vec<u8>, Vec<f32>) {
    let blocks = || bytes.chunks_exact(block_bytes);
    let scales = blocks().map(|block| f16::from_le_bytes([block[0], block[1]]).to_f32()).collect();
    (blocks().flat_map(|block| block[2..].iter().copied()).collect(), scales)
}
