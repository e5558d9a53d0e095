//! Weights as a file has them, on their way to a device.

use windlass_kernels::{Integer, Pool, ShapeError, WeightType};

use crate::backend::Packer;

/// Keeps matrices as files have them: several are put together before the device takes them in.
#[derive(Debug)]
pub(super) struct FilePacker<'a> {
    /// Quantizes what is to be.
    pub pool: &'a Pool,
}

/// A matrix `[rows = outputs, cols = inputs]`, row after row.
#[derive(Debug)]
pub(super) struct FileMatrix {
    pub kind: WeightType,
    pub rows: usize,
    pub cols: usize,
    pub bytes: Vec<u8>,
    /// The input of each column, where that is not its own number.
    pub order: Option<Vec<u32>>,
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
        Ok(FileMatrix { kind, rows, cols, bytes: bytes.to_vec(), order: order.map(<[u32]>::to_vec) })
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

    fn vector(&self, values: Vec<f32>) -> Vec<f32> {
        values
    }
}
