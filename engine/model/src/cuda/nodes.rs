//! The stages of a pipeline on GPUs, one node each. What crosses between nodes goes through the host, and the host draws.

use std::time::Duration;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::Stage;
use windlass_engine_core::executor::Geometry;
use windlass_kernels::cuda::Device;

use super::group::CudaDecoder;
use super::load::{CudaModel, LoadedCuda};
use super::plan::CudaPlan;
use super::{Replay, support};
use crate::error::{LoadError, no_threads};
use crate::executor::CpuExecutor;
use crate::pipeline::{Gathering, Peer, Worker};
use crate::sizes::{KvBudget, LoadOptions};
use crate::step::StepRunner;

/// The node that serves: its weights, those of the last stage, are on devices, and so are the others' on theirs.
pub struct CudaLeader {
    model: CudaModel,
    earlier: Vec<Peer>,
    /// The most KV blocks that every other node has room for.
    room_blocks: u32,
    patience: Duration,
}

impl CudaLeader {
    /// Has every other stage join, and loads its own as they load theirs.
    pub fn load(
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        devices: &[Device],
        gathering: &Gathering,
    ) -> Result<CudaLeader, LoadError> {
        let (stages, patience) = (gathering.stages, gathering.patience);
        let last = |shape: &ModelShape| Stage::of(stages.saturating_sub(1), stages, shape);
        let plan = CudaPlan::read(checkpoint, options, devices, last)?;
        let mut earlier = gathering.gather(&plan.join(0))?;
        let model = plan.load()?;
        let mut room_blocks = u32::MAX;
        for peer in &mut earlier {
            room_blocks = room_blocks.min(peer.room_blocks(patience)?);
        }
        Ok(CudaLeader { model, earlier, room_blocks, patience })
    }

    /// What the layers of this node are; its weights' bytes are those on its devices.
    pub fn shape(&self) -> ModelShape {
        self.model.shape()
    }

    /// As [`CudaModel::kv_copies`].
    pub fn kv_copies(&self) -> u32 {
        self.model.kv_copies()
    }

    /// Bytes that are free for keys and values of this node, as far as every other node has room for as many blocks.
    pub fn free_bytes(&self) -> Result<u64, LoadError> {
        let elsewhere = self.model.block_bytes().saturating_mul(self.room_blocks.into());
        Ok(self.model.free_bytes()?.min(elsewhere))
    }

    /// Has all nodes divide the rest of their memory, and starts to run. Ledgers are of this node's devices.
    pub fn start(self, kv: KvBudget, replay: Replay) -> Result<LoadedCuda<CpuExecutor>, LoadError> {
        let CudaLeader { model, mut earlier, patience, .. } = self;
        let (geometry, stages) = (model.geometry(kv)?, model.stage.count);
        let (shape, weight_type, ledgers) = (model.shape(), model.weight_type, model.ledgers(&geometry));
        earlier.iter_mut().try_for_each(|peer| peer.assign(stages, &geometry, model.config.hidden))?;
        let last = model.decoder(&geometry, replay)?;
        earlier.iter_mut().try_for_each(|peer| peer.ready(patience))?;
        let runner = StepRunner::new(last, geometry, None);
        let executor = CpuExecutor::start_last(runner, earlier).map_err(no_threads(1))?;
        Ok(LoadedCuda { executor, shape, ledgers, weight_type })
    }
}

/// A node that does not serve, and whom it works for.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// From 1: it has stage `node_rank - 1`.
    pub node_rank: u32,
    /// Nodes there are.
    pub stages: u32,
    /// Host and port of the one that serves.
    pub leader: &'a str,
    /// How long that may take to be there.
    pub patience: Duration,
}

/// Computes a stage on devices for the process that leads the pipeline, as long as that wants.
pub fn work(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    devices: &[Device],
    node: Node<'_>,
    replay: Replay,
) -> Result<(), LoadError> {
    let Node { node_rank, stages, leader, patience } = node;
    let stage = |shape: &ModelShape| Stage::of(node_rank.saturating_sub(1), stages, shape);
    let plan = CudaPlan::read(checkpoint, options, devices, stage)?;
    let mut worker = Worker::join(leader, &plan.join(node_rank), patience)?;
    match build(plan, &mut worker, replay) {
        Ok((decoder, geometry)) => Ok(worker.work(decoder, &geometry)?),
        Err(error) => {
            worker.give_up(&error.to_string());
            Err(error)
        }
    }
}

/// Loads, says what room is left, and builds what the leader makes of that.
fn build(plan: CudaPlan<'_>, worker: &mut Worker, replay: Replay) -> Result<(CudaDecoder, Geometry), LoadError> {
    let model = plan.load()?;
    let blocks = model.free_bytes()? / model.block_bytes().max(1);
    worker.offer(u32::try_from(blocks).unwrap_or(u32::MAX))?;
    let geometry = worker.assignment()?.geometry();
    support::check_blocks(geometry.block_tokens)?;
    Ok((model.decoder(&geometry, replay)?, geometry))
}
