//! Matrices as they are in a file, before several of them are put together on the device.

use std::borrow::Cow;

use windlass_kernels::WeightType;

use crate::weights::quantized::Float8;

/// A matrix `[rows = outputs, cols = inputs]`, row-major.
#[derive(Debug)]
pub(super) struct FileMatrix<'a> {
    pub rows: usize,
    pub cols: usize,
    pub values: FileValues<'a>,
    /// The input of each column (`desc_act`); `None` if columns are in the order of inputs.
    pub order: Option<Vec<u32>>,
}

/// Values as they are in a file.
#[derive(Debug)]
pub(super) enum FileValues<'a> {
    /// In a weight format.
    Typed(WeightType, Cow<'a, [u8]>),
    Float8(Float8),
}

impl FileMatrix<'_> {
    /// Its values in a weight format; eight-bit floats become bf16.
    pub fn typed(&self) -> (WeightType, Cow<'_, [u8]>) {
        match &self.values {
            FileValues::Typed(kind, bytes) => (*kind, Cow::Borrowed(bytes)),
            FileValues::Float8(float8) => (WeightType::BF16, float8.to_bf16(self.cols).into()),
        }
    }

    /// Whether two matrices have values of the same type.
    pub fn is_typed_as(&self, other: &FileMatrix<'_>) -> bool {
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
