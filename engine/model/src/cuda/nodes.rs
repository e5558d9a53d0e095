//! Pipeline stages on the GPUs of several nodes, one stage a node. Activations go through host memory, and the host
//! samples.

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

/// The leader: the node that serves and computes the last stage. Its weights are on its devices; the other nodes load
/// theirs.
pub struct CudaLeader {
    model: CudaModel,
    earlier: Vec<Peer>,
    /// The number of KV blocks that every other node has room for.
    room_blocks: u32,
    patience: Duration,
}

impl CudaLeader {
    /// Waits for every other stage to join, and loads its own while they load theirs.
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

    /// The shape of this node's layers, with the bytes of the weights on its devices.
    pub fn shape(&self) -> ModelShape {
        self.model.shape()
    }

    /// As [`CudaModel::kv_copies`].
    pub fn kv_copies(&self) -> u32 {
        self.model.kv_copies()
    }

    /// Bytes that are free for K and V of this node, limited to as many blocks as every other node has room for.
    pub fn free_bytes(&self) -> Result<u64, LoadError> {
        let elsewhere = self.model.block_bytes().saturating_mul(self.room_blocks.into());
        Ok(self.model.free_bytes()?.min(elsewhere))
    }

    /// Makes all nodes divide the rest of their memory, and starts to run. The ledgers are those of this node's
    /// devices.
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

/// A worker node, and its leader.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// From 1; the node computes stage `node_rank - 1`.
    pub node_rank: u32,
    /// Number of nodes.
    pub stages: u32,
    /// Host and port of the leader.
    pub leader: &'a str,
    /// How long to wait for the leader.
    pub patience: Duration,
}

/// Computes a stage on devices for the leader of the pipeline, until the leader ends.
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

/// Loads the weights, tells the leader how many blocks there is room for, and builds the decoder with the sizes that
/// the leader assigns.
fn build(plan: CudaPlan<'_>, worker: &mut Worker, replay: Replay) -> Result<(CudaDecoder, Geometry), LoadError> {
    let model = plan.load()?;
    let blocks = model.free_bytes()? / model.block_bytes().max(1);
    worker.offer(u32::try_from(blocks).unwrap_or(u32::MAX))?;
    let geometry = worker.assignment()?.geometry();
    support::check_blocks(geometry.block_tokens)?;
    Ok((model.decoder(&geometry, replay)?, geometry))
}
