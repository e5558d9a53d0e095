//! A model on this machine's CPU.

use super::engine_thread::launch;
use super::{BuiltOn, StartedModel, effective, open, open_served, read_beside};
use crate::clock::Clock;
use crate::config::{Config, CpuConfig, PipelineConfig};
use crate::failure::Failure;
use crate::fetch::record;
use crate::machine;
use crate::monitor::{Built, Monitor};
use std::net::TcpListener;
use std::sync::Arc;
use tracing::info;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::flags;
use windlass_engine_contract::memory::{StepDefaults, cpu_kv_bytes, process_bytes};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::kv_copies;
use windlass_engine_contract::stats::StartPhases;
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::executor::Executor;
use windlass_engine_model::cuda::{CudaError, MatrixError};
use windlass_engine_model::{
    ConfigError, Gathering, KvBudget, LoadError, LoadOptions, Loaded, Quantization, SizeError, TensorError, load,
    load_leader, survey,
};

/// Loads weights and tokenizer side by side, then generates a token.
pub fn start(config: &Config, cpu: &CpuConfig, monitor: &Arc<Monitor>, clock: Clock) -> Result<StartedModel, Failure> {
    let began = clock.seconds();
    let (file, _) = open_served(config, &cpu.model)?;
    let gathering = cpu.pipeline.as_ref().map(gathering).transpose()?;
    let options = options(config, cpu, &file)?;
    let draft = config.speculation.as_ref().map(|speculation| speculation.ledger(&options)).transpose()?;
    let options = options.beside(draft.unwrap_or_default());
    let load_weights = || match &gathering {
        None => load(&file, &options).map_err(load_failure),
        Some(gathering) => load_leader(&file, &options, gathering).map_err(load_failure),
    };
    let (read, loaded) = read_beside(&file, config, load_weights)?;
    let Loaded { executor, ledgers, weight_type, kernels, .. } = loaded;
    check_quantization(cpu, weight_type)?;
    let geometry = executor.geometry();
    let (speculation, guessing, vocabulary) = (config.speculation.clone(), options.clone(), geometry.vocabulary);
    let guess = move || speculation.as_ref().map(|speculation| speculation.proposer(vocabulary, &guessing)).transpose();
    let (model, alone) = (cpu.model.clone(), cpu.pipeline.is_none());
    let reload = move || match alone {
        true => Ok(load(&open(&model)?, &options).map_err(load_failure)?.executor),
        false => Err(not_loaded_again()),
    };
    let load_seconds = clock.seconds() - began;
    let (engine, warm_seconds) = launch(executor, reload, guess, &config.batching, monitor, clock)?;
    let download_seconds = record::download_seconds(&cpu.model);
    let varies = (!cpu.batch_invariant).then(|| "no-deterministic".to_owned());
    let flags = [
        cpu.quantization_flag(weight_type),
        format!("kv-cache-dtype={}", config.batching.kv_data_type.name()),
        format!("activation-dtype={:?}", cpu.cpu_activations()),
        cpu.ranks_flag(),
    ];
    let flags = flags.into_iter().chain(varies).collect();
    let on = BuiltOn {
        device: "cpu",
        tensor_parallel: ledgers.len() as u32,
        pipeline_parallel: gathering.as_ref().map_or(1, |gathering| gathering.stages),
        quantization: weight_type,
        kernels,
    };
    let built = Built {
        fingerprint: read.fingerprint(config, flags, "cpu"),
        effective: effective(config, &geometry, on),
        simulated: false,
        ledger: Some(ledgers.into_iter().chain(draft).sum()),
        start: StartPhases { download_seconds, load_seconds, warm_seconds },
    };
    Ok(StartedModel { engine, tokenizer: read.tokenizer, template: read.template, built })
}

/// Computes a stage for the process that leads the pipeline, as long as that wants.
pub fn work(config: &Config, cpu: &CpuConfig, pipeline: &PipelineConfig) -> Result<(), Failure> {
    let file = open(&cpu.model)?;
    let options = options(config, cpu, &file)?;
    let PipelineConfig { nodes, node_rank, master, patience } = pipeline;
    windlass_engine_model::work(&file, &options, *node_rank, *nodes, master, *patience).map_err(load_failure)
}

/// Why a pipeline whose weights are gone stays asleep.
pub(super) fn not_loaded_again() -> Failure {
    Failure::new(Reason::Unsupported, "a pipeline of several processes is not loaded again: restart them")
}

/// Listens for the other nodes.
pub(super) fn gathering(pipeline: &PipelineConfig) -> Result<Gathering, Failure> {
    let PipelineConfig { nodes, master, patience, .. } = pipeline;
    let listener = TcpListener::bind(master)
        .map_err(|error| Failure::configuration(format!("cannot listen on {master} for other nodes: {error}")))?;
    info!(address = master, nodes, "waiting for the other nodes of the pipeline");
    Ok(Gathering { listener, stages: *nodes, patience: *patience })
}

fn options(config: &Config, cpu: &CpuConfig, file: &Checkpoint) -> Result<LoadOptions, Failure> {
    let shape = survey(file, quantization(cpu)).map_err(load_failure)?.shape;
    // Of the process most comes beside the weights or after them, as the tokenizer does.
    let to_come = process_bytes(shape.vocabulary).saturating_sub(machine::own_bytes());
    let free = machine::free_memory_bytes().map(|free| free.saturating_sub(to_come));
    let kv = config.batching.kv.unwrap_or_else(|| default_kv(config, cpu, shape, free));
    let asked = asked(config, cpu, StepDefaults::CPU);
    Ok(LoadOptions { activations: cpu.cpu_activations(), kv, memory_limit_bytes: free, ..asked })
}

