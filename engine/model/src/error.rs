//! Why a model is not loaded, or computes no more.

use std::convert::Infallible;
use std::io;

use windlass_kernels::cuda::{DriverError, LoadError as MatrixError};

use crate::config::ConfigError;
use crate::pipeline::PipelineError;
use crate::sizes::SizeError;
use crate::weights::{ShardError, TensorError};

/// Why a checkpoint cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its tensors.
    #[error(transparent)]
    Tensors(#[from] TensorError),
    /// The ranks asked for.
    #[error(transparent)]
    Ranks(#[from] ShardError),
    /// The sizes asked for.
    #[error(transparent)]
    Sizes(#[from] SizeError),
    /// Other processes.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// A GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The system gave no threads.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        source: io::Error,
    },
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

/// A stage on a CPU comes before one on a GPU.
impl From<Infallible> for CudaError {
    fn from(never: Infallible) -> CudaError {
        match never {}
    }
}

impl CudaError {
    pub(crate) fn unsupported(found: impl Into<String>, right: impl Into<String>) -> CudaError {
        CudaError::Unsupported { found: found.into(), right: right.into() }
    }
}

pub(crate) fn no_threads(threads: usize) -> impl Fn(io::Error) -> LoadError {
    move |source| LoadError::Threads { threads, source }
}
