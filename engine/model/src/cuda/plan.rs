//! Plans the loading of a model, or of a stage of one, to GPUs.

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
use crate::error::LoadError;
use crate::pipeline::Join;
use crate::sharded::ShardedModel;
use crate::sizes::LoadOptions;

/// A stage of a model, and the devices that will compute it.
pub(super) struct CudaPlan<'a> {
    model: ShardedModel<'a>,
    /// One device for each rank.
    devices: &'a [Device],
    ground: Ground,
    pages: PageType,
    options: &'a LoadOptions,
}

impl<'a> CudaPlan<'a> {
    /// Finds and checks every tensor; `stage` chooses the part of the model.
    pub fn read(
        checkpoint: &'a Checkpoint,
        options: &'a LoadOptions,
        devices: &'a [Device],
        stage: impl FnOnce(&ModelShape) -> Result<Stage, Indivisible>,
    ) -> Result<CudaPlan<'a>, LoadError> {
        support::check_options(options)?;
        let devices = group_of(devices, options.tensor_parallel)?;
        let ground = Ground::between(devices).map_err(CudaError::from)?;
        let (config, pages) = (DecoderConfig::read(checkpoint)?, support::page_type(options.kv_data_type)?);
        support::check_config(&config, pages)?;
        if options.tensor_parallel > 1 {
            support::check_divided(&config, options.expert_parallel)?;
        }
        let model = ShardedModel::read(checkpoint, config, options, support::COLUMN_STEP, stage)?;
        Ok(CudaPlan { model, devices, ground, pages, options })
    }

    /// The introduction of this process to the other stages.
    pub fn join(&self, node_rank: u32) -> Join {
        self.model.join(node_rank, ("cuda", self.options.choices_on_cuda()))
    }

    /// Loads the weights, a layer at a time.
    pub fn load(self) -> Result<CudaModel, LoadError> {
        let CudaPlan { model, devices, ground, pages, options } = self;
        let ShardedModel { config, manifest, stage, .. } = &model;
        let load = |shard: &Shard, device| LoadedPart::load(manifest, config, shard.clone(), *stage, device, options);
        let ranks = model.on_each_rank(devices, load)?;
        let weight_type = manifest.dominant_type();
        let ShardedModel { config, stage, .. } = model;
        Ok(CudaModel { config, stage, ranks, ground, weight_type, pages, options: options.clone() })
    }
}

/// The devices of a group of `ranks` ranks.
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
