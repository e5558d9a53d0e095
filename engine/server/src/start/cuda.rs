//! A model on this machine's first NVIDIA GPU.

use super::engine_thread::launch;
use super::{Started, cpu, open, read_text};
use crate::clock::Clock;
use crate::config::{Config, CpuConfig, DeviceChoice};
use crate::failure::Failure;
use crate::fetch::record::FetchRecord;
use crate::monitor::{Built, Monitor};
use std::path::PathBuf;
use std::sync::Arc;
use tracing::{info, warn};
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::flags;
use windlass_engine_contract::memory::{KvDataType, kv_bytes_per_token, workspace_bytes};
use windlass_engine_contract::stats::{EffectiveConfig, StartPhases};
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::executor::{Executor, Geometry};
use windlass_engine_model::cuda::{self, Device, DriverError, Nvidia};
use windlass_engine_model::{DecoderConfig, KvBudget, LoadOptions, LoadedCuda, Replay, load_cuda};

/// Tokens in a block where the flags give none: a page of the kernels.
const BLOCK_TOKENS: u32 = 64;
/// Share of the free memory that is taken: the rest is for the driver's own.
const MEMORY_SHARE: f64 = 0.9;

/// The GPU to compute on, if that is what `choice` and the machine come to.
pub fn find(choice: DeviceChoice) -> Result<Option<Device>, Failure> {
    match choice {
        DeviceChoice::Cpu => Ok(None),
        DeviceChoice::Cuda => first_device().map(Some).map_err(|error| {
            Failure::new(Reason::DeviceFailed, format!("{} cuda: {error}", flags::DEVICE))
        }),
        DeviceChoice::Auto => match first_device() {
            Ok(device) => Ok(Some(device)),
            Err(error @ (DriverError::NoDriver | DriverError::NoDevice { .. })) => {
                info!("computing on the CPU: {error}");
                Ok(None)
            }
            Err(error) => {
                warn!("computing on the CPU, for the GPU cannot be used: {error}");
                Ok(None)
            }
        },
    }
}

fn first_device() -> Result<Device, DriverError> {
    match cuda::devices()? {
        0 => Err(DriverError::NoDevice { ordinal: 0, count: 0 }),
        _ => Ok(Device::new(Arc::new(Nvidia::open(0, &kernel_cache())?))),
    }
}

/// Where kernels that were compiled at start are kept.
fn kernel_cache() -> PathBuf {
    let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    home.unwrap_or_else(std::env::temp_dir).join("windlass").join("kernels")
}

/// Loads weights and tokenizer side by side, then generates a token.
pub fn start(
    config: &Config,
    cpu: &CpuConfig,
    device: &Device,
    monitor: &Arc<Monitor>,
    clock: Clock,
) -> Result<Started, Failure> {
    let began = clock.seconds();
    let facts = device.facts();
    info!(device = facts.name, driver = facts.driver, memory_bytes = facts.memory_bytes, "computing on a GPU");
    let file = open(&cpu.model)?;
    let options = options(config, cpu, device, &file)?;
    let (text, loaded) = std::thread::scope(|scope| {
        let text = scope.spawn(|| read_text(&file));
        let loaded = load_cuda(&file, &options, device, Replay::Graphs);
        (text.join(), loaded.map_err(cpu::load_failure))
    });
    let (tokenizer, template) = text.map_err(|_| Failure::internal("reading the tokenizer panicked"))??;
    let LoadedCuda { executor, ledger, weight_type, .. } = loaded?;
    cpu::check_quantization(cpu, weight_type)?;
    let geometry = executor.geometry();
    let load_seconds = clock.seconds() - began;
    let (engine, warm_seconds) = launch(executor, &config.batching, monitor, clock)?;
    let download_seconds = FetchRecord::beside(&cpu.model).map_or(0.0, |record| record.seconds);
    let built = Built {
        effective: effective(config, &geometry, weight_type, device),
        simulated: false,
        ledger: Some(ledger),
        start: StartPhases { download_seconds, load_seconds, warm_seconds },
    };
    Ok(Started { engine, tokenizer, template, built })
}

fn options(config: &Config, cpu: &CpuConfig, device: &Device, file: &Checkpoint) -> Result<LoadOptions, Failure> {
    let batching = &config.batching;
    let kv = match batching.kv {
        Some(kv) => kv,
        None => default_kv(config, device, file)?,
    };
    Ok(LoadOptions {
        threads: cpu.threads,
        tensor_parallel: cpu.tensor_parallel,
        quantization: cpu::quantization(cpu),
        block_tokens: batching.block_tokens.unwrap_or(BLOCK_TOKENS),
        kv,
        max_sequences: batching.max_sequences,
        max_step_tokens: batching.max_step_tokens,
        max_model_tokens: batching.max_model_tokens,
        ..LoadOptions::default()
    })
}

/// What weights in bf16, as which all but 4-bit types are held, and the workspace leave; at most what all sequences can
/// use at their longest.
fn default_kv(config: &Config, device: &Device, file: &Checkpoint) -> Result<KvBudget, Failure> {
    let failed = |error: DriverError| Failure::new(Reason::DeviceFailed, error);
    let free = device.driver().memory().map_err(failed)?.free_bytes;
    let values: u64 = file.tensors().map(|tensor| tensor.dims.iter().product::<u64>()).sum();
    let shape = DecoderConfig::read(file).map_err(|error| cpu::load_failure(error.into()))?.shape(2 * values);
    let batching = &config.batching;
    let longest = batching.max_model_tokens.unwrap_or(shape.context_tokens).min(shape.context_tokens);
    let tokens = u64::from(longest) * u64::from(batching.max_sequences);
    let useful = tokens.saturating_mul(kv_bytes_per_token(&shape, KvDataType::Bf16));
    let workspace = workspace_bytes(&shape, batching.max_step_tokens, batching.max_sequences);
    let affordable = ((free as f64 * MEMORY_SHARE) as u64).saturating_sub(shape.weight_bytes + workspace);
    Ok(KvBudget::Bytes(useful.min(affordable)))
}

fn effective(config: &Config, geometry: &Geometry, weight_type: &str, device: &Device) -> EffectiveConfig {
    let (major, minor) = device.facts().capability;
    EffectiveConfig {
        device: "cuda".to_owned(),
        tensor_parallel: 1,
        quantization: weight_type.to_owned(),
        kv_cache_data_type: KvDataType::Bf16.name().to_owned(),
        max_model_tokens: geometry.max_sequence_tokens,
        max_sequences: geometry.max_step_rows,
        kv_blocks: geometry.blocks,
        block_tokens: geometry.block_tokens,
        served_names: config.served_names.clone(),
        kernels: format!("sm_{major}{minor}"),
    }
}
