//! Weights as a file has them, on their way to a device.

use std::borrow::Cow;

use windlass_kernels::{Integer, Pool, ShapeError, WeightType};

use crate::backend::Packer;
use crate::packed::Float8;

/// Keeps matrices as files have them: several are put together before the device takes them in.
#[derive(Debug)]
pub(super) struct FilePacker<'a> {
    /// Quantizes what is to be.
    pub pool: &'a Pool,
}

/// A matrix `[rows = outputs, cols = inputs]`, row after row.
#[derive(Debug)]
pub(super) struct FileMatrix {
    pub rows: usize,
    pub cols: usize,
    pub values: FileValues,
    /// The input of each column, where that is not its own number.
    pub order: Option<Vec<u32>>,
}

/// How a file has values.
#[derive(Debug)]
pub(super) enum FileValues {
    /// In a type of its own.
    Typed(WeightType, Vec<u8>),
    Float8(Float8),
}

impl FileMatrix {
    /// Its values in a type, which they get if they have none.
    pub fn typed(&self) -> (WeightType, Cow<'_, [u8]>) {
        match &self.values {
            FileValues::Typed(kind, bytes) => (*kind, bytes.into()),
            FileValues::Float8(float8) => (WeightType::BF16, float8.to_bf16(self.cols).into()),
        }
    }

    /// Whether two have their values alike.
    pub fn is_typed_as(&self, other: &FileMatrix) -> bool {
        match (&self.values, &other.values) {
            (FileValues::Typed(one, _), FileValues::Typed(another, _)) => one == another,
            (FileValues::Float8(_), FileValues::Float8(_)) => true,
            _ => false,
        }
    }

    /// Its values, if they are eight-bit floats.
    pub fn float8(&self) -> Option<&Float8> {
        match &self.values {
            FileValues::Typed(..) => None,
            FileValues::Float8(float8) => Some(float8),
        }
    }
}

impl Packer for FilePacker<'_> {
    type Matrix = FileMatrix;
    type Vector = Vec<f32>;

    fn matrix(
        &self,
        kind: WeightType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
        order: Option<&[u32]>,
    ) -> Result<FileMatrix, ShapeError> {
        Ok(FileMatrix {
            rows,
            cols,
            values: FileValues::Typed(kind, bytes.to_vec()),
            order: order.map(<[u32]>::to_vec),
        })
    }

    fn quantized_matrix(
        &self,
        from: WeightType,
        to: Integer,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Result<FileMatrix, ShapeError> {
        self.matrix(to.weight_type(), rows, cols, &to.quantize(self.pool, from, rows, cols, bytes)?, None)
    }

    fn float8_matrix(&self, rows: usize, cols: usize, values: impl FnOnce() -> Option<Float8>) -> Option<FileMatrix> {
        values().map(|float8| FileMatrix { rows, cols, values: FileValues::Float8(float8), order: None })
    }

    fn vector(&self, values: Vec<f32>) -> Vec<f32> {
        values
    }
}
