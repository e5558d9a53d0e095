//! From a checkpoint to a running executor: read, check, decide sizes, pack, start.

use std::io;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::{KvDataType, Ledger};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_core::executor::Geometry;
use windlass_kernels::{Activations, KvType, Pool};

use crate::config::{ConfigError, DecoderConfig};
use crate::cpu::CpuBackend;
use crate::decoder::Decoder;
use crate::executor::CpuExecutor;
use crate::quantization::Quantization;
use crate::sizes::{LoadOptions, SizeError, Sizes};
use crate::step::StepRunner;
use crate::weights::{Manifest, TensorError};

/// Why a checkpoint cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its tensors.
    #[error(transparent)]
    Tensors(#[from] TensorError),
    /// The sizes asked for.
    #[error(transparent)]
    Sizes(#[from] SizeError),
    /// There is no place for blocks that leave the pool.
    #[error("cannot make the swap file: {source}")]
    Swap {
        /// What the system said.
        source: io::Error,
    },
    /// The system gave no threads.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        source: io::Error,
    },
}

/// A model, running.
#[derive(Debug)]
pub struct Loaded {
    /// Computes steps.
    pub executor: CpuExecutor,
    /// What the model is.
    pub shape: ModelShape,
    /// What it takes.
    pub ledger: Ledger,
    /// The type of most of its weights, as `q4_1`.
    pub weight_type: &'static str,
    /// The instruction set in use.
    pub kernels: &'static str,
}

/// A model, loaded and not yet handed to an executor: for references and measurements that drive it step by step.
pub struct Built {
    /// The decoder with its weights.
    pub decoder: Decoder<CpuBackend>,
    /// Sizes that steps must keep.
    pub geometry: Geometry,
    /// What the model is.
    pub shape: ModelShape,
    /// What it takes.
    pub ledger: Ledger,
    /// The type of most of its weights, as `q4_1`.
    pub weight_type: &'static str,
}

/// What a checkpoint's weights take, as it would be loaded.
pub struct Survey {
    /// What the model is; its weights' bytes are those in memory.
    pub shape: ModelShape,
    /// The type of most of its weights, as `q4_1`.
    pub weight_type: &'static str,
}

/// Finds and checks every tensor by its header, and reads none of their data.
pub fn survey(checkpoint: &Checkpoint, quantization: Option<Quantization>) -> Result<Survey, LoadError> {
    let config = DecoderConfig::read(checkpoint)?;
    let manifest = Manifest::read(checkpoint, &config, quantization)?;
    Ok(Survey { shape: config.shape(manifest.bytes()), weight_type: manifest.dominant_type() })
}

/// Loads a model and starts its executor. The file is not needed afterwards.
pub fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Loaded, LoadError> {
    let Built { decoder, geometry, shape, ledger, weight_type } = build(checkpoint, options)?;
    let tier = options.swap.as_ref().map(|swap| swap.tier(&shape, &geometry, options.kv_data_type)).transpose();
    let tier = tier.map_err(|source| LoadError::Swap { source })?;
    let kernels = decoder.backend().kernels();
    let executor = CpuExecutor::start(geometry, StepRunner::new(decoder, geometry, tier))
        .map_err(|source| LoadError::Threads { threads: 1, source })?;
    Ok(Loaded { executor, shape, ledger, weight_type, kernels })
}

/// Loads a model. The file is not needed afterwards.
pub fn build(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Built, LoadError> {
    let config = DecoderConfig::read(checkpoint)?;
    let manifest = Manifest::read(checkpoint, &config, options.quantization)?;
    let shape = config.shape(manifest.bytes());
    let Sizes { geometry, ledger } = Sizes::decide(&shape, config.rope.dims, options)?;
    let backend = cpu_backend(&config, &geometry, options)?;
    let weights = manifest.pack(&backend)?;
    let weight_type = manifest.dominant_type();
    let (step_tokens, rows) = (geometry.max_step_tokens as usize, geometry.max_step_logits as usize);
    let decoder = Decoder::new(config, backend, weights, step_tokens, rows);
    Ok(Built { decoder, geometry, shape, ledger, weight_type })
}

fn cpu_backend(config: &DecoderConfig, geometry: &Geometry, options: &LoadOptions) -> Result<CpuBackend, LoadError> {
    let threads = options.threads;
    let pool = Pool::with_kernels(threads, options.kernels).map_err(|source| LoadError::Threads { threads, source })?;
    let [block_tokens, blocks, positions] =
        [geometry.block_tokens, geometry.blocks, geometry.max_sequence_tokens].map(|size| size as usize);
    let activations = Activations::new(options.activations);
    let kv = match options.kv_data_type {
        KvDataType::Bf16 => KvType::Bf16,
        KvDataType::Int8 => KvType::Int8,
    };
    Ok(CpuBackend::new(pool, activations, config.clone(), kv, block_tokens, blocks, positions))
}
