//! From a checkpoint to a running executor: read, check, decide sizes, pack, start.

use std::collections::BTreeMap;
use std::io;
use std::panic::resume_unwind;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::{KvDataType, Ledger};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Indivisible, Shard, Stage};
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_kernels::{Activations, KvType, Pool, processors};

use crate::config::{ConfigError, DecoderConfig};
use crate::cpu::{CpuBackend, Place};
use crate::cuda::CudaError;
use crate::decoder::Decoder;
use crate::executor::CpuExecutor;
use crate::group::Member;
use crate::part::Parts;
use crate::pipeline::{self, Gathering, Join, PipelineError, Worker};
use crate::quantization::Quantization;
use crate::ranks::{Rank, Ranks};
use crate::sizes::{LoadOptions, SizeError, Sizes};
use crate::step::StepRunner;
use crate::weights::{Manifest, ShardError, TensorError};

/// Why a checkpoint cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its tensors.
    #[error(transparent)]
    Tensors(#[from] TensorError),
    /// The ranks asked for.
    #[error(transparent)]
    Ranks(#[from] ShardError),
    /// The sizes asked for.
    #[error(transparent)]
    Sizes(#[from] SizeError),
    /// Other processes.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// A GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
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
    /// What each rank takes.
    pub ledgers: Vec<Ledger>,
    /// The type of most of its weights, as `q4_1`.
    pub weight_type: &'static str,
    /// The instruction set in use.
    pub kernels: &'static str,
}

/// A model, loaded and not yet handed to an executor: for references and measurements that drive it step by step.
pub struct Built {
    /// The decoder with its weights.
    pub decoder: Ranks<CpuBackend>,
    /// Sizes that steps must keep.
    pub geometry: Geometry,
    /// What the model is.
    pub shape: ModelShape,
    /// What each rank takes.
    pub ledgers: Vec<Ledger>,
    /// The type of most of its weights, as `q4_1`.
    pub weight_type: &'static str,
}

impl Built {
    /// What all ranks take together.
    pub fn ledger(&self) -> Ledger {
        self.ledgers.iter().copied().sum()
    }
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
    let draft = Draft::read(checkpoint, options, |_| Ok(Stage::WHOLE))?;
    Ok(draft.sizes(KvGroups::ONE, options)?.ranks.into_iter().sum())
}

/// Loads a model and starts its executor. The file is not needed afterwards.
pub fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Loaded, LoadError> {
    let draft = Draft::read(checkpoint, options, |_| Ok(Stage::WHOLE))?;
    let built = draft.build(draft.sizes(options.kv_groups(&draft.config.shape(0)), options)?, options)?;
    start(built, options)
}

/// Loads the last stage of a pipeline, has the others load theirs, and starts the executor of all.
pub fn load_leader(checkpoint: &Checkpoint, options: &LoadOptions, gathering: &Gathering) -> Result<Loaded, LoadError> {
    let stages = gathering.stages;
    let draft = Draft::read(checkpoint, options, |shape| Stage::of(stages.saturating_sub(1), stages, shape))?;
    // A stage's layers are not those of another, whose groups would be others.
    let sizes = draft.sizes(KvGroups::undivided(&draft.config.shape(0)), options)?;
    let mut earlier = gathering.gather(&draft.join(0, options))?;
    for peer in &mut earlier {
        peer.assign(stages, &sizes.geometry, draft.config.hidden)?;
    }
    let built = draft.build(sizes, options)?;
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
    let draft = Draft::read(checkpoint, options, |shape| Stage::of(node_rank.saturating_sub(1), stages, shape))?;
    let mut worker = Worker::join(leader, &draft.join(node_rank, options), patience)?;
    let geometry = worker.assignment()?.geometry();
    let built = Sizes::check(&draft.shapes, draft.config.rotary_dims(), geometry, options).map_err(LoadError::from);
    let built = built.and_then(|sizes| draft.build(sizes, options));
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
    let draft = Draft::read(checkpoint, options, |_| Ok(Stage::WHOLE))?;
    draft.build(draft.sizes(KvGroups::ONE, options)?, options)
}

fn start(built: Built, options: &LoadOptions) -> Result<Loaded, LoadError> {
    let Built { decoder, geometry, shape, ledgers, weight_type } = built;
    let tier = options.swap.as_ref().map(|swap| swap.tier(&shape, &geometry, options.kv_data_type)).transpose();
    let tier = tier.map_err(|source| LoadError::Swap { source })?;
    let kernels = decoder.backend().kernels();
    let executor = CpuExecutor::start(StepRunner::new(decoder, geometry, tier)).map_err(no_threads(1))?;
    Ok(Loaded { executor, shape, ledgers, weight_type, kernels })
}

/// A stage of a model, read and divided among its ranks; nothing is allocated for it yet.
pub(crate) struct Draft<'a> {
    /// Of the whole model.
    pub config: DecoderConfig,
    pub manifest: Manifest<'a>,
    stage: Stage,
    shards: Vec<Shard>,
    /// The ranks' parts of the stage.
    pub shapes: Vec<ModelShape>,
}

impl<'a> Draft<'a> {
    /// Finds and checks every tensor; `stage` says which part of the whole model this is.
    pub fn read(
        checkpoint: &'a Checkpoint,
        options: &LoadOptions,
        stage: impl FnOnce(&ModelShape) -> Result<Stage, Indivisible>,
    ) -> Result<Draft<'a>, LoadError> {
        let config = DecoderConfig::read(checkpoint)?;
        let manifest = Manifest::read(checkpoint, &config, options.quantization)?;
        let stage = stage(&config.shape(0)).map_err(ShardError::from)?;
        let shards = manifest.shards(&config, options, 1)?;
        let shape = |shard: &Shard| {
            let bytes = manifest.bytes(&Parts::of(shard, &config), stage);
            let part = config.of_rank(shard, stage).shape(bytes);
            ModelShape { windowed: part.windowed.filter(|_| stage == Stage::WHOLE), ..part }
        };
        let shapes = shards.iter().map(shape).collect();
        Ok(Draft { config, manifest, stage, shards, shapes })
    }

    fn sizes(&self, groups: KvGroups, options: &LoadOptions) -> Result<Sizes, SizeError> {
        Sizes::decide(&self.shapes, self.config.rotary_dims(), groups, options)
    }

    /// How this process presents itself to the other stages.
    fn join(&self, node_rank: u32, options: &LoadOptions) -> Join {
        let device = ("cpu", options.choices_on_cpu());
        join(&self.manifest, &self.config, self.stage.count, node_rank, device)
    }

    /// Packs every rank's part on threads of its own, near the memory that it will read.
    pub fn build(&self, sizes: Sizes, options: &LoadOptions) -> Result<Built, LoadError> {
        let (count, geometry) = (self.shards.len(), sizes.geometry);
        let places = self.shards.iter().zip(Member::group(count)).zip(shares(count, options.threads));
        let ranks = thread::scope(|scope| {
            let spawn =
                |((shard, member), share)| scope.spawn(move || self.rank(shard, member, share, &geometry, options));
            let threads: Vec<_> = places.map(spawn).collect();
            let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            threads.into_iter().map(join).collect::<Result<Vec<_>, LoadError>>()
        })?;
        let mut ranks = ranks.into_iter();
        let Some(first) = ranks.next() else { return Err(SizeError::Zero("the number of ranks").into()) };
        Ok(Built {
            decoder: Ranks::start(first, ranks.collect()).map_err(no_threads(count))?,
            geometry,
            shape: self.config.shape(sizes.ranks.iter().map(|ledger| ledger.weights).sum()),
            ledgers: sizes.ranks,
            weight_type: self.manifest.dominant_type(),
        })
    }

    fn rank(
        &self,
        shard: &Shard,
        member: Member,
        share: Share,
        geometry: &Geometry,
        options: &LoadOptions,
    ) -> Result<Rank<CpuBackend>, LoadError> {
        let Share { threads, processors } = share;
        if !processors.is_empty() {
            processors::confine(&processors);
        }
        let pool = Pool::with_kernels(threads, options.kernels).map_err(no_threads(threads))?;
        let vocabulary = shard.vocabulary.start as usize..shard.vocabulary.end as usize;
        let activations = match options.batch_invariant {
            true => Activations::new(options.activations),
            false => Activations::new(options.activations).varying(),
        };
        let config = self.config.of_rank(shard, self.stage);
        let kv = match options.kv_data_type {
            KvDataType::Bf16 => KvType::Bf16,
            KvDataType::F16 => KvType::F16,
            KvDataType::Fp8 => KvType::Fp8,
            KvDataType::Int8 => KvType::Int8,
            KvDataType::Int4 => KvType::Int4,
        };
        let backend = CpuBackend::new(pool, activations, config.clone(), kv, Place { member, vocabulary }, geometry);
        let weights = self.manifest.pack(&backend, &Parts::of(shard, &self.config), self.stage)?;
        let (tokens, rows) = (geometry.max_step_tokens as usize, geometry.max_step_logits as usize);
        Ok(Rank { decoder: Decoder::new(config, backend, weights, tokens, rows), processors })
    }
}

