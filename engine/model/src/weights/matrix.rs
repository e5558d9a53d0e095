//! A matrix in a checkpoint, before it is packed.

use std::borrow::Cow;
use std::ops::Range;

use windlass_checkpoint::{Checkpoint, Data, Tensor};
use windlass_kernels::cuda::Matrix;
use windlass_kernels::{Integer, WeightType, floats};

use super::loader::{FileRows, WeightLoader};
use super::{ShardError, TensorError, weight_type};
use crate::weights::part::Part;
use crate::weights::quantization::Quantization;
use crate::weights::quantized::PackedTensor;

/// A matrix, or some rows of one.
#[derive(Clone, Debug)]
pub(super) enum MatrixTensor<'a> {
    /// In a kernel format, or floats.
    Plain(PlainTensor<'a>),
    /// Codes of another tool, or floats that are to be rounded to eight-bit floats.
    Packed(Box<PackedTensor<'a>>),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PlainTensor<'a> {
    /// The checkpoint that has it.
    pub checkpoint: &'a Checkpoint,
    pub name: &'a str,
    pub rows: usize,
    pub cols: usize,
    /// The data, row-major.
    pub bytes: Data<'a>,
    pub kind: WeightType,
    /// The format that its floats are quantized to; `None` to keep them.
    pub quantized: Option<Integer>,
}

impl<'a> From<PackedTensor<'a>> for MatrixTensor<'a> {
    fn from(packed: PackedTensor<'a>) -> MatrixTensor<'a> {
        MatrixTensor::Packed(Box::new(packed))
    }
}

impl<'a> MatrixTensor<'a> {
    pub fn name(&self) -> &str {
        match self {
            MatrixTensor::Plain(plain) => plain.name,
            MatrixTensor::Packed(packed) => packed.name,
        }
    }

    /// Some of its rows.
    pub fn rows(&self, range: Range<usize>) -> MatrixTensor<'a> {
        match self {
            MatrixTensor::Plain(plain) => MatrixTensor::Plain(plain.rows(range)),
            MatrixTensor::Packed(packed) => packed.rows(range).into(),
        }
    }

    /// The largest of its tensors in the checkpoint.
    pub fn source(&self) -> Data<'a> {
        match self {
            MatrixTensor::Plain(plain) => plain.bytes,
            MatrixTensor::Packed(packed) => packed.source(),
        }
    }

    /// Its packed format.
    pub fn packed(&self) -> WeightType {
        match self {
            MatrixTensor::Plain(plain) => plain.quantized.map_or(plain.kind, Integer::weight_type),
            MatrixTensor::Packed(packed) => packed.kind(),
        }
    }

    /// Columns per block: a part has a multiple.
    pub fn block(&self) -> usize {
        match self {
            MatrixTensor::Plain(_) => self.packed().block_elements(),
            MatrixTensor::Packed(packed) => packed.block(),
        }
    }

    /// Whether its packed format is that of `quantization`: its floats are quantized to it, or it is stored as
    /// eight-bit floats.
    pub fn is_quantized(&self, quantization: Quantization) -> bool {
        match self {
            MatrixTensor::Plain(plain) => plain.quantized.is_some(),
            MatrixTensor::Packed(packed) => quantization == Quantization::FP8 && packed.is_float8(),
        }
    }

    /// Bytes of a part in its packed format.
    pub fn bytes(&self, part: &Part) -> u64 {
        let (kind, [rows, cols]) = self.packed_part(part);
        // The sizes are bounded by the length of the file.
        kind.row_bytes(cols).map_or(0, |row| row as u64 * rows as u64)
    }

    /// Bytes of a part on a GPU.
    pub fn device_bytes(&self, part: &Part) -> u64 {
        let (kind, [rows, cols]) = self.packed_part(part);
        // Eight-bit floats stay as they are on GPUs.
        let float8 = matches!(self, MatrixTensor::Packed(packed) if packed.is_float8());
        Matrix::bytes_of(if float8 { WeightType::I8G128 } else { kind }, rows, cols)
    }

    /// The packed format of a part, its rows and its columns.
    fn packed_part(&self, part: &Part) -> (WeightType, [usize; 2]) {
        match self {
            MatrixTensor::Plain(plain) => (self.packed(), part.shape(plain.rows, plain.cols)),
            MatrixTensor::Packed(packed) => {
                let packed = packed.part(part);
                let [cols, rows] = packed.shape();
                (packed.kind(), [rows, cols])
            }
        }
    }

    /// Fails if a part would divide blocks. Parts of matrices with their own order of inputs never do.
    pub fn check(&self, part: &Part) -> Result<(), ShardError> {
        let (kind, is_ordered) =
            (self.packed_part(part).0, matches!(self, MatrixTensor::Packed(packed) if packed.order().is_some()));
        match part {
            Part::Cols(cols) if !is_ordered && !part.keeps_blocks(kind.block_elements()) => {
                let (cols, block) = (cols.len(), kind.block_elements());
                Err(ShardError::Blocks { name: self.name().to_owned(), cols, kind: kind.name(), block })
            }
            _ => Ok(()),
        }
    }

    /// Reads a part that [`check`](Self::check) has passed. Memory of the checkpoint is freed as it is read.
    pub fn read<L: WeightLoader<'a>>(&self, loader: &L, part: &Part) -> Result<L::File, TensorError> {
        let packed = match self {
            MatrixTensor::Plain(plain) => {
                let [rows, cols] = part.shape(plain.rows, plain.cols);
                let source = PlainRows { plain, part };
                match plain.quantized {
                    None => loader.file(plain.kind, rows, cols, &source, None),
                    Some(to) => loader.quantized(plain.kind, to, rows, cols, &source),
                }
            }
            MatrixTensor::Packed(packed) => {
                let problem = |problem| TensorError::Packed { name: packed.name.to_owned(), problem };
                packed.check().map_err(problem)?;
                let packed = packed.part(part);
                let [cols, rows] = packed.shape();
                if let Some(matrix) = loader.float8(rows, cols, || packed.float8()) {
                    return Ok(matrix);
                }
                loader.file(packed.kind(), rows, cols, &packed, packed.order())
            }
        };
        packed.map_err(|source| TensorError::Shape { name: self.name().to_owned(), source })
    }
}

