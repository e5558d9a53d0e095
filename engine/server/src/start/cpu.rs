//! A model on this machine's CPU.

use super::engine_thread::launch;
use super::{Started, open, read_text};
use crate::clock::Clock;
use crate::config::{Config, CpuConfig};
use crate::failure::Failure;
use crate::fetch::record::FetchRecord;
use crate::machine;
use crate::monitor::{Built, Monitor};
use std::sync::Arc;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::flags;
use windlass_engine_contract::memory::kv_bytes_per_token;
use windlass_engine_contract::stats::{EffectiveConfig, StartPhases};
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::executor::{Executor, Geometry};
use windlass_engine_model::{
    ConfigError, DecoderConfig, KvBudget, LoadError, LoadOptions, Loaded, Quantization, SizeError, TensorError, load,
};

/// Loads weights and tokenizer side by side, then generates a token.
pub fn start(config: &Config, cpu: &CpuConfig, monitor: &Arc<Monitor>, clock: Clock) -> Result<Started, Failure> {
    let began = clock.seconds();
    let file = open(&cpu.model)?;
    let options = options(config, cpu, &file)?;
    let (text, loaded) = std::thread::scope(|scope| {
        let text = scope.spawn(|| read_text(&file));
        let loaded = load(&file, &options).map_err(load_failure);
        (text.join(), loaded)
    });
    let (tokenizer, template) = text.map_err(|_| Failure::internal("reading the tokenizer panicked"))??;
    let Loaded { executor, ledger, weight_type, kernels, .. } = loaded?;
    check_quantization(cpu, weight_type)?;
    let geometry = executor.geometry();
    let proposer = config.speculation.as_ref().map(|speculation| {
        speculation.proposer(geometry.vocabulary, &options).map(|proposer| (proposer, speculation.tokens))
    });
    let proposer = proposer.transpose()?;
    let load_seconds = clock.seconds() - began;
    let (engine, warm_seconds) = launch(executor, &config.batching, proposer, monitor, clock)?;
    let download_seconds = FetchRecord::beside(&cpu.model).map_or(0.0, |record| record.seconds);
    let built = Built {
        effective: effective(config, &geometry, weight_type, kernels),
        simulated: false,
        ledger: Some(ledger),
        start: StartPhases { download_seconds, load_seconds, warm_seconds },
    };
    Ok(Started { engine, tokenizer, template, built })
}

fn options(config: &Config, cpu: &CpuConfig, file: &Checkpoint) -> Result<LoadOptions, Failure> {
    let batching = &config.batching;
    let free = machine::free_memory_bytes();
    let kv = match batching.kv {
        Some(kv) => kv,
        None => default_kv(config, file, free)?,
    };
    Ok(LoadOptions {
        threads: cpu.threads,
        activations: cpu.activations,
        quantization: quantization(cpu),
        kv_data_type: batching.kv_data_type,
        block_tokens: batching.block_tokens,
        kv,
        swap: batching.swap.clone(),
        max_sequences: batching.max_sequences,
        max_step_tokens: batching.max_step_tokens,
        max_model_tokens: batching.max_model_tokens,
        memory_limit_bytes: free,
        ..LoadOptions::default()
    })
}

/// What all sequences can use at their longest, and at most a quarter of what the weights leave free.
fn default_kv(config: &Config, file: &Checkpoint, free: Option<u64>) -> Result<KvBudget, Failure> {
    let weights: u64 = file.tensors().map(|tensor| tensor.bytes.len() as u64).sum();
    let shape = DecoderConfig::read(file).map_err(|error| load_failure(error.into()))?.shape(weights);
    let longest = config.batching.max_model_tokens.unwrap_or(shape.context_tokens).min(shape.context_tokens);
    let tokens = u64::from(longest) * u64::from(config.batching.max_sequences);
    let useful = tokens.saturating_mul(kv_bytes_per_token(&shape, config.batching.kv_data_type));
    let affordable = free.map_or(u64::MAX, |free| free.saturating_sub(weights) / 4);
    Ok(KvBudget::Bytes(useful.min(affordable)))
}

/// What float weights are to become; the name of a file's type is only a check.
fn quantization(cpu: &CpuConfig) -> Option<Quantization> {
    Quantization::named(cpu.quantization.as_deref()?)
}

fn check_quantization(cpu: &CpuConfig, weight_type: &str) -> Result<(), Failure> {
    match &cpu.quantization {
        Some(wanted) if wanted != weight_type && Quantization::named(wanted).is_none() => {
            let flag = flags::QUANTIZATION;
            let message = format!("{flag} is {wanted} and the file holds {weight_type}: use auto or {weight_type}");
            Err(Failure::new(Reason::Unsupported, message))
        }
        _ => Ok(()),
    }
}

fn effective(config: &Config, geometry: &Geometry, weight_type: &str, kernels: &str) -> EffectiveConfig {
    EffectiveConfig {
        device: "cpu".to_owned(),
        tensor_parallel: 1,
        quantization: weight_type.to_owned(),
        kv_cache_data_type: config.batching.kv_data_type.name().to_owned(),
        max_model_tokens: geometry.max_sequence_tokens,
        max_sequences: geometry.max_step_rows,
        kv_blocks: geometry.blocks,
        block_tokens: geometry.block_tokens,
        served_names: config.served_names.clone(),
        kernels: kernels.to_owned(),
    }
}

/// Why a model was not loaded, for the exit code.
pub fn load_failure(error: LoadError) -> Failure {
    let reason = match &error {
        LoadError::Config(ConfigError::Unsupported(_)) | LoadError::Tensors(TensorError::Unsupported(_)) => {
            Reason::Unsupported
        }
        LoadError::Config(_) | LoadError::Tensors(_) => Reason::ModelInvalid,
        LoadError::Sizes(SizeError::Memory { .. } | SizeError::NoBlock { .. } | SizeError::KvTooSmall { .. }) => {
            Reason::OutOfMemory
        }
        LoadError::Sizes(_) => Reason::InvalidConfiguration,
        LoadError::Swap { .. } => Reason::InvalidConfiguration,
        LoadError::Threads { .. } => Reason::DeviceFailed,
    };
    Failure::new(reason, error)
}
