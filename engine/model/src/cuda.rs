//! A decoder on a CUDA GPU or several, over `windlass_kernels::cuda`. Nothing here names a driver: the same code runs on a GPU and on
//! the stand-in of tests.
//!
//! The residual stream and logits are f32, all between them bf16. Nothing is allocated once a model runs. A step of one
//! token for each sequence is padded to one of a few sizes, each of which is a graph: captured while there is nothing to do, or
//! the first time, and replayed after that.

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

/// Whether steps are captured as graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replay {
    /// Each size once.
    #[default]
    Graphs,
    /// Never: for comparison.
    Eager,
}
