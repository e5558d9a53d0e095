//! From a checkpoint to a decoder that runs on GPUs: weights first, then what they leave is divided.

use std::iter;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::kv_groups::READ_TILE_TOKENS;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Shard, Stage, kv_copies};
use windlass_engine_core::executor::Geometry;
use windlass_kernels::cuda::Device;
use windlass_kernels::cuda::ops::{ExchangeSizes, PAGE_TOKENS, PeerRank, reach_each_other};

use super::cache::PageType;
use super::decoder::CudaDecoder;
use super::executor::CudaExecutor;
use super::loaded::LoadedPart;
use super::rank::{Rank, RankPart};
use super::{CudaError, Replay, support};
use crate::config::DecoderConfig;
use crate::load::{LoadError, no_threads};
use crate::sizes::{KvBudget, LoadOptions, SizeError, Sizes};
use crate::step::StepRunner;
use crate::weights::Manifest;

// What a windowed group keeps is enough for this device's attention.
const _: () = assert!(PAGE_TOKENS <= READ_TILE_TOKENS as usize);

/// A model whose weights are on devices.
pub struct CudaModel {
    /// Of the whole model.
    config: DecoderConfig,
    /// In the order of ranks.
    ranks: Vec<LoadedPart>,
    weight_type: &'static str,
    /// How the cache holds keys and values.
    pages: PageType,
    options: LoadOptions,
}

/// A model, running on devices.
pub struct LoadedCuda {
    /// Computes steps.
    pub executor: CudaExecutor,
    /// What the model is.
    pub shape: ModelShape,
    /// What each rank takes of its device's memory.
    pub ledgers: Vec<Ledger>,
    /// The type of most of its weights in the file, as `q4_1`.
    pub weight_type: &'static str,
}

impl LoadedCuda {
    /// What all ranks take together.
    pub fn ledger(&self) -> Ledger {
        self.ledgers.iter().copied().sum()
    }
}

impl CudaModel {
    /// Takes weights in, a layer at a time, on the first of `devices`: one for each rank. The file is not needed afterwards.
    pub fn load(checkpoint: &Checkpoint, options: &LoadOptions, devices: &[Device]) -> Result<CudaModel, LoadError> {
        support::check_options(options)?;
        let devices = group_of(devices, options.tensor_parallel)?;
        let (config, pages) = (DecoderConfig::read(checkpoint)?, support::page_type(options.kv_data_type)?);
        support::check_config(&config, pages)?;
        let manifest = Manifest::read(checkpoint, &config, options.quantization)?;
        let shards = shards(&manifest, &config, devices.len())?;
        Ok(CudaModel {
            ranks: load_ranks(&manifest, &config, shards, devices, options)?,
            weight_type: manifest.dominant_type(),
            options: options.clone(),
            pages,
            config,
        })
    }

    /// What the model is; its weights' bytes are those on the devices.
    pub fn shape(&self) -> ModelShape {
        self.config.shape(self.ranks.iter().map(|rank| rank.part.weights.bytes()).sum())
    }

    /// Ranks that hold each key and value head.
    pub fn kv_copies(&self) -> u32 {
        kv_copies(&self.shape(), self.ranks.len() as u32)
    }

    /// Bytes that are free beside the weights and what steps need, for keys and values of all ranks: as many on each device
    /// as on the one that has fewest.
    pub fn free_bytes(&self) -> Result<u64, LoadError> {
        let free = self.ranks.iter().map(LoadedPart::free_bytes).collect::<Result<Vec<u64>, _>>();
        let free = free.map_err(CudaError::from)?;
        let together = |least: u64| least * self.ranks.len() as u64;
        // The longest sequence is not known yet; longer ones take more.
        let geometry = self.sizes(KvBudget::Bytes(together(free.iter().copied().min().unwrap_or(0))))?.geometry;
        let left = self.ranks.iter().zip(free).map(|(rank, free)| {
            let workspace = rank.workspace_bytes(&geometry, self.exchanged(rank, &geometry));
            free.saturating_sub(workspace)
        });
        Ok(together(left.min().unwrap_or(0)))
    }

