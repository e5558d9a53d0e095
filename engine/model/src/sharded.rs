//! A model, or a stage of one, read and divided among its ranks. Nothing is allocated for it yet.

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
    /// Of the whole model.
    pub config: DecoderConfig,
    pub manifest: Manifest<'a>,
    pub stage: Stage,
    /// What each rank holds.
    pub shards: Vec<Shard>,
}

impl<'a> ShardedModel<'a> {
    /// Finds and checks every tensor; `stage` says which part of the whole model this is. Devices multiply `least_columns` columns at
    /// a time: a power of two.
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

    /// How this process, which computes the stage on a device with what was chosen there, presents itself to the other stages.
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

    /// Loads every rank's part, on a thread of its own and with something of its own, in the order of ranks.
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
