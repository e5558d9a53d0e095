//! The model on GPUs: one GPU, or the ranks of a tensor-parallel group.
//!
//! All ranks issue the same steps in the same order. They meet in their kernels, and draw the same tokens from the same
//! logits, so that no token has to be sent between them.

use std::io;
use std::mem;
use std::sync::Arc;

use windlass_engine_core::executor::Prepared;
use windlass_engine_core::plan::{BlockId, PlanRow, SwapSlotId};
use windlass_kernels::cuda::DriverError;

use super::graphs::GraphSize;
use super::rank::{CudaRank, Holding, SampledInput, Step};
use super::sampler::SamplingTask;
use super::{CudaError, support};
use crate::batch::Batch;
use crate::decoder::{Model, StageModel, TokenMove};
use crate::ranks::{Rank, Ranks};
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::tier::Tier;

/// A decoder on one or more GPUs.
pub type CudaDecoder = Ranks<CudaRank>;

impl Model for CudaRank {
    type Error = CudaError;

    fn hold_kv(&mut self, held: bool) -> Result<(), CudaError> {
        Ok(self.hold(Holding::Kv, held)?)
    }

    fn check(row: &PlanRow) -> Result<(), String> {
        support::check_row(row)
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), CudaError> {
        Ok(self.issue(batch, &[])?)
    }

    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, CudaError> {
        Ok(self.draw_and_wait(tasks)?)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), CudaError> {
        Ok(self.copy_page(from, to)?)
    }

    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SwapSlotId) -> io::Result<()> {
        self.with_block(block, |bytes| tier.store(slot.0 as usize, &[bytes]))
    }

    fn load_block(&mut self, tier: &mut dyn Tier, slot: SwapSlotId, block: BlockId) -> io::Result<()> {
        self.fill_block(block, |bytes| tier.load(slot.0 as usize, &mut [bytes]))
    }

    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), CudaError> {
        Ok(self.issue_moves(moves)?)
    }
}

impl StageModel for CudaRank {
    fn hidden(&self) -> usize {
        self.decoder.backend.config.hidden
    }

    fn embeds(&self) -> bool {
        self.decoder.weights.embeds
    }

    fn forward_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), CudaError> {
        Ok(self.issue_from(batch, activations)?)
    }

    fn activations(&mut self, tokens: usize) -> Result<Vec<f32>, CudaError> {
        Ok(self.fetch_activations(tokens)?)
    }
}

impl Rank for CudaRank {
    const ENQUEUES: bool = true;

    fn leave(&self, why: &str) {
        if let Some(exchange) = &self.decoder.backend.exchange {
            exchange.peer.peers().leave(exchange.rank, why);
        }
    }

    fn why_left(&self) -> Option<CudaError> {
        let exchange = self.decoder.backend.exchange.as_ref()?;
        exchange.peer.peers().why_left().map(CudaError::RankLeft)
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        Ok(self.synchronize_stream()?)
    }

    /// Captures a graph on every rank before a step needs it, if every device has memory for it.
    fn prepare_group(group: &mut CudaDecoder) -> Result<Prepared, CudaError> {
        let ahead = graph_ahead(group)?;
        if let Some(size) = ahead {
            group.each_to_its_end(move |rank| Ok(rank.capture(size)?))?;
        }
        let [done, all] = [group.first().graphs(), group.first().most_graphs()].map(|graphs| graphs as u32);
        Ok(Prepared { done, all, advanced: ahead.is_some() })
    }
}

/// The size that is captured next; all ranks have graphs of the same sizes.
fn graph_ahead(group: &CudaDecoder) -> Result<Option<GraphSize>, DriverError> {
    let Some(size) = group.first().missing_graph() else { return Ok(None) };
    let room = group.ask(|rank| rank.graph_room().is_left()).into_iter().collect::<Result<Vec<bool>, _>>()?;
    Ok(Some(size).filter(|_| !room.contains(&false)))
}

/// Steps whose tokens are drawn on the devices.
impl CudaDecoder {
    /// Number of graphs that each rank has captured.
    pub fn graphs(&self) -> usize {
        self.first().graphs()
    }

    /// The first `rows` rows of logits of the last step, `[rows, vocabulary]`, after it has ended: for comparisons.
    /// Draws with biases, penalties or masks have changed them.
    ///
    /// # Panics
    /// If a step has no room for so many.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>, CudaError> {
        self.checked(self.first().logits(rows).map_err(CudaError::from))
    }

    /// Size of the vocabulary.
    pub(super) fn vocabulary(&self) -> usize {
        self.first().vocabulary()
    }

    /// Issues a step up to its logits. The tokens of `sampled_inputs` are on the device when the kernels run.
    pub(super) fn step(&mut self, batch: &mut Batch, sampled_inputs: Vec<SampledInput>) -> Result<(), CudaError> {
        // The memory of the batch is taken back below.
        let step = Arc::new(Step { batch: mem::take(batch), sampled_inputs });
        self.tell(|| {
            let step = Arc::clone(&step);
            move |rank: &mut CudaRank| Ok(rank.step(&step)?)
        });
        let issued = self.first_mut().step(&step).map_err(CudaError::from);
        if let Some(step) = Arc::into_inner(step) {
            *batch = step.batch;
        }
        self.checked(issued)
    }

    /// Issues the draws of the last step, which has this buffer, from its logits in order.
    pub(super) fn draw(&mut self, buffer: usize, sampling_tasks: Vec<SamplingTask>) -> Result<(), CudaError> {
        let sampling_tasks: Arc<[SamplingTask]> = sampling_tasks.into();
        self.each(move |rank| Ok(rank.draw(buffer, &sampling_tasks)?))
    }

    /// Waits for the step with this buffer, and returns the tokens that it drew.
    pub(super) fn drawn(&mut self, buffer: usize, rows: usize) -> Result<Vec<Drawn>, CudaError> {
        // Each rank waits for its own device: a rank whose device is lost cannot tell the others.
        self.each(move |rank| Ok(rank.wait(buffer)?))?;
        Ok(self.first().drawn(buffer, rows))
    }

    /// As [`windlass_engine_core::executor::Executor::weights_to_move`].
    pub(super) fn weights_to_move(&self) -> Option<u64> {
        self.ask(|rank| rank.weights_region().map(|region| region.bytes_to_keep() as u64)).into_iter().sum()
    }

    /// Moves the weights back to the devices if `held`, else to host memory.
    pub(super) fn hold_weights(&mut self, held: bool) -> Result<(), CudaError> {
        self.each_to_its_end(move |rank| Ok(rank.hold(Holding::Weights, held)?))
    }
}
