//! A model with its weights on GPUs, which then divides the rest of their memory and starts to run.

use std::iter;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::kv_groups::READ_TILE_TOKENS;
use windlass_engine_contract::memory::{Ledger, kv_block_bytes};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Stage, kv_copies};
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_kernels::cuda::ops::{ExchangeSizes, Ground, PAGE_TOKENS, PeerRank};
use windlass_kernels::cuda::{Device, Matrix};

use super::cache::PageType;
use super::compute::step_sizes;
use super::executor::CudaExecutor;
use super::group::CudaDecoder;
use super::loaded::LoadedPart;
use super::plan::CudaPlan;
use super::rank::{CudaRank, RankPart};
use super::weights;
use super::{CudaError, Replay};
use crate::config::DecoderConfig;
use crate::error::{LoadError, no_threads};
use crate::ranks::Ranks;
use crate::sizes::{KvBudget, LoadOptions, SizeError, Sizes};
use crate::step::StepRunner;

// A windowed group keeps enough keys for the tiles of this device's attention.
const _: () = assert!(PAGE_TOKENS <= READ_TILE_TOKENS as usize);

/// A model, or a stage of one, with its weights on devices.
pub struct CudaModel {
    /// Configuration of the whole model.
    pub(super) config: DecoderConfig,
    pub(super) stage: Stage,
    /// The parts of the ranks, in order.
    pub(super) ranks: Vec<LoadedPart>,
    /// How ranks read each other's memory.
    pub(super) ground: Ground,
    pub(super) weight_type: &'static str,
    /// The type of the KV cache.
    pub(super) pages: PageType,
    pub(super) options: LoadOptions,
}

/// A model that runs on devices.
pub struct LoadedCuda<E = CudaExecutor> {
    /// Computes steps.
    pub executor: E,
    /// The shape of the model.
    pub shape: ModelShape,
    /// The memory that each rank takes of its device.
    pub ledgers: Vec<Ledger>,
    /// The weight format of most weights in the file, as `q4_1`.
    pub weight_type: &'static str,
}

impl<E> LoadedCuda<E> {
    /// The memory that all ranks take together.
    pub fn ledger(&self) -> Ledger {
        self.ledgers.iter().copied().sum()
    }
}

impl CudaModel {
    /// Loads weights, a layer at a time, to the first of `devices`, one for each rank. The file is not needed after
    /// that.
    pub fn load(checkpoint: &Checkpoint, options: &LoadOptions, devices: &[Device]) -> Result<CudaModel, LoadError> {
        CudaPlan::read(checkpoint, options, devices, |_| Ok(Stage::WHOLE))?.load()
    }

    /// The shape of the model, or of the layers of a stage, with the bytes of the weights on the devices.
    pub fn shape(&self) -> ModelShape {
        let whole = self.config.shape(self.ranks.iter().map(|rank| rank.weight_bytes()).sum());
        let layers = self.stage.layers(whole.layers).len() as u32;
        // In a stage all layers have full K and V.
        ModelShape { layers, windowed: whole.windowed.filter(|_| self.stage == Stage::WHOLE), ..whole }
    }

    /// Number of ranks that store each key and value head.
    pub fn kv_copies(&self) -> u32 {
        kv_copies(&self.shape(), self.ranks.len() as u32)
    }

    /// How ranks read each other's memory.
    pub fn ground(&self) -> &Ground {
        &self.ground
    }

    /// The name of the machine's library for large products, or why our kernels compute them. `None` if products must
    /// not depend on other tokens, or no matrix can use a library.
    pub fn products(&self) -> Option<Result<String, String>> {
        let LoadedPart { products, part, .. } = &self.ranks[0];
        let found = products.as_ref().filter(|_| part.weights.layer_matrices().any(Matrix::is_bf16))?;
        Some(found.as_ref().map(|products| products.name()).map_err(ToString::to_string))
    }

    /// Bytes that are free for K and V of all ranks, beside the weights and what steps need. Each device counts as the
    /// one with the fewest free bytes.
    pub fn free_bytes(&self) -> Result<u64, LoadError> {
        let free = self.ranks.iter().map(LoadedPart::free_bytes).collect::<Result<Vec<u64>, _>>();
        let free = free.map_err(CudaError::from)?;
        let together = |least: u64| least * self.ranks.len() as u64;
        // The longest sequence is not known yet. The estimate is on the safe side: longer ones take more.
        let geometry = self.geometry(KvBudget::Bytes(together(free.iter().copied().min().unwrap_or(0))))?;
        let left = self.ranks.iter().zip(free).map(|(rank, free)| {
            let workspace = rank.workspace_bytes(&geometry, self.exchanged(rank, &geometry));
            free.saturating_sub(workspace)
        });
        Ok(together(left.min().unwrap_or(0)))
    }

