//! A model, or a stage of one, divided among its ranks; nothing is allocated yet.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::thread::{self, ScopedJoinHandle};

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Indivisible, Shard, Stage};

use crate::config::DecoderConfig;
use crate::error::LoadError;
use crate::pipeline::{self, Join};
use crate::sizes::LoadOptions;
use crate::weights::part::Parts;
use crate::weights::{Manifest, ShardError};

/// The model, or the stage.
pub(crate) struct ShardedModel<'a> {
    /// Configuration of the whole model.
    pub config: DecoderConfig,
    pub manifest: Manifest<'a>,
    pub stage: Stage,
    /// The shard of each rank.
    pub shards: Vec<Shard>,
}

impl<'a> ShardedModel<'a> {
    /// Finds and checks every tensor; `stage` chooses the part of the model. Devices multiply `least_columns` columns
    /// at a time, a power of two.
    pub fn read(
        checkpoint: &'a Checkpoint,
        config: DecoderConfig,
        options: &LoadOptions,
        least_columns: u32,
        stage: impl FnOnce(&ModelShape) -> Result<Stage, Indivisible>,
    ) -> Result<ShardedModel<'a>, LoadError> {
        let manifest = Manifest::read(checkpoint, &config, options.quantization)?;
        let stage = stage(&config.shape(0)).map_err(ShardError::from)?;
        let shards = manifest.shards(&config, options.tensor_parallel, options.expert_parallel, least_columns)?;
        Ok(ShardedModel { config, manifest, stage, shards })
    }

    /// The introduction of this process to the other stages, with its device and the options there.
    pub fn join(&self, node_rank: u32, (device, choices): (&str, BTreeMap<String, String>)) -> Join {
        let whole = Parts::of(&Shard::whole(&self.config.shape(0)), &self.config);
        Join {
            version: pipeline::VERSION,
            node_rank,
            stages: self.stage.count,
            device: device.to_owned(),
            choices,
            shape: self.config.shape(self.manifest.bytes(&whole, Stage::WHOLE)),
            weight_type: self.manifest.dominant_type().to_owned(),
        }
    }

    /// Runs `load` for every rank, on a thread of its own, with one item of `with`. Results are in the order of ranks.
    pub fn on_each_rank<I: Send, T: Send>(
        &self,
        with: impl IntoIterator<Item = I>,
        load: impl Fn(&Shard, I) -> Result<T, LoadError> + Sync,
    ) -> Result<Vec<T>, LoadError> {
        let load = &load;
        thread::scope(|scope| {
            let spawn = |(shard, with)| scope.spawn(move || load(shard, with));
            let threads: Vec<_> = self.shards.iter().zip(with).map(spawn).collect();
            let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            threads.into_iter().map(join).collect()
        })
    }
}
