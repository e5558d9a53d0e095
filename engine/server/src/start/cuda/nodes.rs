//! A model whose layers are divided among nodes with GPUs.

use super::{Running, architecture, cpu, default_kv, replay};
use crate::config::{Config, CpuConfig, PipelineConfig};
use crate::failure::Failure;
use crate::start::open;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::StepDefaults;
use windlass_engine_model::cuda::{self, CudaLeader, Device, LoadedCuda, Node};
use windlass_engine_model::{CpuExecutor, Gathering};

/// Loads the last layers here, and has the other nodes load theirs.
pub(super) fn load(
    config: &Config,
    cpu: &CpuConfig,
    gathering: &Gathering,
    devices: &[Device],
    file: &Checkpoint,
) -> Result<Running<CpuExecutor>, Failure> {
    let asked = cpu::asked(config, cpu, StepDefaults::CUDA);
    let leader = CudaLeader::load(file, &asked, devices, gathering).map_err(cpu::load_failure)?;
    let kv = match config.batching.kv {
        Some(kv) => kv,
        None => {
            let free = leader.free_bytes().map_err(cpu::load_failure)?;
            default_kv(config, &leader.shape(), leader.kv_copies(), free)
        }
    };
    let LoadedCuda { executor, ledgers, weight_type, .. } = leader.start(kv, replay(cpu)).map_err(cpu::load_failure)?;
    // The host draws, whose sums of probabilities round otherwise than a GPU's.
    let flags = vec![format!("pipeline-parallel-size={}", gathering.stages)];
    Ok(Running { executor, ledgers, weight_type, kernels: architecture(&devices[0]), flags })
}

/// Computes a stage.
pub(super) fn work(
    config: &Config,
    cpu: &CpuConfig,
    pipeline: &PipelineConfig,
    devices: &[Device],
) -> Result<(), Failure> {
    let PipelineConfig { nodes, node_rank, master, patience } = pipeline;
    let node = Node { node_rank: *node_rank, stages: *nodes, leader: master, patience: *patience };
    let asked = cpu::asked(config, cpu, StepDefaults::CUDA);
    cuda::work(&open(&cpu.model)?, &asked, devices, node, replay(cpu)).map_err(cpu::load_failure)
}