    /// Divides the rest of the memory, and starts to run.
    pub fn start(self, kv: KvBudget, replay: Replay) -> Result<LoadedCuda, LoadError> {
        let geometry = self.geometry(kv)?;
        let (shape, weight_type, ledgers) = (self.shape(), self.weight_type, self.ledgers(&geometry));
        let tier = self.options.tier(&shape, &geometry)?;
        let decoder = self.decoder(&geometry, replay)?;
        let executor = CudaExecutor::new(StepRunner::new(decoder, geometry, tier));
        Ok(LoadedCuda { executor, shape, ledgers, weight_type })
    }

    /// The memory that each rank will take.
    pub(super) fn ledgers(&self, geometry: &Geometry) -> Vec<Ledger> {
        let ledger = |rank: &LoadedPart| rank.ledger(geometry, self.pages, self.exchanged(rank, geometry));
        self.ranks.iter().map(ledger).collect()
    }

    /// Starts the ranks, as one decoder.
    pub(super) fn decoder(self, geometry: &Geometry, replay: Replay) -> Result<CudaDecoder, LoadError> {
        let (exchange, pages) = (self.exchange(geometry), self.pages);
        let parts = self.ranks.into_iter().map(|rank| rank.part).collect();
        start_ranks(parts, &exchange, geometry, pages, replay)
    }

    /// Bytes of a block on all ranks.
    pub(super) fn block_bytes(&self) -> u64 {
        let LoadOptions { kv_data_type, block_tokens, .. } = self.options;
        let bytes = |shape: &ModelShape| kv_block_bytes(shape, &self.groups(), kv_data_type, block_tokens);
        self.shapes().iter().map(bytes).sum()
    }

    /// The geometry for a KV budget.
    pub(super) fn geometry(&self, kv: KvBudget) -> Result<Geometry, SizeError> {
        self.geometry_in(self.groups(), kv)
    }

    /// The geometry for a KV budget, with these groups of layers.
    pub(super) fn geometry_in(&self, groups: KvGroups, kv: KvBudget) -> Result<Geometry, SizeError> {
        let options = LoadOptions { kv, memory_limit_bytes: None, ..self.options.clone() };
        Ok(Sizes::decide(&self.shapes(), self.config.rotary_dims(), groups, &options)?.geometry)
    }

    fn groups(&self) -> KvGroups {
        match self.stage {
            Stage::WHOLE => self.options.kv_groups(&self.shape()),
            // Stages have different layers, so they would have different groups.
            _ => KvGroups::undivided(&self.config.shape(0)),
        }
    }

    /// The shapes of the ranks' parts.
    fn shapes(&self) -> Vec<ModelShape> {
        let windowed = self.shape().windowed;
        let part = |part: &RankPart| ModelShape { windowed, ..part.config.shape(weights::bytes(&part.weights)) };
        self.ranks.iter().map(|rank| part(&rank.part)).collect()
    }

    /// Bytes of a rank's buffers that other ranks read.
    fn exchanged(&self, rank: &LoadedPart, geometry: &Geometry) -> u64 {
        match self.ranks.len() {
            1 => 0,
            _ => self.exchange(geometry).device_bytes(rank.shard.rank as usize),
        }
    }

    fn exchange(&self, geometry: &Geometry) -> ExchangeSizes {
        let part = &self.ranks[0].part;
        ExchangeSizes {
            tokens: geometry.max_step_tokens as usize,
            hidden: self.config.hidden,
            rows: step_sizes(&part.config, part.weights.head.is_some(), geometry).logits,
            columns: self.ranks.iter().map(|rank| rank.shard.vocabulary.len()).collect(),
            two_shots_from: ExchangeSizes::two_shots_from(self.ranks.len()),
            ground: self.ground.clone(),
        }
    }
}

fn start_ranks(
    parts: Vec<RankPart>,
    exchange: &ExchangeSizes,
    geometry: &Geometry,
    pages: PageType,
    replay: Replay,
) -> Result<CudaDecoder, LoadError> {
    let count = parts.len();
    let devices: Vec<Device> = parts.iter().map(|part| part.device.clone()).collect();
    let peers = if count > 1 { PeerRank::group(&devices, exchange).map_err(CudaError::from)? } else { Vec::new() };
    let places = peers.into_iter().enumerate().map(Some).chain(iter::repeat_with(|| None));
    let ranks = parts.into_iter().zip(places).map(|(part, peer)| CudaRank::new(part, peer, geometry, pages, replay));
    let mut ranks = ranks.collect::<Result<Vec<_>, _>>().map_err(CudaError::from)?.into_iter();
    let Some(first) = ranks.next() else { return Err(SizeError::Zero("the number of ranks").into()) };
    Ranks::start(first, ranks.collect()).map_err(no_threads(count))
}
