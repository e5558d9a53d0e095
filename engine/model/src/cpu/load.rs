//! Plans the loading of a model, or of a stage of one, to a CPU.

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::{KvDataType, Ledger};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Indivisible, Shard, Stage};
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_kernels::{Activations, KvType, Pool, processors};

use super::collectives::Member;
use super::{CpuBackend, CpuDecoder, CpuLoader, CpuOps, CpuRank, Share};
use crate::config::DecoderConfig;
use crate::decoder::Decoder;
use crate::error::{LoadError, no_threads};
use crate::pipeline::Join;
use crate::ranks::Ranks;
use crate::sharded::ShardedModel;
use crate::sizes::{LoadOptions, SizeError, Sizes};
use crate::weights::part::Parts;

/// A loaded model without an executor: for references and measurements that run it step by step.
pub struct Built {
    /// The decoder with its weights.
    pub decoder: CpuDecoder,
    /// The bounds of steps.
    pub geometry: Geometry,
    /// The shape of the model.
    pub shape: ModelShape,
    /// The memory that each rank takes.
    pub ledgers: Vec<Ledger>,
    /// The weight format of most weights, as `q4_1`.
    pub weight_type: &'static str,
}

impl Built {
    /// The memory that all ranks take together.
    pub fn ledger(&self) -> Ledger {
        self.ledgers.iter().copied().sum()
    }
}

/// A stage of a model that is not loaded yet, with the shapes of the ranks' parts.
pub(crate) struct CpuPlan<'a> {
    pub model: ShardedModel<'a>,
    /// The shapes of the ranks' parts of the stage.
    pub shapes: Vec<ModelShape>,
}

impl<'a> CpuPlan<'a> {
    /// Finds and checks every tensor; `stage` chooses the part of the model.
    pub fn read(
        checkpoint: &'a Checkpoint,
        options: &LoadOptions,
        stage: impl FnOnce(&ModelShape) -> Result<Stage, Indivisible>,
    ) -> Result<CpuPlan<'a>, LoadError> {
        let model = ShardedModel::read(checkpoint, DecoderConfig::read(checkpoint)?, options, 1, stage)?;
        let ShardedModel { config, manifest, stage, shards } = &model;
        let shape = |shard: &Shard| {
            let bytes = manifest.bytes(&Parts::of(shard, config), *stage);
            let part = config.of_rank(shard, *stage).shape(bytes);
            ModelShape { windowed: part.windowed.filter(|_| *stage == Stage::WHOLE), ..part }
        };
        let shapes = shards.iter().map(shape).collect();
        Ok(CpuPlan { model, shapes })
    }

    /// The whole model's configuration.
    pub fn config(&self) -> &DecoderConfig {
        &self.model.config
    }

    /// The sizes by the options, with these groups of layers.
    pub fn sizes(&self, groups: KvGroups, options: &LoadOptions) -> Result<Sizes, SizeError> {
        Sizes::decide(&self.shapes, self.config().rotary_dims(), groups, options)
    }

    /// The introduction of this process to the other stages.
    pub fn join(&self, node_rank: u32, options: &LoadOptions) -> Join {
        self.model.join(node_rank, ("cpu", options.choices_on_cpu()))
    }

    /// Packs the part of each rank in the memory nearest to its processors.
    pub fn build(&self, sizes: Sizes, options: &LoadOptions) -> Result<Built, LoadError> {
        let (count, geometry) = (self.model.shards.len(), sizes.geometry);
        let with = Member::group(count).into_iter().zip(shares(count, options.threads));
        let load = |shard: &Shard, (member, share)| self.rank(shard, member, share, &geometry, options);
        let mut ranks = self.model.on_each_rank(with, load)?.into_iter();
        let Some(first) = ranks.next() else { return Err(SizeError::Zero("the number of ranks").into()) };
        Ok(Built {
            decoder: Ranks::start(first, ranks.collect()).map_err(no_threads(count))?,
            geometry,
            shape: self.config().shape(sizes.ranks.iter().map(|ledger| ledger.weights).sum()),
            ledgers: sizes.ranks,
            weight_type: self.model.manifest.dominant_type(),
        })
    }

    fn rank(
        &self,
        shard: &Shard,
        member: Member,
        share: ProcessorShare,
        geometry: &Geometry,
        options: &LoadOptions,
    ) -> Result<CpuRank, LoadError> {
        let ProcessorShare { threads, processors } = share;
        if !processors.is_empty() {
            processors::confine(&processors);
        }
        let pool = Pool::with_kernels(threads, options.kernels).map_err(no_threads(threads))?;
        let vocabulary = shard.vocabulary.start as usize..shard.vocabulary.end as usize;
        let activations = match options.batch_invariant {
            true => Activations::new(options.activations),
            false => Activations::new(options.activations).varying(),
        };
        let config = self.config().of_rank(shard, self.model.stage);
        let kv = match options.kv_data_type {
            KvDataType::Bf16 => KvType::Bf16,
            KvDataType::F16 => KvType::F16,
            KvDataType::Fp8 => KvType::Fp8,
            KvDataType::Int8 => KvType::Int8,
            KvDataType::Int4 => KvType::Int4,
        };
        let parts = Parts::of(shard, self.config());
        let weights = self.model.manifest.load(&CpuLoader { pool: &pool }, &parts, self.model.stage)?;
        let ops = CpuOps::new(pool, activations, config, kv, Share { member, vocabulary }, geometry);
        let (tokens, rows) = (geometry.max_step_tokens as usize, geometry.max_step_logits as usize);
        Ok(CpuRank { decoder: Decoder { backend: CpuBackend::new(ops, tokens, rows), weights }, processors })
    }
}

/// The threads and processors of a rank.
#[derive(Debug, PartialEq, Eq)]
struct ProcessorShare {
    threads: usize,
    /// Ids of the processors; empty for any.
    processors: Vec<usize>,
}

/// Divides `threads` among ranks, at least one each. If there is a thread for each processor, each rank gets its own
/// processors, on as few NUMA nodes as possible.
fn shares(ranks: usize, threads: usize) -> Vec<ProcessorShare> {
    let exclusive = Some(processors::shares(ranks))
        .filter(|shares| ranks > 1 && shares.iter().map(Vec::len).sum::<usize>() == threads);
    match exclusive {
        Some(shares) => {
            shares.into_iter().map(|processors| ProcessorShare { threads: processors.len(), processors }).collect()
        }
        None => {
            let border = |rank: usize| threads * rank / ranks;
            let share = |rank: usize| ProcessorShare {
                threads: (border(rank + 1) - border(rank)).max(1),
                processors: Vec::new(),
            };
            (0..ranks).map(share).collect()
        }
    }
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