/// What the flags ask of a device that has these defaults.
pub(super) fn asked(config: &Config, cpu: &CpuConfig, defaults: StepDefaults) -> LoadOptions {
    let batching = &config.batching;
    let StepDefaults { sequences, tokens, block_tokens } = batching.steps(defaults);
    LoadOptions {
        threads: cpu.threads,
        tensor_parallel: cpu.tensor_parallel,
        expert_parallel: cpu.expert_parallel,
        quantization: quantization(cpu),
        kv_data_type: batching.kv_data_type,
        block_tokens,
        swap: batching.swap.clone(),
        max_sequences: sequences,
        max_step_tokens: tokens,
        max_model_tokens: batching.max_model_tokens,
        batch_invariant: cpu.batch_invariant,
        inputs_in_bytes: cpu.inputs_in_bytes(),
        gpu_share: cpu.gpu_share,
        ..LoadOptions::default()
    }
}

/// What all sequences can use at their longest, and at most a quarter of what the weights leave free: those that are loaded,
/// as they are then.
fn default_kv(config: &Config, cpu: &CpuConfig, shape: ModelShape, free: Option<u64>) -> KvBudget {
    // Stages of a pipeline keep everything in all layers.
    let shape = ModelShape { windowed: shape.windowed.filter(|_| cpu.pipeline.is_none()), ..shape };
    let copies = u64::from(kv_copies(&shape, cpu.tensor_parallel));
    let useful = copies.saturating_mul(config.batching.useful_kv_bytes(&shape, StepDefaults::CPU));
    let affordable = free.map_or(u64::MAX, |free| cpu_kv_bytes(free, shape.weight_bytes));
    KvBudget::Bytes(useful.min(affordable))
}

/// What float weights are to become; the name of a file's type is only a check.
fn quantization(cpu: &CpuConfig) -> Option<Quantization> {
    Quantization::named(cpu.quantization.as_deref()?)
}

pub(super) fn check_quantization(cpu: &CpuConfig, weight_type: &str) -> Result<(), Failure> {
    match &cpu.quantization {
        Some(wanted) if wanted != weight_type && Quantization::named(wanted).is_none() => {
            let flag = flags::QUANTIZATION;
            let message = format!("{flag} is {wanted} and the file holds {weight_type}: use auto or {weight_type}");
            Err(Failure::new(Reason::Unsupported, message))
        }
        _ => Ok(()),
    }
}

/// Why a model was not loaded, for the exit code.
pub fn load_failure(error: LoadError) -> Failure {
    let reason = match &error {
        LoadError::Config(ConfigError::Unsupported(_)) | LoadError::Tensors(TensorError::Unsupported(_)) => {
            Reason::Unsupported
        }
        LoadError::Ranks(_) => Reason::Unsupported,
        LoadError::Config(_) | LoadError::Tensors(_) => Reason::ModelInvalid,
        LoadError::Sizes(SizeError::Memory { .. } | SizeError::NoBlock { .. } | SizeError::KvTooSmall { .. }) => {
            Reason::OutOfMemory
        }
        LoadError::Sizes(_) => Reason::InvalidConfiguration,
        LoadError::Cuda(error) => cuda_reason(error),
        LoadError::Swap { .. } => Reason::InvalidConfiguration,
        LoadError::Threads { .. } | LoadError::Pipeline(_) => Reason::DeviceFailed,
    };
    Failure::new(reason, error)
}

fn cuda_reason(error: &CudaError) -> Reason {
    match error {
        CudaError::Unsupported { .. } | CudaError::TooFewDevices { .. } => Reason::Unsupported,
        CudaError::Driver(error) if error.is_out_of_memory() => Reason::OutOfMemory,
        CudaError::Weights { source, .. } | CudaError::Table { source, .. } => match source {
            MatrixError::Shape(_) => Reason::ModelInvalid,
            MatrixError::Columns { .. } => Reason::Unsupported,
            MatrixError::Driver(error) if error.is_out_of_memory() => Reason::OutOfMemory,
            MatrixError::Driver(_) => Reason::DeviceFailed,
        },
        CudaError::Driver(_) | CudaError::RankLeft(_) => Reason::DeviceFailed,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{configured, file_of};
    use super::*;
    use windlass_kernels::WeightType;

    /// What else a folder has, such as what reads images, is not loaded either: `survey` counts alike there.
    #[test]
    fn the_cache_has_its_share_of_what_weights_leave_once_they_are_loaded() {
        let file = file_of(WeightType::BF16);
        let checkpoint = open(file.path()).unwrap();
        let (config, cpu) = configured(file.path(), "--quantization int8").unwrap();
        let shape = survey(&checkpoint, Some(Quantization::INT8)).unwrap().shape;
        let loaded = shape.weight_bytes;
        let stored: u64 = checkpoint.tensors().map(|tensor| tensor.bytes.len() as u64).sum();
        assert!(loaded < stored * 3 / 5, "{loaded} of {stored}");
        let budget = default_kv(&config, &cpu, shape, Some(loaded + 4096));
        assert_eq!(budget, KvBudget::Bytes(1024));
    }
}
