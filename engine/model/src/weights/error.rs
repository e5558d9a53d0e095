//! Errors of loading tensors.

use windlass_engine_contract::sharding::Indivisible;
use windlass_kernels::ShapeError;

use crate::config::Unsupported;

/// Why a checkpoint's tensors do not make the decoder that its metadata describes.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// A tensor is missing.
    #[error("tensor {name:?} is missing; it should have the dimensions {expected:?}")]
    Missing {
        /// The tensor.
        name: String,
        /// Dimensions, fastest first.
        expected: Vec<u64>,
    },
    /// A tensor has other dimensions.
    #[error(
        "tensor {name:?} has the dimensions {found:?}; it should have {expected:?} (its data is at offset {offset})"
    )]
    Dimensions {
        /// The tensor.
        name: String,
        /// Dimensions, fastest first.
        expected: Vec<u64>,
        /// Dimensions, fastest first.
        found: Vec<u64>,
        /// Offset of its data in its file, in bytes.
        offset: u64,
    },
    /// A tensor of a type, or with a purpose, that is not supported.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A matrix that another tool quantized, whose parts do not fit together.
    #[error("matrix {name:?}: {problem}")]
    Packed {
        /// Its name in checkpoints that are not quantized.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor that the kernels do not support.
    #[error("tensor {name:?}: {source}")]
    Shape {
        /// The tensor.
        name: String,
        /// The reason.
        source: ShapeError,
    },
}

/// Why a decoder cannot be divided among ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// Its sizes are not divisible.
    #[error(transparent)]
    Sizes(#[from] Indivisible),
    /// Expert parallelism for a model without experts.
    #[error("the model (architecture {architecture:?}) is no mixture of experts: leave expert parallelism out")]
    NoExperts {
        /// Name of the architecture in the checkpoint.
        architecture: String,
    },
    /// Some columns would be on no rank.
    #[error(
        "ranks divide the {what} of {width} columns in blocks of {block}, of which it has no whole number: use one rank"
    )]
    Columns {
        /// Name of the matrix.
        what: &'static str,
        /// Its number of columns.
        width: u32,
        /// Columns that must stay together.
        block: u32,
    },
    /// The quantization blocks of a matrix would be divided among ranks.
    #[error(
        "a rank would hold {cols} columns of {name:?}, no whole number of {kind} blocks of {block}: use fewer ranks"
    )]
    Blocks {
        /// The tensor.
        name: String,
        /// Columns of a rank.
        cols: usize,
        /// Name of the weight format.
        kind: &'static str,
        /// Values of a block.
        block: usize,
    },
}
