//! A matrix of a checkpoint, found and checked, and how it is packed for a device.

use windlass_checkpoint::Tensor;
use windlass_kernels::{Integer, WeightType};

use crate::backend::Packer;
use crate::packed::PackedTensor;
use crate::part::Part;
use crate::weights::{ShardError, TensorError};

#[derive(Clone, Copy, Debug)]
pub(crate) enum MatrixTensor<'a> {
    /// As the kernels read it, or floats.
    Plain {
        tensor: Tensor<'a>,
        kind: WeightType,
        /// What its floats become as they are packed.
        quantized: Option<Integer>,
    },
    /// As another tool quantized it.
    Packed(PackedTensor<'a>),
}

impl MatrixTensor<'_> {
    pub fn name(&self) -> &str {
        match self {
            MatrixTensor::Plain { tensor, .. } => tensor.name,
            MatrixTensor::Packed(packed) => packed.name,
        }
    }

    /// The type it is packed in.
    pub fn packed(&self) -> WeightType {
        match self {
            MatrixTensor::Plain { kind, quantized, .. } => quantized.map_or(*kind, Integer::weight_type),
            MatrixTensor::Packed(packed) => packed.kind,
        }
    }

    /// Whether its floats become integers.
    pub fn is_quantized_here(&self) -> bool {
        matches!(self, MatrixTensor::Plain { quantized: Some(_), .. })
    }

    /// Bytes of a part in the type it is packed in.
    pub fn bytes(&self, part: &Part) -> u64 {
        let [cols, rows] = self.shape();
        let [rows, cols] = part.shape(rows, cols);
        self.packed().row_bytes(cols).map_or(0, |row| row as u64 * rows as u64)
    }

    /// Columns and rows, which the file's length bounds.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            MatrixTensor::Plain { tensor, .. } => [tensor.dims[0], tensor.dims[1]].map(|dim| dim as usize),
            MatrixTensor::Packed(packed) => [packed.cols, packed.rows],
        }
    }

    /// Refuses a part of which no rank can make a matrix: one with broken blocks.
    pub fn check(&self, part: &Part) -> Result<(), ShardError> {
        let kind = self.packed();
        match part {
            Part::Cols(cols) if !part.keeps_blocks(kind.block_elements()) => Err(ShardError::Blocks {
                name: self.name().to_owned(),
                cols: cols.len(),
                kind: kind.name(),
                block: kind.block_elements(),
            }),
            _ => Ok(()),
        }
    }

    /// Packs a part that [`check`](Self::check) has passed.
    pub fn pack<P: Packer>(&self, packer: &P, part: &Part) -> Result<P::Matrix, TensorError> {
        let [all_cols, all_rows] = self.shape();
        let [rows, cols] = part.shape(all_rows, all_cols);
        let packed = match self {
            MatrixTensor::Plain { tensor, kind, quantized } => {
                let bytes = part.cut(*kind, all_cols, tensor.bytes);
                match quantized {
                    None => packer.matrix(*kind, rows, cols, &bytes),
                    Some(to) => packer.quantized_matrix(*kind, *to, rows, cols, &bytes),
                }
            }
            MatrixTensor::Packed(packed) => {
                let [row_range, col_range] = part.ranges(all_rows, all_cols);
                packer.matrix(packed.kind, rows, cols, &packed.file_rows(row_range, col_range))
            }
        };
        packed.map_err(|source| TensorError::Shape { name: self.name().to_owned(), source })
    }
}
