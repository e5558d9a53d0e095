//! A decoder on a CUDA GPU or several, over `windlass_kernels::cuda`. Nothing here names a driver: the same code runs on a GPU and on
//! the stand-in of tests.
//!
//! The residual stream and logits are f32, all between them bf16. Nothing is allocated once a model runs. A step of one
//! token for each sequence is padded to one of a few sizes, each of which is a graph: captured while there is nothing to do, or
//! the first time, and replayed after that.

mod cache;
mod compute;
mod decoder;
mod draft;
mod draws;
mod executor;
mod experts;
mod follower;
mod graphs;
mod handover;
mod input;
mod inputs;
mod load;
mod loaded;
mod metadata;
mod moves;
mod nodes;
mod packer;
mod rank;
mod sampler;
mod split;
mod split_decoder;
mod support;
mod weights;
mod words;
mod workspace;

pub use windlass_kernels::cuda::ops::Ground;
pub use windlass_kernels::cuda::{
    Device, DeviceFacts, DriverError, LoadError as MatrixError, Nvidia, devices, image as kernel_image,
};

pub use decoder::CudaDecoder;
pub use executor::CudaExecutor;
pub use load::{CudaModel, LoadedCuda};
pub use nodes::{CudaLeader, Node, work};
pub use split::{SplitModel, layers_that_fit};

/// Whether steps are captured as graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replay {
    /// Each size once.
    #[default]
    Graphs,
    /// Never: for comparison.
    Eager,
}

/// Why something cannot be computed on a GPU, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// This engine computes it elsewhere only.
    #[error("{found} is not there on CUDA yet: use {right}")]
    Unsupported {
        /// What was asked for.
        found: String,
        /// What would be right.
        right: String,
    },
    /// The driver, or the device.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Every rank needs a GPU of its own.
    #[error("{ranks} ranks need a GPU each, and there are {devices}: use {right}")]
    TooFewDevices {
        /// Ranks asked for.
        ranks: u32,
        /// GPUs there are.
        devices: usize,
        /// What would be right.
        right: String,
    },
    /// A rank of the group has failed: nothing more can be computed.
    #[error("{0}")]
    RankLeft(String),
    /// A weight matrix.
    #[error("matrix {name} of layer {layer}: {source}")]
    Weights {
        /// Which one.
        name: &'static str,
        /// Of which layer, from 0.
        layer: usize,
        /// Why not.
        source: MatrixError,
    },
    /// The embedding or the head.
    #[error("the {name}: {source}")]
    Table {
        /// Which one.
        name: &'static str,
        /// Why not.
        source: MatrixError,
    },
}

impl CudaError {
    pub(crate) fn unsupported(found: impl Into<String>, right: impl Into<String>) -> CudaError {
        CudaError::Unsupported { found: found.into(), right: right.into() }
    }
}