/// The rows of a part of a plain tensor.
struct PlainRows<'r, 'a> {
    plain: &'r PlainTensor<'a>,
    part: &'r Part,
}

impl<'a> PlainRows<'_, 'a> {
    /// The tensor's rows that contain these rows of the part.
    fn lying_in(&self, rows: Range<usize>) -> Data<'a> {
        let first = self.part.first_row();
        self.plain.rows(first + rows.start..first + rows.end).bytes
    }
}

impl<'a> FileRows<'a> for PlainRows<'_, 'a> {
    fn get(&self, rows: Range<usize>) -> Cow<'a, [u8]> {
        let bytes = self.lying_in(rows).get();
        match self.part {
            Part::Whole | Part::Rows(_) => bytes.into(),
            Part::Cols(_) => self.part.cut(self.plain.kind, self.plain.cols, bytes),
        }
    }

    /// Other ranks have other columns of the same rows, so the memory is freed with the whole layer.
    fn release(&self, rows: Range<usize>) {
        if !matches!(self.part, Part::Cols(_)) {
            self.plain.checkpoint.release(&self.lying_in(rows));
        }
    }
}

impl<'a> PlainTensor<'a> {
    fn rows(&self, range: Range<usize>) -> PlainTensor<'a> {
        let row_bytes = self.bytes.len().checked_div(self.rows).unwrap_or(0);
        let bytes = self.bytes.slice(range.start * row_bytes..range.end * row_bytes);
        PlainTensor { rows: range.len(), bytes, ..*self }
    }
}

/// A vector of floats, such as the weights of a norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct VectorTensor<'a> {
    tensor: Tensor<'a>,
    /// Added to its values.
    offset: f32,
}

impl<'a> VectorTensor<'a> {
    /// The vector of a tensor of floats.
    pub fn of(tensor: Tensor<'a>) -> VectorTensor<'a> {
        VectorTensor { tensor, offset: 0.0 }
    }

    /// The vector with `offset` added.
    pub fn plus(self, offset: f32) -> VectorTensor<'a> {
        VectorTensor { offset, ..self }
    }

    /// Bytes in f32.
    pub fn bytes(&self) -> u64 {
        4 * self.tensor.dims[0]
    }

    /// The values of the outputs of a part.
    pub fn values(&self, part: &Part) -> Vec<f32> {
        let kind = weight_type(self.tensor.kind).unwrap_or(WeightType::F32);
        let mut values = floats(kind, &self.tensor.bytes);
        values.iter_mut().for_each(|value| *value += self.offset);
        part.of_outputs(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_checkpoint::testing::SafetensorsBuilder;

    /// Whole matrices and rows are read from the file; columns are copied once. Rows are asked for by their index in
    /// the part.
    #[test]
    fn rows_of_a_part_lie_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let values: Vec<u8> = (0..4 * 8 * 2).collect();
        let weights = SafetensorsBuilder::new().tensor("m", "BF16", &[4, 8], &values).build();
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let (bytes, kind) = (checkpoint.tensor("m").unwrap().bytes, WeightType::BF16);
        let plain = PlainTensor { checkpoint: &checkpoint, name: "m", rows: 4, cols: 8, bytes, kind, quantized: None };
        for (part, expected, stays) in [
            (Part::Whole, (16..48).collect::<Vec<u8>>(), true),
            (Part::Rows(1..4), (32..64).collect(), true),
            (Part::Cols(2..4), vec![20, 21, 22, 23, 36, 37, 38, 39], false),
        ] {
            let rows = PlainRows { plain: &plain, part: &part }.get(1..3);
            assert_eq!((&rows[..], matches!(rows, Cow::Borrowed(_))), (&expected[..], stays), "{part:?}");
        }
    }
}
