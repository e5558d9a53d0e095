//! A model on this machine's first NVIDIA GPUs: one, or one for each rank of a tensor-parallel group. Its first layers may
//! stay on the CPU, or on other nodes.

mod nodes;
mod split;

use super::engine_thread::launch;
use super::{BuiltOn, StartedModel, cpu, effective, open, open_served, read_beside};
use crate::cli::{ACTIVATION_DTYPE, N_GPU_LAYERS};
use crate::clock::Clock;
use crate::config::{Config, CpuConfig, DeviceChoice, GpuLayers, PipelineConfig};
use crate::failure::Failure;
use crate::fetch::record;
use crate::gpus;
use crate::kernels;
use crate::monitor::{Built, Monitor};
use std::sync::Arc;
use tracing::{info, warn};
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::flags;
use windlass_engine_contract::memory::{Ledger, StepDefaults, cuda_kv_bytes};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::stats::StartPhases;
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::executor::Executor;
use windlass_engine_model::cuda::{
    CudaExecutor, CudaModel, Device, DriverError, Ground, LoadedCuda, Nvidia, Replay, devices,
};
use windlass_engine_model::{ActivationType, KvBudget};

/// The GPUs to compute on, if that is what the choice and the machine come to: as many as there are ranks, or all.
pub fn find(cpu: &CpuConfig) -> Result<Option<Vec<Device>>, Failure> {
    match cpu.device {
        DeviceChoice::Cpu => Ok(None),
        DeviceChoice::Cuda => first_devices(cpu.tensor_parallel)
            .map(Some)
            .map_err(|error| Failure::new(Reason::DeviceFailed, format!("{}: {error}", asks_for_a_gpu(cpu)))),
        DeviceChoice::Auto => Ok(first_devices(cpu.tensor_parallel).map_err(|error| tell(&error)).ok()),
    }
}

/// The flag that does.
fn asks_for_a_gpu(cpu: &CpuConfig) -> String {
    match cpu.gpu_layers {
        Some(layers) => format!("{N_GPU_LAYERS} {layers}"),
        None => format!("{} cuda", flags::DEVICE),
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
            let cache = kernels::cache();
            let open = |ordinal| Ok(Device::new(Arc::new(Nvidia::open(ordinal, &cache)?)));
            (0..count.min(ranks as usize)).map(open).collect()
        }
    }
}

/// A model, loaded.
struct Running<E> {
    executor: E,
    ledgers: Vec<Ledger>,
    weight_type: &'static str,
    /// What multiplies.
    kernels: String,
    /// Those of its flags that change answers and are its own.
    flags: Vec<String>,
}

/// Loads weights and tokenizer side by side, then generates a token.
pub fn start(
    config: &Config,
    cpu: &CpuConfig,
    devices: &[Device],
    monitor: &Arc<Monitor>,
    clock: Clock,
) -> Result<StartedModel, Failure> {
    announce(devices);
    watch(devices, monitor);
    let (file, decoder) = open_served(config, &cpu.model)?;
    let (config_of, cpu_of, devices) = (config.clone(), cpu.clone(), devices.to_vec());
    let split = split_at(config, cpu, &file, decoder.layers, &devices[0])?;
    check_activations(cpu, split)?;
    match (&cpu.pipeline, split) {
        (Some(pipeline), _) => {
            let mut gathering = Some(cpu::gathering(pipeline)?);
            let load = move |file: &Checkpoint| match gathering.take() {
                Some(gathering) => nodes::load(&config_of, &cpu_of, &gathering, &devices, file),
                None => Err(cpu::not_loaded_again()),
            };
            run(config, cpu, &file, load, monitor, clock)
        }
        (None, None) => {
            let load = move |file: &Checkpoint| load(&config_of, &cpu_of, &devices, file);
            run(config, cpu, &file, load, monitor, clock)
        }
        (None, Some(layers)) => {
            let load = move |file: &Checkpoint| split::load(&config_of, &cpu_of, layers, &devices[0], file);
            run(config, cpu, &file, load, monitor, clock)
        }
    }
}

/// Computes a stage on GPUs for the process that leads the pipeline, as long as that wants.
pub fn work(
    config: &Config,
    cpu: &CpuConfig,
    pipeline: &PipelineConfig,
    devices: &[Device],
    monitor: &Arc<Monitor>,
) -> Result<(), Failure> {
    announce(devices);
    watch(devices, monitor);
    check_activations(cpu, None)?;
    nodes::work(config, cpu, pipeline, devices)
}

fn watch(devices: &[Device], monitor: &Arc<Monitor>) {
    gpus::watch(devices.iter().map(|device| device.facts().pci_bus_id.clone()).collect(), monitor);
}

fn announce(devices: &[Device]) {
    for facts in devices.iter().map(Device::facts) {
        info!(device = facts.name, driver = facts.driver, memory_bytes = facts.memory_bytes, "computing on a GPU");
    }
}

/// How many of a file's layers, of which it has `all`, a GPU computes, if some stay on the CPU.
fn split_at(
    config: &Config,
    cpu: &CpuConfig,
    file: &Checkpoint,
    all: usize,
    device: &Device,
) -> Result<Option<u32>, Failure> {
    let Some(layers) = cpu.gpu_layers else { return Ok(None) };
    let layers = match layers {
        GpuLayers::Last(layers) => layers,
        GpuLayers::Auto => split::layers_that_fit(config, cpu, file, device)?,
    };
    Ok(Some(layers).filter(|layers| (*layers as usize) < all))
}

