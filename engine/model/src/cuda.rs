//! A decoder on one or more CUDA GPUs, over `windlass_kernels::cuda`. The code is independent of the driver: the same
//! code runs on a GPU and on the shim of the tests.
//!
//! The residual stream and the logits are f32, other activations bf16. Nothing is allocated while a model runs. A step
//! of one token for each sequence is padded to one of a few sizes. Each size has a CUDA graph, which is captured while
//! the engine is idle, or when a step first needs it, and replayed after that.

mod activation_buffer;
mod cache;
mod compute;
mod draft;
mod draws;
mod executor;
mod experts;
mod file_matrix;
mod fit;
mod graphs;
mod group;
mod input;
mod inputs;
mod load;
mod loaded;
mod metadata;
mod move_buffer;
mod nodes;
mod plan;
mod rank;
mod sampler;
mod split;
mod support;
mod weights;
mod words;
mod workspace;

pub use crate::error::CudaError;
pub use windlass_kernels::cuda::ops::Ground;
pub use windlass_kernels::cuda::{
    Device, DeviceFacts, DriverError, LoadError as MatrixError, Nvidia, devices, image as kernel_image,
};

pub use executor::CudaExecutor;
pub use group::CudaDecoder;
pub use load::{CudaModel, LoadedCuda};
pub use nodes::{CudaLeader, Node, work};
pub use rank::CudaRank;
pub use split::{SplitModel, layers_that_fit};

/// Whether steps are captured as CUDA graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replay {
    /// Capture each size once, then replay it.
    #[default]
    Graphs,
    /// Never capture: for comparison.
    Eager,
}
