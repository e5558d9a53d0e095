//! A model, or a stage of one, read and divided among GPUs. Nothing is on them yet.

use std::panic::resume_unwind;
use std::thread::{self, ScopedJoinHandle};

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Indivisible, Shard, Stage};
use windlass_kernels::cuda::Device;
use windlass_kernels::cuda::ops::Ground;

use super::cache::PageType;
use super::load::CudaModel;
use super::loaded::LoadedPart;
use super::{CudaError, support};
use crate::config::DecoderConfig;
use crate::load::{LoadError, join};
use crate::pipeline::Join;
use crate::sizes::LoadOptions;
use crate::weights::{Manifest, ShardError};

/// The model, or the stage.
pub(super) struct CudaDraft<'a> {
    /// Of the whole model.
    pub config: DecoderConfig,
    manifest: Manifest<'a>,
    stage: Stage,
    shards: Vec<Shard>,
    /// One for each of these.
    devices: &'a [Device],
    ground: Ground,
    pages: PageType,
    options: &'a LoadOptions,
}

impl<'a> CudaDraft<'a> {
    /// Finds and checks every tensor; `stage` says which part of the whole model this is.
    pub fn read(
        checkpoint: &'a Checkpoint,
        options: &'a LoadOptions,
        devices: &'a [Device],
        stage: impl FnOnce(&ModelShape) -> Result<Stage, Indivisible>,
    ) -> Result<CudaDraft<'a>, LoadError> {
        support::check_options(options)?;
        let devices = group_of(devices, options.tensor_parallel)?;
        let ground = Ground::between(devices).map_err(CudaError::from)?;
        let (config, pages) = (DecoderConfig::read(checkpoint)?, support::page_type(options.kv_data_type)?);
        support::check_config(&config, pages)?;
        let manifest = Manifest::read(checkpoint, &config, options.quantization)?;
        let stage = stage(&config.shape(0)).map_err(ShardError::from)?;
        let shards = shards(&manifest, &config, options)?;
        Ok(CudaDraft { config, manifest, stage, shards, devices, ground, pages, options })
    }

    /// How this process presents itself to the other stages.
    pub fn join(&self, node_rank: u32) -> Join {
        let device = ("cuda", self.options.choices_on_cuda());
        join(&self.manifest, &self.config, self.stage.count, node_rank, device)
    }

    /// Takes weights in, a layer at a time, every rank's part on a thread of its own.
    pub fn load(self) -> Result<CudaModel, LoadError> {
        let CudaDraft { config, manifest, stage, shards, devices, ground, pages, options } = self;
        let load = |shard, device| LoadedPart::load(&manifest, &config, shard, stage, device, options);
        let ranks = thread::scope(|scope| {
            let spawn = |(shard, device)| scope.spawn(move || load(shard, device));
            let threads: Vec<_> = shards.into_iter().zip(devices).map(spawn).collect();
            let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            threads.into_iter().map(join).collect::<Result<Vec<_>, LoadError>>()
        })?;
        let weight_type = manifest.dominant_type();
        Ok(CudaModel { config, stage, ranks, ground, weight_type, pages, options: options.clone() })
    }
}

/// The devices of a group of so many ranks.
fn group_of(devices: &[Device], ranks: u32) -> Result<&[Device], CudaError> {
    devices.get(..ranks as usize).ok_or_else(|| {
        let right = match devices.len() {
            0 => "the CPU".to_owned(),
            1 => "one rank, or more GPUs".to_owned(),
            some => format!("up to {some} ranks, or more GPUs"),
        };
        CudaError::TooFewDevices { ranks, devices: devices.len(), right }
    })
}

fn shards(manifest: &Manifest<'_>, config: &DecoderConfig, options: &LoadOptions) -> Result<Vec<Shard>, LoadError> {
    if options.tensor_parallel > 1 {
        support::check_divided(config, options.expert_parallel)?;
    }
    Ok(manifest.shards(config, options, support::COLUMN_STEP)?)
}
