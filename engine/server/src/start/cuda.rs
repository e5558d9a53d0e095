//! A model on this machine's first NVIDIA GPUs: one, or one for each rank of a tensor-parallel group.

use super::engine_thread::launch;
use super::{BuiltOn, StartedModel, cpu, effective, open, read_beside};
use crate::clock::Clock;
use crate::config::{Config, CpuConfig, DeviceChoice};
use crate::failure::Failure;
use crate::fetch::record::FetchRecord;
use crate::gpus;
use crate::monitor::{Built, Monitor};
use std::path::PathBuf;
use std::sync::Arc;
use tracing::{info, warn};
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::flags;
use windlass_engine_contract::memory::kv_pool_bytes;
use windlass_engine_contract::stats::StartPhases;
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::executor::Executor;
use windlass_engine_model::KvBudget;
use windlass_engine_model::cuda::{CudaModel, Device, DriverError, LoadedCuda, Nvidia, Replay, devices};

/// Tokens in a block where the flags give none: a page of the kernels.
const BLOCK_TOKENS: u32 = 64;
/// Share of the memory that weights and workspace leave, which keys and values may take: the rest is for the driver's
/// own, such as graphs.
const KV_SHARE: f64 = 0.9;

/// The GPUs to compute on, if that is what the choice and the machine come to: as many as there are ranks, or all.
pub fn find(cpu: &CpuConfig) -> Result<Option<Vec<Device>>, Failure> {
    match (cpu.device, &cpu.pipeline) {
        (DeviceChoice::Cpu, _) => Ok(None),
        (DeviceChoice::Cuda, Some(_)) => Err(unsupported("a pipeline of several nodes", "use one node")),
        (DeviceChoice::Auto, Some(_)) => Ok(None),
        (DeviceChoice::Cuda, None) => first_devices(cpu.tensor_parallel)
            .map(Some)
            .map_err(|error| Failure::new(Reason::DeviceFailed, format!("{} cuda: {error}", flags::DEVICE))),
        (DeviceChoice::Auto, None) => Ok(first_devices(cpu.tensor_parallel).map_err(|error| tell(&error)).ok()),
    }
}

/// Why `auto` is the CPU.
fn tell(error: &DriverError) {
    match error {
        DriverError::NoDriver | DriverError::NoDevice { .. } => info!("computing on the CPU: {error}"),
        _ => warn!("computing on the CPU, for the GPU cannot be used: {error}"),
    }
}

fn first_devices(ranks: u32) -> Result<Vec<Device>, DriverError> {
    match devices()? {
        0 => Err(DriverError::NoDevice { ordinal: 0, count: 0 }),
        count => {
            let cache = kernel_cache();
            let open = |ordinal| Ok(Device::new(Arc::new(Nvidia::open(ordinal, &cache)?)));
            (0..count.min(ranks as usize)).map(open).collect()
        }
    }
}

/// Where kernels that were compiled at start are kept.
fn kernel_cache() -> PathBuf {
    let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    home.unwrap_or_else(std::env::temp_dir).join("windlass").join("kernels")
}

fn unsupported(what: &str, right: &str) -> Failure {
    Failure::new(Reason::Unsupported, format!("{what} is not there on CUDA yet: {right}, or {} cpu", flags::DEVICE))
}

/// Loads weights and tokenizer side by side, then generates a token.
pub fn start(
    config: &Config,
    cpu: &CpuConfig,
    devices: &[Device],
    monitor: &Arc<Monitor>,
    clock: Clock,
) -> Result<StartedModel, Failure> {
    let speculation = config.speculation.clone();
    let guess = move || speculation.as_ref().map(|speculation| speculation.proposer_without_model("a GPU")).transpose();
    // What is refused is refused before the weights are read.
    guess()?;
    let began = clock.seconds();
    let facts = devices[0].facts();
    for facts in devices.iter().map(Device::facts) {
        info!(device = facts.name, driver = facts.driver, memory_bytes = facts.memory_bytes, "computing on a GPU");
    }
    gpus::watch(devices.iter().map(|device| device.facts().pci_bus_id.clone()).collect(), monitor);
    let file = open(&cpu.model)?;
    let load = {
        let (config, cpu, devices) = (config.clone(), cpu.clone(), devices.to_vec());
        move |file: &Checkpoint| load(&config, &cpu, &devices, file)
    };
    let (read, loaded) = read_beside(&file, config, || load(&file))?;
    let LoadedCuda { executor, ledgers, weight_type, .. } = loaded;
    cpu::check_quantization(cpu, weight_type)?;
    let geometry = executor.geometry();
    let model = cpu.model.clone();
    let reload = move || Ok(load(&open(&model)?)?.executor);
    let load_seconds = clock.seconds() - began;
    let (engine, warm_seconds) = launch(executor, reload, guess, &config.batching, monitor, clock)?;
    let download_seconds = FetchRecord::beside(&cpu.model).map_or(0.0, |record| record.seconds);
    let kv = config.batching.kv_data_type.name();
    let ranks = ledgers.len() as u32;
    let flags = vec![
        format!("quantization={weight_type}"),
        format!("kv-cache-dtype={kv}"),
        format!("tensor-parallel-size={ranks}"),
    ];
    let (major, minor) = facts.capability;
    let kernels = format!("sm_{major}{minor}");
    let on = BuiltOn {
        device: "cuda",
        tensor_parallel: ranks,
        pipeline_parallel: 1,
        quantization: weight_type,
        kernels: &kernels,
    };
    let built = Built {
        fingerprint: read.fingerprint(config, flags, "cuda"),
        effective: effective(config, &geometry, on),
        simulated: false,
        ledger: Some(ledgers.into_iter().sum()),
        start: StartPhases { download_seconds, load_seconds, warm_seconds },
    };
    Ok(StartedModel { engine, tokenizer: read.tokenizer, template: read.template, built })
}

fn load(config: &Config, cpu: &CpuConfig, devices: &[Device], file: &Checkpoint) -> Result<LoadedCuda, Failure> {
    let model = CudaModel::load(file, &cpu::asked(config, cpu, BLOCK_TOKENS), devices).map_err(cpu::load_failure)?;
    let kv = match config.batching.kv {
        Some(kv) => kv,
        None => default_kv(config, &model)?,
    };
    let replay = if cpu.eager { Replay::Eager } else { Replay::Graphs };
    model.start(kv, replay).map_err(cpu::load_failure)
}

/// What all sequences can use at their longest, and at most what the device has left.
fn default_kv(config: &Config, model: &CudaModel) -> Result<KvBudget, Failure> {
    let (batching, shape) = (&config.batching, model.shape());
    let longest = batching.max_model_tokens.unwrap_or(shape.context_tokens).min(shape.context_tokens);
    let useful = kv_pool_bytes(&shape, batching.kv_data_type, &batching.kv_demand(longest, BLOCK_TOKENS));
    let useful = useful.saturating_mul(model.kv_copies().into());
    let free = model.free_bytes().map_err(cpu::load_failure)?;
    Ok(KvBudget::Bytes(useful.min((free as f64 * KV_SHARE) as u64)))
}
