//! Why a checkpoint's tensors do not make a decoder.

use windlass_engine_contract::sharding::Indivisible;
use windlass_kernels::ShapeError;

use crate::config::Unsupported;

/// Why a checkpoint's tensors do not make the decoder that its metadata describes.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// A tensor is not there.
    #[error("tensor {name:?} is missing; it should have the dimensions {expected:?}")]
    Missing {
        /// The tensor.
        name: String,
        /// Fastest first.
        expected: Vec<u64>,
    },
    /// A tensor has other dimensions.
    #[error(
        "tensor {name:?} has the dimensions {found:?}; it should have {expected:?} (its data is at offset {offset})"
    )]
    Dimensions {
        /// The tensor.
        name: String,
        /// Fastest first.
        expected: Vec<u64>,
        /// Fastest first.
        found: Vec<u64>,
        /// Where its data lies in its file.
        offset: u64,
    },
    /// A tensor of a type, or with a purpose, that this engine does not have.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A matrix that another tool quantized, whose parts do not make one.
    #[error("matrix {name:?}: {problem}")]
    Packed {
        /// What plain checkpoints call it.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor that the kernels do not take.
    #[error("tensor {name:?}: {source}")]
    Shape {
        /// The tensor.
        name: String,
        /// Why not.
        source: ShapeError,
    },
}

/// Why a decoder cannot be divided among ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// Its sizes cannot.
    #[error(transparent)]
    Sizes(#[from] Indivisible),
    /// It has no experts that could be on different ranks.
    #[error("the model (architecture {architecture:?}) is no mixture of experts: leave expert parallelism out")]
    NoExperts {
        /// As the checkpoint names it.
        architecture: String,
    },
    /// Some columns would be on no rank.
    #[error(
        "ranks divide the {what} of {width} columns in blocks of {block}, of which it has no whole number: use one rank"
    )]
    Columns {
        /// What has them.
        what: &'static str,
        /// How many.
        width: u32,
        /// Those that stay together.
        block: u32,
    },
    /// A matrix's columns are quantized in blocks that ranks would have to break.
    #[error(
        "a rank would hold {cols} columns of {name:?}, no whole number of {kind} blocks of {block}: use fewer ranks"
    )]
    Blocks {
        /// The tensor.
        name: String,
        /// Columns of a rank.
        cols: usize,
        /// The type's name.
        kind: &'static str,
        /// Values in a block.
        block: usize,
    },
}
