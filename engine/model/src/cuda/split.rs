//! A model that is too large for a GPU: the embedding and the first layers stay on the CPU, the last layers and the
//! head are on the GPU, as in llama.cpp (`--n-gpu-layers`).
//!
//! The two are pipeline stages in one process, which compute one after the other. Only activations are transferred.
//! This saves GPU memory, not time.

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Shard, Stage};
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_kernels::cuda::Device;

use super::activation_buffer::ActivationBuffer;
use super::cache::PageType;
use super::fit::{ledger_of_last, longest_sequence};
use super::loaded::LoadedPart;
use super::rank::CudaRank;
use super::{CudaError, Replay, support};
use crate::config::DecoderConfig;
use crate::cpu::{Built, CpuPlan};
use crate::decoder::SplitDecoder;
use crate::error::{LoadError, no_threads};
use crate::executor::CpuExecutor;
use crate::load::Loaded;
use crate::ranks::Ranks;
use crate::sizes::{KvBudget, LoadOptions, SizeError, Sizes};
use crate::step::StepRunner;
use crate::weights::{Manifest, ShardError};

/// A model with its last layers on a GPU. Nothing is allocated yet for the layers on the CPU.
pub struct SplitModel<'a> {
    first: CpuPlan<'a>,
    last: LoadedPart,
    /// The type of both KV caches.
    pages: PageType,
    options: LoadOptions,
}

/// The driver needs about this fraction (one over it) of the free memory, for instance for graphs.
const DRIVERS_SHARE: u64 = 32;

/// The number of last layers that a device with `free_bytes` has room for, by the checkpoint's headers: with the head,
/// the buffers of steps and the KV cache of the longest sequence. The memory of the driver is an estimate, so the
/// result may be one layer too many.
pub fn layers_that_fit(checkpoint: &Checkpoint, options: &LoadOptions, free_bytes: u64) -> Result<u32, LoadError> {
    let config = DecoderConfig::read(checkpoint)?;
    let manifest = Manifest::read_headers(checkpoint, &config, options.quantization)?;
    let (room, layers) = (free_bytes - free_bytes / DRIVERS_SHARE, config.layers as u32);
    for last in (1..=layers).rev() {
        let asked = LoadOptions { kv: longest_sequence(&config, options, last), ..options.clone() };
        if ledger_of_last(&manifest, &config, &asked, last)?.total() <= room {
            return Ok(last);
        }
    }
    Ok(0)
}

impl<'a> SplitModel<'a> {
    /// Loads the weights of the last `gpu_layers` layers to a device. `memory_limit_bytes` is for the part on the CPU.
    pub fn load(
        checkpoint: &'a Checkpoint,
        options: &LoadOptions,
        gpu_layers: u32,
        device: &Device,
    ) -> Result<SplitModel<'a>, LoadError> {
        support::check_options(options)?;
        support::check_undivided(options)?;
        let pages = support::page_type(options.kv_data_type)?;
        let stages = |shape: &ModelShape| Stage::split(gpu_layers, shape);
        let first = CpuPlan::read(checkpoint, options, |shape| Ok(stages(shape)?[0]))?;
        let (config, whole) = (first.config(), first.config().shape(0));
        support::check_config(config, pages)?;
        let [_, stage] = stages(&whole).map_err(ShardError::from)?;
        let last = LoadedPart::load(&first.model.manifest, config, Shard::whole(&whole), stage, device, options)?;
        Ok(SplitModel { first, last, pages, options: options.clone() })
    }

    /// The shape of the model, with the bytes of the weights on both.
    pub fn shape(&self) -> ModelShape {
        self.first.config().shape(self.cpu_weight_bytes() + self.last.weight_bytes())
    }

    /// Bytes of the weights that stay on the CPU.
    pub fn cpu_weight_bytes(&self) -> u64 {
        self.first.shapes.iter().map(|shape| shape.weight_bytes).sum()
    }

    /// Bytes that are free on the GPU for K and V of its layers, beside weights and what steps need.
    pub fn free_bytes(&self) -> Result<u64, LoadError> {
        let free = self.last.free_bytes().map_err(CudaError::from)?;
        // The longest sequence is not known yet. The estimate is on the safe side: longer ones take more.
        let geometry = self.geometry(KvBudget::Bytes(self.kv_bytes(u64::MAX, free)))?;
        Ok(free.saturating_sub(self.last.workspace_bytes(&geometry, 0)))
    }

    /// Bytes of K and V of all layers, if the CPU has `cpu` bytes for those of its layers and the GPU `gpu` bytes for
    /// those of its own.
    pub fn kv_bytes(&self, cpu: u64, gpu: u64) -> u64 {
        let (all, on_gpu) = (self.first.config().layers as u64, self.last.part.config.layers as u64);
        (cpu / (all - on_gpu)).min(gpu / on_gpu).saturating_mul(all)
    }

    /// Divides the rest of both memories, loads the part on the CPU and starts to run. The first ledger is that of the
    /// CPU.
    pub fn start(self, kv: KvBudget, replay: Replay) -> Result<Loaded, LoadError> {
        let geometry = self.geometry(kv)?;
        let (shape, gpu) = (self.shape(), self.last.ledger(&geometry, self.pages, 0));
        let SplitModel { first, last, pages, options } = self;
        let sizes = Sizes::check(&first.shapes, first.config().rotary_dims(), geometry, &options)?;
        let Built { decoder, ledgers, weight_type, .. } = first.build(sizes, &options)?;
        let crossing = ActivationBuffer::bytes(geometry.max_step_tokens as usize, shape.hidden as usize);
        let crossing = Ledger { workspace: crossing, ..Ledger::default() };
        let cpu: Ledger = ledgers.into_iter().chain([crossing]).sum();
        let kernels = decoder.backend().kernels();
        let last = CudaRank::new(last.part, None, &geometry, pages, replay).map_err(CudaError::from)?;
        let decoder = SplitDecoder { first: decoder, last: Ranks::alone(last) };
        let executor = CpuExecutor::start(StepRunner::new(decoder, geometry, None)).map_err(no_threads(1))?;
        Ok(Loaded { executor, shape, ledgers: vec![cpu, gpu], weight_type, kernels })
    }

    fn geometry(&self, kv: KvBudget) -> Result<Geometry, SizeError> {
        let options = LoadOptions { kv, memory_limit_bytes: None, ..self.options.clone() };
        let config = self.first.config();
        let gpu = ModelShape { layers: self.last.part.config.layers as u32, windowed: None, ..config.shape(0) };
        let shapes: Vec<ModelShape> = self.first.shapes.iter().cloned().chain([gpu]).collect();
        // Stages have different layers, so they would have different groups.
        let groups = KvGroups::undivided(&config.shape(0));
        Ok(Sizes::decide(&shapes, config.rotary_dims(), groups, &options)?.geometry)
    }
}
