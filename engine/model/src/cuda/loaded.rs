//! A rank's part of a model or stage, with its weights on its device.

use std::sync::Arc;

use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::sharding::{Shard, Stage};
use windlass_engine_core::executor::Geometry;
use windlass_kernels::Pool;
use windlass_kernels::cuda::{Device, DriverError, Products, Region, Uploader};

use super::CudaError;
use super::cache::PageType;
use super::compute::{cache_shape, step_sizes};
use super::draws::Draws;
use super::inputs::{InputRoom, ProductChoices};
use super::move_buffer::MoveBuffer;
use super::rank::RankPart;
use super::sampler::Changes;
use super::weights::{self, CudaLoader};
use super::workspace::Workspace;
use crate::config::DecoderConfig;
use crate::error::{LoadError, no_threads};
use crate::sizes::LoadOptions;
use crate::sizes::memory_share::MemoryShare;
use crate::weights::Manifest;
use crate::weights::part::Parts;
use crate::weights::quantization::Quantization;

/// Size of each of the two upload buffers, in bytes. A copy of this size takes a fraction of a millisecond, much longer
/// than issuing it.
const UPLOAD_BYTES: usize = 16 << 20;

/// A rank's part.
pub(super) struct LoadedPart {
    pub shard: Shard,
    pub part: RankPart,
    /// The machine's library for large products, or why there is none; `None` if products must not depend on other
    /// tokens.
    pub products: Option<Result<Arc<dyn Products>, DriverError>>,
    /// The share of its device's memory that it may take.
    share: MemoryShare,
    /// Bytes of the share that are reserved for a model that is loaded later.
    reserved_bytes: u64,
}

impl LoadedPart {
    /// Loads a rank's part of a stage, a layer at a time.
    pub fn load(
        manifest: &Manifest<'_>,
        config: &DecoderConfig,
        shard: Shard,
        stage: Stage,
        device: &Device,
        options: &LoadOptions,
    ) -> Result<LoadedPart, LoadError> {
        let threads = (options.threads / shard.ranks as usize).max(1);
        let pool = Pool::with_kernels(threads, options.kernels).map_err(no_threads(threads))?;
        let region = Region::of(device).map_err(CudaError::from)?;
        let uploader = Uploader::new(&device.within(region.as_ref()), UPLOAD_BYTES).map_err(CudaError::from)?;
        let products = (!options.batch_invariant).then(|| device.driver().products());
        let choices = ProductChoices {
            rounds_activations: config.rounds_inputs() || options.quantization.is_some_and(Quantization::rounds_inputs),
            int8_activations: options.int8_activations,
            allows_reordering: !options.batch_invariant,
            library: products.as_ref().and_then(|products| products.as_ref().ok().cloned()),
        };
        let loader = CudaLoader { uploader: &uploader, pool: &pool };
        let weights = manifest.load(&loader, &Parts::of(&shard, config), stage)?;
        uploader.finish().map_err(CudaError::from)?;
        let (device, first_token) = (device.clone(), shard.vocabulary.start as usize);
        let config = config.of_rank(&shard, stage);
        let part = RankPart { device, config, weights, choices, weights_region: region, first_token };
        let (share, reserved_bytes) = (options.gpu_share, options.gpu_reserved_bytes);
        Ok(LoadedPart { shard, part, products, share, reserved_bytes })
    }

    /// Bytes of the weights.
    pub fn weight_bytes(&self) -> u64 {
        weights::bytes(&self.part.weights)
    }

    /// Bytes that are free on its device, within its share.
    pub fn free_bytes(&self) -> Result<u64, DriverError> {
        let memory = self.part.device.driver().memory()?;
        let left = self.share.of(memory.total_bytes as u64).saturating_sub(self.weight_bytes());
        Ok(left.min(memory.free_bytes as u64).saturating_sub(self.reserved_bytes))
    }

    /// The memory that it takes of its device; `exchanged` are the bytes of the buffers that other ranks read.
    pub fn ledger(&self, geometry: &Geometry, pages: PageType, exchanged: u64) -> Ledger {
        Ledger {
            weights: self.weight_bytes(),
            kv: cache_shape(&self.part.config, geometry, pages).bytes(),
            swap: 0,
            workspace: self.workspace_bytes(geometry, exchanged),
            process: 0,
        }
    }

    /// Bytes of the buffers of steps, and of the buffers that other ranks read.
    pub fn workspace_bytes(&self, geometry: &Geometry, exchanged: u64) -> u64 {
        let RankPart { device, config, weights, choices, .. } = &self.part;
        let inputs = InputRoom::bytes(device.facts(), config, (weights, choices), geometry.max_step_tokens as usize);
        step_bytes(config, weights.head.is_some(), inputs, geometry) + exchanged
    }
}

/// Bytes of the buffers of steps: activations, of which `inputs` bytes are inputs in other forms, metadata, draws, and
/// the rotary table.
pub(super) fn step_bytes(config: &DecoderConfig, has_head: bool, inputs: u64, geometry: &Geometry) -> u64 {
    let sizes = step_sizes(config, has_head, geometry);
    let rope = 4 * (sizes.longest * config.rotary_dims()) as u64;
    let draws = Draws::bytes(sizes.logits) + 2 * Changes::bytes(sizes.logits, config.vocabulary);
    let numbers = sizes.bytes() + MoveBuffer::bytes(&sizes);
    Workspace::bytes(config, inputs, &sizes) + numbers + draws + rope
}