    /// Divides the rest of the memory and starts to run.
    pub fn start(self, kv: KvBudget, replay: Replay) -> Result<LoadedCuda, LoadError> {
        let geometry = self.sizes(kv)?.geometry;
        let ledger = |rank: &LoadedPart| rank.ledger(&geometry, self.pages, self.exchanged(rank, &geometry));
        let ledgers = self.ranks.iter().map(ledger).collect();
        let (shape, exchange) = (self.shape(), self.exchange(&geometry));
        let CudaModel { ranks, weight_type, pages, .. } = self;
        let parts = ranks.into_iter().map(|rank| rank.part).collect();
        let decoder = start_ranks(parts, &exchange, &geometry, pages, replay)?;
        let executor = CudaExecutor::new(StepRunner::new(decoder, geometry, None));
        Ok(LoadedCuda { executor, shape, ledgers, weight_type })
    }

    fn sizes(&self, kv: KvBudget) -> Result<Sizes, SizeError> {
        let options = LoadOptions { kv, memory_limit_bytes: None, ..self.options.clone() };
        let whole = self.shape();
        let shape = |rank: &LoadedPart| rank.shard.shape(&whole, rank.part.weights.bytes());
        let shapes: Vec<ModelShape> = self.ranks.iter().map(shape).collect();
        Sizes::decide(&shapes, self.config.rotary_dims(), options.kv_groups(&whole), &options)
    }

    /// Bytes of what a rank has for the others.
    fn exchanged(&self, rank: &LoadedPart, geometry: &Geometry) -> u64 {
        match self.ranks.len() {
            1 => 0,
            _ => self.exchange(geometry).bytes(rank.shard.rank as usize),
        }
    }

    fn exchange(&self, geometry: &Geometry) -> ExchangeSizes {
        ExchangeSizes {
            tokens: geometry.max_step_tokens as usize,
            hidden: self.config.hidden,
            rows: geometry.max_step_logits as usize,
            columns: self.ranks.iter().map(|rank| rank.shard.vocabulary.len()).collect(),
        }
    }
}

/// The devices of a group of so many ranks, which reach each other from now on.
fn group_of(devices: &[Device], ranks: u32) -> Result<&[Device], CudaError> {
    let Some(group) = devices.get(..ranks as usize) else {
        let right = match devices.len() {
            0 => "the CPU".to_owned(),
            1 => "one rank, or more GPUs".to_owned(),
            some => format!("up to {some} ranks, or more GPUs"),
        };
        return Err(CudaError::TooFewDevices { ranks, devices: devices.len(), right });
    };
    let unreachable = |source| CudaError::NoPeerAccess { ranks: group.len(), source };
    reach_each_other(group).map_err(unreachable)?;
    Ok(group)
}

fn shards(manifest: &Manifest<'_>, config: &DecoderConfig, ranks: usize) -> Result<Vec<Shard>, LoadError> {
    if ranks == 1 {
        return Ok(vec![Shard::whole(&config.shape(0))]);
    }
    support::check_divided(config)?;
    Ok(manifest.shards(config, ranks as u32, support::COLUMN_STEP)?)
}

/// Loads every rank's part on a thread of its own.
fn load_ranks(
    manifest: &Manifest<'_>,
    config: &DecoderConfig,
    shards: Vec<Shard>,
    devices: &[Device],
    options: &LoadOptions,
) -> Result<Vec<LoadedPart>, LoadError> {
    let load = |shard, device| LoadedPart::load(manifest, config, shard, Stage::WHOLE, device, options);
    thread::scope(|scope| {
        let spawn = |(shard, device)| scope.spawn(move || load(shard, device));
        let threads: Vec<_> = shards.into_iter().zip(devices).map(spawn).collect();
        let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        threads.into_iter().map(join).collect()
    })
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
    let group = peers.first().map(|peer| Arc::clone(peer.peers()));
    let places = peers.into_iter().map(Some).chain(iter::repeat_with(|| None));
    let ranks = parts.into_iter().zip(places).map(|(part, peer)| Rank::new(part, peer, geometry, pages, replay));
    let mut ranks = ranks.collect::<Result<Vec<_>, _>>().map_err(CudaError::from)?.into_iter();
    match (ranks.next(), group) {
        (Some(first), None) => Ok(CudaDecoder::alone(first)),
        (Some(first), Some(peers)) => Ok(CudaDecoder::group(first, ranks.collect(), peers).map_err(no_threads(count))?),
        (None, _) => Err(SizeError::Zero("the number of ranks").into()),
    }
}
