//! Weights as a file has them, on their way to a device.

use std::borrow::Cow;

use windlass_kernels::{Integer, Pool, ShapeError, WeightType};

use crate::backend::{Packer, Storage};
use crate::packed::Float8;

/// Keeps matrices as files have them, and where files have them, if they do: several are put together before the device takes them
/// in.
#[derive(Debug)]
pub(super) struct FilePacker<'a> {
    /// Quantizes what is to be.
    pub pool: &'a Pool,
}

/// A matrix `[rows = outputs, cols = inputs]`, row after row.
#[derive(Debug)]
pub(super) struct FileMatrix<'a> {
    pub rows: usize,
    pub cols: usize,
    pub values: FileValues<'a>,
    /// The input of each column, where that is not its own number.
    pub order: Option<Vec<u32>>,
}

/// How a file has values.
#[derive(Debug)]
pub(super) enum FileValues<'a> {
    /// In a type of its own.
    Typed(WeightType, Cow<'a, [u8]>),
    Float8(Float8),
}

impl FileMatrix<'_> {
    /// Its values in a type, which they get if they have none.
    pub fn typed(&self) -> (WeightType, Cow<'_, [u8]>) {
        match &self.values {
            FileValues::Typed(kind, bytes) => (*kind, Cow::Borrowed(bytes)),
            FileValues::Float8(float8) => (WeightType::BF16, float8.to_bf16(self.cols).into()),
        }
    }

    /// Whether two have their values alike.
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

impl<'a> Storage for FilePacker<'a> {
    type Matrix = FileMatrix<'a>;
    type Vector = Vec<f32>;
}

impl<'a> Packer<'a> for FilePacker<'a> {
    fn matrix(
        &self,
        kind: WeightType,
        rows: usize,
        cols: usize,
        bytes: Cow<'a, [u8]>,
        order: Option<&[u32]>,
    ) -> Result<FileMatrix<'a>, ShapeError> {
        Ok(FileMatrix { rows, cols, values: FileValues::Typed(kind, bytes), order: order.map(<[u32]>::to_vec) })
    }

    fn quantized_matrix(
        &self,
        from: WeightType,
        to: Integer,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Result<FileMatrix<'a>, ShapeError> {
        self.matrix(to.weight_type(), rows, cols, to.quantize(self.pool, from, rows, cols, bytes)?.into(), None)
    }

    fn float8_matrix(
        &self,
        rows: usize,
        cols: usize,
        values: impl FnOnce() -> Option<Float8>,
    ) -> Option<FileMatrix<'a>> {
        values().map(|float8| FileMatrix { rows, cols, values: FileValues::Float8(float8), order: None })
    }

    fn vector(&self, values: Vec<f32>) -> Vec<f32> {
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::Part;

    /// Whole matrices and rows lie in the file; columns are put together once.
    #[test]
    fn a_matrix_is_not_copied_before_the_device_takes_it_in() {
        let (pool, file) = (Pool::new(1).unwrap(), vec![0; 4 * 8 * 2]);
        for (part, stays) in [(Part::Whole, true), (Part::Rows(1..3), true), (Part::Cols(0..4), false)] {
            let ([rows, cols], bytes) = (part.shape(4, 8), part.cut(WeightType::BF16, 8, &file));
            let (place, length) = (bytes.as_ptr(), bytes.len());
            let matrix = FilePacker { pool: &pool }.matrix(WeightType::BF16, rows, cols, bytes, None).unwrap();
            let (_, values) = matrix.typed();
            assert_eq!((values.as_ptr(), values.len()), (place, length), "{part:?}");
            assert_eq!(file.as_ptr_range().contains(&place), stays, "{part:?}");
        }
    }
}
