//! A rank's part of a model, or a stage's, whose weights are on its device.

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
use super::moves::Moves;
use super::packer::FilePacker;
use super::rank::RankPart;
use super::sampler::Changes;
use super::weights::{Loader, Weights};
use super::workspace::Workspace;
use crate::config::DecoderConfig;
use crate::load::{LoadError, no_threads};
use crate::memory_share::MemoryShare;
use crate::part::Parts;
use crate::quantization::Quantization;
use crate::sizes::LoadOptions;
use crate::weights::Manifest;

/// Bytes of each of the two buffers that weights go through: a copy of so many takes a fraction of a millisecond, which is long beside
/// issuing it.
const UPLOAD_BYTES: usize = 16 << 20;

/// The part.
pub(super) struct LoadedPart {
    pub shard: Shard,
    pub part: RankPart,
    /// What the machine has for large products, or why nothing; none where a token's bits may not depend on it.
    pub products: Option<Result<Arc<dyn Products>, DriverError>>,
    /// What it may take of its device's memory.
    share: MemoryShare,
}

impl LoadedPart {
    /// Takes in what a rank holds of a stage, a layer at a time.
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
            rounds: config.rounds_inputs() || options.quantization.is_some_and(Quantization::rounds_inputs),
            in_bytes: options.inputs_in_bytes,
            widens: !options.batch_invariant,
            library: products.as_ref().and_then(|products| products.as_ref().ok().cloned()),
        };
        let loader = Loader { uploader: &uploader, pool: &pool };
        let weights = weights(manifest, &Parts::of(&shard, config), stage, &loader, choices)?;
        uploader.finish().map_err(CudaError::from)?;
        let (device, first_token) = (device.clone(), shard.vocabulary.start as usize);
        let config = config.of_rank(&shard, stage);
        let part = RankPart { device, config, weights, weights_region: region, first_token };
        Ok(LoadedPart { shard, part, products, share: options.gpu_share })
    }

    /// Bytes that are free on its device, as far as it may take them.
    pub fn free_bytes(&self) -> Result<u64, DriverError> {
        let memory = self.part.device.driver().memory()?;
        let left = self.share.of(memory.total_bytes as u64).saturating_sub(self.part.weights.bytes());
        Ok(left.min(memory.free_bytes as u64))
    }

    /// What it takes of its device's memory; `exchanged` is what it has for other ranks.
    pub fn ledger(&self, geometry: &Geometry, pages: PageType, exchanged: u64) -> Ledger {
        Ledger {
            weights: self.part.weights.bytes(),
            kv: cache_shape(&self.part.config, geometry, pages).bytes(),
            swap: 0,
            workspace: self.workspace_bytes(geometry, exchanged),
            process: 0,
        }
    }

    /// What steps take, with what ranks exchange.
    pub fn workspace_bytes(&self, geometry: &Geometry, exchanged: u64) -> u64 {
        let RankPart { device, config, weights, .. } = &self.part;
        let inputs = InputRoom::bytes(device.facts(), config, weights, geometry.max_step_tokens as usize);
        step_bytes(config, weights.head.is_some(), inputs, geometry) + exchanged
    }
}

/// Activations, of which inputs in another form are so many bytes, the step's numbers and draws, and the rotary table.
pub(super) fn step_bytes(config: &DecoderConfig, has_head: bool, inputs: u64, geometry: &Geometry) -> u64 {
    let sizes = step_sizes(config, has_head, geometry);
    let rope = 4 * (sizes.longest * config.rotary_dims()) as u64;
    let draws = Draws::bytes(sizes.logits) + 2 * Changes::bytes(sizes.logits, config.vocabulary);
    let numbers = sizes.bytes() + Moves::bytes(&sizes);
    Workspace::bytes(config, inputs, &sizes) + numbers + draws + rope
}

fn weights(
    manifest: &Manifest<'_>,
    parts: &Parts,
    stage: Stage,
    loader: &Loader<'_>,
    choices: ProductChoices,
) -> Result<Weights, LoadError> {
    let packer = FilePacker { pool: loader.pool };
    let layer = |index, layer| loader.layer(index, layer).map_err(LoadError::from);
    let layers = manifest.pack_layers(&packer, parts, stage, layer)?;
    manifest.pack_tables(&packer, parts, stage, |embedding, head| {
        Ok(loader.weights(stage, embedding, layers, head, choices)?)
    })
}
