//! A model whose first layers stay on the CPU.

use super::{Running, architecture, cpu, replay};
use crate::cli::GPU_MEMORY_UTILIZATION;
use crate::config::{Config, CpuConfig, GpuLayers};
use crate::failure::Failure;
use crate::machine;
use tracing::info;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::flags::{DEVICE, MAX_MODEL_LEN};
use windlass_engine_contract::memory::{StepDefaults, cuda_kv_bytes};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::termination::Reason;
use windlass_engine_model::cuda::{self, CudaError, Device, SplitModel};
use windlass_engine_model::{CpuExecutor, KvBudget, LoadError, LoadOptions, Loaded};

/// How many layers a GPU has room for.
pub(super) fn layers_that_fit(
    config: &Config,
    cpu: &CpuConfig,
    file: &Checkpoint,
    device: &Device,
) -> Result<u32, Failure> {
    let asked = cpu::asked(config, cpu, StepDefaults::CUDA);
    let memory = device.driver().memory().map_err(|error| cpu::load_failure(CudaError::from(error).into()))?;
    let room = cpu.gpu_share.of(memory.total_bytes as u64).min(memory.free_bytes as u64);
    match cuda::layers_that_fit(file, &asked, room).map_err(cpu::load_failure)? {
        0 => Err(Failure::new(
            Reason::OutOfMemory,
            format!(
                "a GPU with {room} free bytes has no room for one layer: use {DEVICE} cpu, or a shorter {MAX_MODEL_LEN}, \
                 or a larger {GPU_MEMORY_UTILIZATION} where that is less than 1"
            ),
        )),
        layers => Ok(layers),
    }
}

/// Loads the last `gpu_layers` layers onto a GPU; where they were to be as many as fit, one less for each time that they do not.
pub(super) fn load(
    config: &Config,
    cpu: &CpuConfig,
    gpu_layers: u32,
    device: &Device,
    file: &Checkpoint,
) -> Result<Running<CpuExecutor>, Failure> {
    match load_last(config, cpu, gpu_layers, device, file) {
        Err(failure)
            if failure.reason == Reason::OutOfMemory && cpu.gpu_layers == Some(GpuLayers::Auto) && gpu_layers > 1 =>
        {
            info!(gpu_layers, "the GPU has no room for so many layers: {}", failure.message);
            load(config, cpu, gpu_layers - 1, device, file)
        }
        loaded => loaded,
    }
}

fn load_last(
    config: &Config,
    cpu: &CpuConfig,
    gpu_layers: u32,
    device: &Device,
    file: &Checkpoint,
) -> Result<Running<CpuExecutor>, Failure> {
    let free = machine::free_memory_bytes();
    let asked = cpu::asked(config, cpu, StepDefaults::CUDA);
    let asked = LoadOptions { activations: cpu.cpu_activations(), memory_limit_bytes: free, ..asked };
    let model = SplitModel::load(file, &asked, gpu_layers, device).map_err(cpu::load_failure)?;
    let kv = match config.batching.kv {
        Some(kv) => kv,
        None => default_kv(config, &model, free).map_err(cpu::load_failure)?,
    };
    let Loaded { executor, ledgers, weight_type, kernels, .. } =
        model.start(kv, replay(cpu)).map_err(cpu::load_failure)?;
    let [on_cpu, on_gpu] = [0, 1].map(|part: usize| ledgers[part].total());
    info!(gpu_layers, cpu_bytes = on_cpu, gpu_bytes = on_gpu, "the first layers stay on the CPU");
    Ok(Running {
        executor,
        ledgers,
        weight_type,
        kernels: format!("{} {kernels}", architecture(device)),
        flags: vec![format!("n-gpu-layers={gpu_layers}"), format!("activation-dtype={:?}", cpu.cpu_activations())],
    })
}

/// What all sequences can use at their longest, and at most what the GPU has left and a quarter of what the CPU has.
fn default_kv(config: &Config, model: &SplitModel<'_>, free: Option<u64>) -> Result<KvBudget, LoadError> {
    // Stages keep everything in all layers.
    let shape = ModelShape { windowed: None, ..model.shape() };
    let useful = config.batching.useful_kv_bytes(&shape, StepDefaults::CUDA);
    let on_cpu = free.map_or(u64::MAX, |free| free.saturating_sub(model.cpu_weight_bytes()) / 4);
    let on_gpu = cuda_kv_bytes(model.free_bytes()?);
    Ok(KvBudget::Bytes(useful.min(model.kv_bytes(on_cpu, on_gpu))))
}
