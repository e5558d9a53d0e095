//! From a checkpoint to a running executor: read, check, decide sizes, pack, start.

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

/// A model, running.
#[derive(Debug)]
pub struct Loaded {
    /// Computes steps.
    pub executor: CpuExecutor,
    /// What the model is.
    pub shape: ModelShape,
    /// What each rank takes.
    pub ledgers: Vec<Ledger>,
    /// The type of most of its weights, as `q4_1`.
    pub weight_type: &'static str,
    /// The instruction set in use.
    pub kernels: &'static str,
}

/// What a checkpoint's weights take, as it would be loaded.
pub struct Survey {
    /// What the model is; its weights' bytes are those in memory.
    pub shape: ModelShape,
    /// The same on a GPU.
    pub gpu_weight_bytes: u64,
    /// The type of most of its weights, as `q4_1`.
    pub weight_type: &'static str,
}

/// Finds and checks every tensor by its header, and reads none of their data.
pub fn survey(checkpoint: &Checkpoint, quantization: Option<Quantization>) -> Result<Survey, LoadError> {
    let config = DecoderConfig::read(checkpoint)?;
    let manifest = Manifest::read_headers(checkpoint, &config, quantization)?;
    let whole = Parts::of(&Shard::whole(&config.shape(0)), &config);
    let shape = config.shape(manifest.bytes(&whole, Stage::WHOLE));
    let gpu_weight_bytes = manifest.device_bytes(&whole, Stage::WHOLE);
    Ok(Survey { shape, gpu_weight_bytes, weight_type: manifest.dominant_type() })
}

/// What [`build`] would take, all ranks together, by the header alone; fails where it would for want of room.
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

/// Loads the last stage of a pipeline, has the others load theirs, and starts the executor of all.
pub fn load_leader(checkpoint: &Checkpoint, options: &LoadOptions, gathering: &Gathering) -> Result<Loaded, LoadError> {
    let stages = gathering.stages;
    let plan = CpuPlan::read(checkpoint, options, |shape| Stage::of(stages.saturating_sub(1), stages, shape))?;
    // A stage's layers are not those of another, whose groups would be others.
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

/// Computes stage `node_rank - 1` of `stages` for the process that leads the pipeline at `leader` (host and port), as
/// long as that wants. The leader may take until `patience` is over to be there.
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

/// Loads a model, whose layers all read everything from one table of blocks. The file is not needed afterwards.
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
