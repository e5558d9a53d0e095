//! Loads a checkpoint and starts its executor: read, check, decide sizes, pack, start.

use std::time::Duration;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Shard, Stage};
use windlass_engine_core::executor::KvGroups;

use crate::config::DecoderConfig;
use crate::cpu::{Built, CpuPlan};
use crate::error::{LoadError, no_threads};
use crate::executor::CpuExecutor;
use crate::pipeline::{Gathering, Worker};
use crate::sizes::{LoadOptions, Sizes};
use crate::step::StepRunner;
use crate::weights::Manifest;
use crate::weights::part::Parts;
use crate::weights::quantization::Quantization;

/// A running model.
#[derive(Debug)]
pub struct Loaded {
    /// Computes steps.
    pub executor: CpuExecutor,
    /// The shape of the model.
    pub shape: ModelShape,
    /// The memory that each rank takes.
    pub ledgers: Vec<Ledger>,
    /// The weight format of most weights, as `q4_1`.
    pub weight_type: &'static str,
    /// The instruction set in use.
    pub kernels: &'static str,
}

/// The memory that a checkpoint's weights take once loaded.
pub struct Survey {
    /// The shape of the model, with the bytes of its weights in memory.
    pub shape: ModelShape,
    /// Bytes of its weights on a GPU.
    pub gpu_weight_bytes: u64,
    /// The weight format of most weights, as `q4_1`.
    pub weight_type: &'static str,
}

/// Finds and checks every tensor by the headers, without reading data.
pub fn survey(checkpoint: &Checkpoint, quantization: Option<Quantization>) -> Result<Survey, LoadError> {
    let config = DecoderConfig::read(checkpoint)?;
    let manifest = Manifest::read_headers(checkpoint, &config, quantization)?;
    let whole = Parts::of(&Shard::whole(&config.shape(0)), &config);
    let shape = config.shape(manifest.bytes(&whole, Stage::WHOLE));
    let gpu_weight_bytes = manifest.device_bytes(&whole, Stage::WHOLE);
    Ok(Survey { shape, gpu_weight_bytes, weight_type: manifest.dominant_type() })
}

/// The memory that [`build`] would take, for all ranks together, by the headers alone. Fails if [`build`] would fail
/// for lack of memory.
pub fn ledger(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Ledger, LoadError> {
    let plan = CpuPlan::read(checkpoint, options, |_| Ok(Stage::WHOLE))?;
    Ok(plan.sizes(KvGroups::ONE, options)?.ranks.into_iter().sum())
}

/// Loads a model and starts its executor. The file is not needed afterwards.
pub fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Loaded, LoadError> {
    let plan = CpuPlan::read(checkpoint, options, |_| Ok(Stage::WHOLE))?;
    let built = plan.build(plan.sizes(options.kv_groups(&plan.config().shape(0)), options)?, options)?;
    start(built, options)
}

/// Loads the last stage of a pipeline while the other nodes load theirs, and starts the executor of all.
pub fn load_leader(checkpoint: &Checkpoint, options: &LoadOptions, gathering: &Gathering) -> Result<Loaded, LoadError> {
    let stages = gathering.stages;
    let plan = CpuPlan::read(checkpoint, options, |shape| Stage::of(stages.saturating_sub(1), stages, shape))?;
    // Stages have different layers, so they would have different groups.
    let sizes = plan.sizes(KvGroups::undivided(&plan.config().shape(0)), options)?;
    let mut earlier = gathering.gather(&plan.join(0, options))?;
    for peer in &mut earlier {
        peer.assign(stages, &sizes.geometry, plan.config().hidden)?;
    }
    let built = plan.build(sizes, options)?;
    earlier.iter_mut().try_for_each(|peer| peer.ready(gathering.patience))?;
    let Built { decoder, geometry, shape, ledgers, weight_type } = built;
    let kernels = decoder.backend().kernels();
    let runner = StepRunner::new(decoder, geometry, None);
    let executor = CpuExecutor::start_last(runner, earlier).map_err(no_threads(1))?;
    Ok(Loaded { executor, shape, ledgers, weight_type, kernels })
}

/// Computes stage `node_rank - 1` of `stages` for the leader of the pipeline at `leader` (host and port), until the
/// leader ends. Waits up to `patience` for the leader.
pub fn work(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    node_rank: u32,
    stages: u32,
    leader: &str,
    patience: Duration,
) -> Result<(), LoadError> {
    let plan = CpuPlan::read(checkpoint, options, |shape| Stage::of(node_rank.saturating_sub(1), stages, shape))?;
    let mut worker = Worker::join(leader, &plan.join(node_rank, options), patience)?;
    let geometry = worker.assignment()?.geometry();
    let built = Sizes::check(&plan.shapes, plan.config().rotary_dims(), geometry, options).map_err(LoadError::from);
    let built = built.and_then(|sizes| plan.build(sizes, options));
    match built {
        Ok(built) => Ok(worker.work(built.decoder, &geometry)?),
        Err(error) => {
            worker.give_up(&error.to_string());
            Err(error)
        }
    }
}

/// Loads a model with one group of layers, all with full K and V. The file is not needed after that.
pub fn build(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Built, LoadError> {
    let plan = CpuPlan::read(checkpoint, options, |_| Ok(Stage::WHOLE))?;
    plan.build(plan.sizes(KvGroups::ONE, options)?, options)
}

fn start(built: Built, options: &LoadOptions) -> Result<Loaded, LoadError> {
    let Built { decoder, geometry, shape, ledgers, weight_type } = built;
    let tier = options.tier(&shape, &geometry)?;
    let kernels = decoder.backend().kernels();
    let executor = CpuExecutor::start(StepRunner::new(decoder, geometry, tier)).map_err(no_threads(1))?;
    Ok(Loaded { executor, shape, ledgers, weight_type, kernels })
}
