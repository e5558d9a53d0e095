//! Errors of loading a model, and of GPUs.

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
    /// The configuration is not supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Tensors are missing or do not fit.
    #[error(transparent)]
    Tensors(#[from] TensorError),
    /// The model cannot be divided among the ranks.
    #[error(transparent)]
    Ranks(#[from] ShardError),
    /// The sizes do not fit.
    #[error(transparent)]
    Sizes(#[from] SizeError),
    /// Another stage of the pipeline failed.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// A GPU failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Threads could not be started.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// The error of the system.
        source: io::Error,
    },
}

/// Errors of GPUs.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// Something that is not supported on CUDA.
    #[error("{found} is not there on CUDA yet: use {right}")]
    Unsupported {
        /// What was asked for.
        found: String,
        /// What is supported instead.
        right: String,
    },
    /// An error of the driver or of the device.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// There are fewer GPUs than ranks.
    #[error("{ranks} ranks need a GPU each, and there are {devices}: use {right}")]
    TooFewDevices {
        /// Ranks asked for.
        ranks: u32,
        /// Number of GPUs.
        devices: usize,
        /// What is supported instead.
        right: String,
    },
    /// A rank of the group has failed, so nothing more can be computed.
    #[error("{0}")]
    RankLeft(String),
    /// A weight matrix could not be loaded.
    #[error("matrix {name} of layer {layer}: {source}")]
    Weights {
        /// Its name.
        name: &'static str,
        /// Index of its layer.
        layer: usize,
        /// The error.
        source: MatrixError,
    },
    /// The embedding or the head could not be loaded.
    #[error("the {name}: {source}")]
    Table {
        /// Its name.
        name: &'static str,
        /// The error.
        source: MatrixError,
    },
}

/// For a pipeline with a stage on a CPU, which has no errors, before one on a GPU.
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