/// How a process that computes a stage on a device, with what was chosen there, presents itself to the others.
pub(crate) fn join(
    manifest: &Manifest<'_>,
    config: &DecoderConfig,
    stages: u32,
    node_rank: u32,
    (device, choices): (&str, BTreeMap<String, String>),
) -> Join {
    let whole = Parts::of(&Shard::whole(&config.shape(0)), config);
    Join {
        version: pipeline::VERSION,
        node_rank,
        stages,
        device: device.to_owned(),
        choices,
        shape: config.shape(manifest.bytes(&whole, Stage::WHOLE)),
        weight_type: manifest.dominant_type().to_owned(),
    }
}

/// A rank's share of the machine.
#[derive(Debug, PartialEq, Eq)]
struct Share {
    threads: usize,
    /// Empty for any.
    processors: Vec<usize>,
}

/// Divides `threads` among ranks: with a thread for each processor a rank gets processors of its own, in as few memory
/// nodes as can be. A rank has a thread at least.
fn shares(ranks: usize, threads: usize) -> Vec<Share> {
    let exclusive = Some(processors::shares(ranks))
        .filter(|shares| ranks > 1 && shares.iter().map(Vec::len).sum::<usize>() == threads);
    match exclusive {
        Some(shares) => shares.into_iter().map(|processors| Share { threads: processors.len(), processors }).collect(),
        None => {
            let border = |rank: usize| threads * rank / ranks;
            let share =
                |rank: usize| Share { threads: (border(rank + 1) - border(rank)).max(1), processors: Vec::new() };
            (0..ranks).map(share).collect()
        }
    }
}

pub(crate) fn no_threads(threads: usize) -> impl Fn(io::Error) -> LoadError {
    move |source| LoadError::Threads { threads, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_divided_and_no_rank_is_left_without() {
        let threads =
            |ranks, threads| -> Vec<usize> { shares(ranks, threads).iter().map(|share| share.threads).collect() };
        assert_eq!(threads(1, 5), [5]);
        assert_eq!(threads(3, 1000).iter().sum::<usize>(), 1000);
        assert_eq!(threads(4, 2), [1; 4]);
        let processors = processors::allowed().len();
        let exclusive = shares(processors, processors);
        assert!(processors == 1 || exclusive.iter().all(|share| share.processors.len() == 1), "{exclusive:?}");
    }
}
