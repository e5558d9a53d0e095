//! From a checkpoint to a decoder that runs on a GPU: weights first, then what they leave is divided.

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::kv_groups::READ_TILE_TOKENS;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Shard, Stage};
use windlass_engine_core::executor::Geometry;
use windlass_kernels::Pool;
use windlass_kernels::cuda::Device;
use windlass_kernels::cuda::ops::PAGE_TOKENS;

use super::cache::PageType;
use super::compute::{cache_shape, step_sizes};
use super::decoder::CudaDecoder;
use super::executor::CudaExecutor;
use super::packer::FilePacker;
use super::weights::{Loader, Weights};
use super::workspace::Workspace;
use super::{CudaError, Replay, support};
use crate::config::DecoderConfig;
use crate::load::{LoadError, no_threads};
use crate::part::Parts;
use crate::sizes::{KvBudget, LoadOptions, SizeError, Sizes};
use crate::step::StepRunner;
use crate::weights::Manifest;

// What a windowed group keeps is enough for this device's attention.
const _: () = assert!(PAGE_TOKENS <= READ_TILE_TOKENS as usize);

/// A model whose weights are on a device.
pub struct CudaModel {
    device: Device,
    config: DecoderConfig,
    weights: Weights,
    weight_type: &'static str,
    /// How the cache holds keys and values.
    pages: PageType,
    options: LoadOptions,
}

/// A model, running on a device.
pub struct LoadedCuda {
    /// Computes steps.
    pub executor: CudaExecutor,
    /// What the model is.
    pub shape: ModelShape,
    /// What it takes of the device's memory.
    pub ledger: Ledger,
    /// The type of most of its weights in the file, as `q4_1`.
    pub weight_type: &'static str,
}

impl CudaModel {
    /// Takes weights in, a layer at a time. The file is not needed afterwards.
    pub fn load(checkpoint: &Checkpoint, options: &LoadOptions, device: &Device) -> Result<CudaModel, LoadError> {
        support::check_options(options)?;
        let (config, pages) = (DecoderConfig::read(checkpoint)?, support::page_type(options.kv_data_type)?);
        support::check_config(&config, pages)?;
        let manifest = Manifest::read(checkpoint, &config, None)?;
        let pool = Pool::with_kernels(options.threads, options.kernels).map_err(no_threads(options.threads))?;
        Ok(CudaModel {
            weights: load_weights(&manifest, &config, &Loader { device, pool: &pool })?,
            weight_type: manifest.dominant_type(),
            device: device.clone(),
            options: options.clone(),
            pages,
            config,
        })
    }

    /// What the model is; its weights' bytes are those on the device.
    pub fn shape(&self) -> ModelShape {
        self.config.shape(self.weights.bytes())
    }

    /// Bytes that are free beside the weights and what steps need, for keys and values.
    pub fn free_bytes(&self) -> Result<u64, LoadError> {
        let free = self.device.driver().memory().map_err(CudaError::from)?.free_bytes as u64;
        // The longest sequence is not known yet; longer ones take more.
        let geometry = self.sizes(KvBudget::Bytes(free))?.geometry;
        Ok(free.saturating_sub(self.workspace_bytes(&geometry)))
    }

    /// Divides the rest of the memory and starts to run.
    pub fn start(self, kv: KvBudget, replay: Replay) -> Result<LoadedCuda, LoadError> {
        let geometry = self.sizes(kv)?.geometry;
        let (shape, ledger) = (self.shape(), self.ledger(&geometry));
        let CudaModel { device, config, weights, weight_type, pages, .. } = self;
        let decoder = CudaDecoder::new(&device, config, weights, &geometry, pages, replay).map_err(CudaError::from)?;
        let executor = CudaExecutor::new(StepRunner::new(decoder, geometry, None));
        Ok(LoadedCuda { executor, shape, ledger, weight_type })
    }

    fn sizes(&self, kv: KvBudget) -> Result<Sizes, SizeError> {
        let options = LoadOptions { kv, memory_limit_bytes: None, ..self.options.clone() };
        let (shape, groups) = (self.shape(), options.kv_groups(&self.shape()));
        Sizes::decide(&[shape], self.config.rotary_dims(), groups, &options)
    }

    fn ledger(&self, geometry: &Geometry) -> Ledger {
        Ledger {
            weights: self.weights.bytes(),
            kv: cache_shape(&self.config, geometry, self.pages).bytes(),
            swap: 0,
            workspace: self.workspace_bytes(geometry),
        }
    }

    /// Activations, the step's numbers, and the rotary table.
    fn workspace_bytes(&self, geometry: &Geometry) -> u64 {
        let sizes = step_sizes(&self.config, geometry);
        let rope = 4 * (sizes.longest * self.config.rotary_dims()) as u64;
        Workspace::bytes(&self.config, &sizes) + sizes.bytes() + rope
    }
}

fn load_weights(manifest: &Manifest<'_>, config: &DecoderConfig, loader: &Loader<'_>) -> Result<Weights, LoadError> {
    let (parts, stage) = (Parts::of(&Shard::whole(&config.shape(0)), config), Stage::WHOLE);
    let mut layers = Vec::with_capacity(config.layers);
    for (index, layer) in manifest.pack_layers(&FilePacker, &parts, stage).enumerate() {
        layers.push(loader.layer(index, layer?)?);
    }
    let embedding = manifest.pack_embedding(&FilePacker, &parts, stage)?;
    let head = manifest.pack_head(&FilePacker, &parts, stage)?;
    match (embedding, head) {
        (Some(embedding), Some(head)) => Ok(loader.weights(embedding, layers, head)?),
        _ => unreachable!("a whole decoder embeds and has a head"),
    }
}
