//! Weights as a file has them, on their way to a device.

use std::borrow::Cow;

use windlass_kernels::{Integer, Pool, ShapeError, WeightType};

use crate::backend::{FileRows, Packer, Storage};
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
        source: &impl FileRows<'a>,
        order: Option<&[u32]>,
    ) -> Result<FileMatrix<'a>, ShapeError> {
        let values = FileValues::Typed(kind, source.get(0..rows));
        Ok(FileMatrix { rows, cols, values, order: order.map(<[u32]>::to_vec) })
    }

    fn quantized_matrix(
        &self,
        from: WeightType,
        to: Integer,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
    ) -> Result<FileMatrix<'a>, ShapeError> {
        let quantized = to.quantize(self.pool, from, rows, cols, &source.get(0..rows))?;
        let values = FileValues::Typed(to.weight_type(), quantized.into());
        Ok(FileMatrix { rows, cols, values, order: None })
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
    use std::ops::Range;

    /// Rows of two bytes that lie in a file.
    struct InFile<'a>(&'a [u8]);

    impl<'a> FileRows<'a> for InFile<'a> {
        fn get(&self, rows: Range<usize>) -> Cow<'a, [u8]> {
            self.0[2 * rows.start..2 * rows.end].into()
        }

        fn release(&self, rows: Range<usize>) {
            panic!("rows {rows:?} are still to be read");
        }
    }

    #[test]
    fn a_matrix_stays_in_its_file_until_the_device_takes_it_in() {
        let (pool, file) = (Pool::new(1).unwrap(), vec![0; 8]);
        let matrix = FilePacker { pool: &pool }.matrix(WeightType::BF16, 4, 1, &InFile(&file), None).unwrap();
        let (_, values) = matrix.typed();
        assert_eq!((values.as_ptr(), values.len()), (file.as_ptr(), file.len()));
    }
}