/// Refuses activations that no kernel rounds so: those of layers on the CPU are as fine as that can.
fn check_activations(cpu: &CpuConfig, split: Option<u32>) -> Result<(), Failure> {
    match (cpu.activations, split) {
        (Some(ActivationType::Int16), None) => {
            let message = format!(
                "{ACTIVATION_DTYPE} int16 is not supported on a GPU: leave it out for bf16, which is as fine as GPUs \
                 multiply, or use int8, or {} cpu",
                flags::DEVICE
            );
            Err(Failure::new(Reason::Unsupported, message))
        }
        _ => Ok(()),
    }
}

fn run<E: Executor + 'static>(
    config: &Config,
    cpu: &CpuConfig,
    file: &Checkpoint,
    mut load: impl FnMut(&Checkpoint) -> Result<Running<E>, Failure> + Send + 'static,
    monitor: &Arc<Monitor>,
    clock: Clock,
) -> Result<StartedModel, Failure> {
    let speculation = config.speculation.clone();
    let guess = move || speculation.as_ref().map(|speculation| speculation.proposer_without_model("a GPU")).transpose();
    // What is refused is refused before the weights are read.
    guess()?;
    let began = clock.seconds();
    let (read, running) = read_beside(file, config, || load(file))?;
    let Running { executor, ledgers, weight_type, kernels, flags } = running;
    cpu::check_quantization(cpu, weight_type)?;
    let geometry = executor.geometry();
    let model = cpu.model.clone();
    let reload = move || Ok(load(&open(&model)?)?.executor);
    let load_seconds = clock.seconds() - began;
    let (engine, warm_seconds) = launch(executor, reload, guess, &config.batching, monitor, clock)?;
    let download_seconds = record::download_seconds(&cpu.model);
    let of_all = [
        cpu.quantization_flag(weight_type),
        format!("kv-cache-dtype={}", config.batching.kv_data_type.name()),
        cpu.ranks_flag(),
    ];
    let wide = (!cpu.batch_invariant).then(|| "no-deterministic".to_owned());
    let in_bytes = cpu.inputs_in_bytes().then(|| "gpu-activation-dtype=Int8".to_owned());
    let on = BuiltOn {
        device: "cuda",
        tensor_parallel: cpu.tensor_parallel,
        pipeline_parallel: cpu.pipeline.as_ref().map_or(1, |pipeline| pipeline.nodes),
        quantization: weight_type,
        kernels: &kernels,
    };
    let built = Built {
        fingerprint: read.fingerprint(
            config,
            of_all.into_iter().chain(wide).chain(in_bytes).chain(flags).collect(),
            "cuda",
        ),
        effective: effective(config, &geometry, on),
        simulated: false,
        ledger: Some(ledgers.into_iter().sum()),
        start: StartPhases { download_seconds, load_seconds, warm_seconds },
    };
    Ok(StartedModel { engine, tokenizer: read.tokenizer, template: read.template, built })
}

fn load(
    config: &Config,
    cpu: &CpuConfig,
    devices: &[Device],
    file: &Checkpoint,
) -> Result<Running<CudaExecutor>, Failure> {
    let no_room = |error| say_what_makes_room(cpu::load_failure(error), cpu);
    let model = CudaModel::load(file, &cpu::asked(config, cpu, StepDefaults::CUDA), devices).map_err(no_room)?;
    tell_ground(model.ground());
    match model.products() {
        None => {}
        Some(Ok(library)) => info!("{library} multiplies many tokens with matrices in bf16"),
        Some(Err(why)) => info!("kernels of our own multiply many tokens with matrices in bf16: {why}"),
    }
    let kv = match config.batching.kv {
        Some(kv) => kv,
        None => default_kv(config, &model.shape(), model.kv_copies(), model.free_bytes().map_err(no_room)?),
    };
    let LoadedCuda { executor, ledgers, weight_type, .. } = model.start(kv, replay(cpu)).map_err(no_room)?;
    Ok(Running { executor, ledgers, weight_type, kernels: architecture(&devices[0]), flags: Vec::new() })
}

/// How ranks exchange what they compute, where that is not as GPUs would have it.
fn tell_ground(ground: &Ground) {
    const APART: &str = "GPUs do not reach each other's memory";
    match ground {
        Ground::Devices => {}
        Ground::Carried(carrier) => info!("{APART}: {} carries what ranks compute", carrier.name()),
        Ground::Host(why) => warn!("{APART}: ranks exchange what they compute over the host's ({why})"),
    }
}

fn replay(cpu: &CpuConfig) -> Replay {
    if cpu.eager { Replay::Eager } else { Replay::Graphs }
}

/// As `sm_90`.
fn architecture(device: &Device) -> String {
    let (major, minor) = device.facts().capability;
    format!("sm_{major}{minor}")
}

fn say_what_makes_room(failure: Failure, cpu: &CpuConfig) -> Failure {
    match (failure.reason, cpu.tensor_parallel, &cpu.pipeline) {
        (Reason::OutOfMemory, 1, None) => {
            let layers = if cpu.gpu_layers == Some(GpuLayers::Auto) { "N, less than all," } else { "auto" };
            let message = format!("{}; {N_GPU_LAYERS} {layers} leaves the first layers to the CPU", failure.message);
            Failure { message, ..failure }
        }
        _ => failure,
    }
}

/// What all sequences can use at their longest in layers like these, each key and value held so often, and at most what the
/// devices have left.
fn default_kv(config: &Config, shape: &ModelShape, copies: u32, free_bytes: u64) -> KvBudget {
    let useful = config.batching.useful_kv_bytes(shape, StepDefaults::CUDA).saturating_mul(copies.into());
    KvBudget::Bytes(useful.min(cuda_kv_bytes(free_bytes)))
}

#[cfg(test)]
mod tests;
