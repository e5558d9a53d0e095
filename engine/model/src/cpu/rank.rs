//! A rank: a decoder, or its part of one, on a CPU.

use std::convert::Infallible;
use std::io;
use std::sync::Mutex;

use windlass_engine_core::plan::{BlockId, SwapSlotId};
use windlass_kernels::processors;

use super::CpuBackend;
use super::ops::CpuOps;
use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::decoder::{Decoder, DecoderWeights, Model, StageModel, TokenMove};
use crate::ranks::{Rank, Ranks};
use crate::sampler::{self, Drawn, RowTask, SampleError};
use crate::tier::Tier;

/// A decoder on a CPU, on one rank or several.
pub type CpuDecoder = Ranks<CpuRank>;

/// A rank's part of a decoder on a CPU.
#[derive(Debug)]
pub struct CpuRank {
    /// The rank's part of the decoder.
    pub(crate) decoder: Decoder<CpuBackend>,
    /// The processors that its thread is confined to; empty for any.
    pub(crate) processors: Vec<usize>,
}

impl CpuRank {
    fn ops(&self) -> &CpuOps {
        &self.decoder.backend.ops
    }

    fn ops_mut(&mut self) -> &mut CpuOps {
        &mut self.decoder.backend.ops
    }
}

impl Model for CpuRank {
    type Error = Infallible;

    fn confine(&self) {
        if !self.processors.is_empty() {
            processors::confine(&self.processors);
        }
    }

    fn hold_kv(&mut self, held: bool) -> Result<(), Infallible> {
        self.ops_mut().hold_kv(held);
        Ok(())
    }

    /// # Panics
    /// If the batch exceeds the sizes of the decoder, or has tokens, positions or blocks that do not exist; or if
    /// another rank has failed.
    fn forward(&mut self, batch: &Batch) -> Result<(), Infallible> {
        let step = self.ops().begin(batch);
        self.decoder.forward(&step)
    }

    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, Infallible> {
        type Slot<'a> = Mutex<(&'a mut [f32], Result<Drawn, SampleError>)>;
        let CpuBackend { ops, work } = &mut self.decoder.backend;
        let rows = work.logits.chunks_exact_mut(ops.config().vocabulary).take(tasks.len());
        let slots: Vec<Slot<'_>> = rows.map(|row| Mutex::new((row, Err(SampleError::AllBanned)))).collect();
        ops.pool().for_each_chunk(tasks.len(), 1, |range| {
            for index in range {
                // Only one worker takes each slot. A poisoned slot belongs to a panic that ends the step anyway.
                let mut slot = slots[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                let (row, drawn) = &mut *slot;
                *drawn = sampler::sample(row, &tasks[index]);
            }
        });
        let drawn = slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).1);
        Ok(drawn.collect())
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), Infallible> {
        self.ops_mut().cache_mut().copy_block(from.0 as usize, to.0 as usize);
        Ok(())
    }

    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SwapSlotId) -> io::Result<()> {
        tier.store(slot.0 as usize, &self.ops().cache().block_bytes(block.0 as usize))
    }

    fn load_block(&mut self, tier: &mut dyn Tier, slot: SwapSlotId, block: BlockId) -> io::Result<()> {
        tier.load(slot.0 as usize, &mut self.ops_mut().cache_mut().block_bytes_mut(block.0 as usize))
    }

    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), Infallible> {
        let cache = self.ops_mut().cache_mut();
        for TokenMove { from, to } in moves {
            cache.move_token((from.0.0 as usize, from.1), (to.0.0 as usize, to.1));
        }
        Ok(())
    }
}

impl StageModel for CpuRank {
    fn hidden(&self) -> usize {
        self.ops().config().hidden
    }

    fn embeds(&self) -> bool {
        self.decoder.weights.embeds
    }

    fn forward_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), Infallible> {
        self.decoder.backend.work.residual[..activations.len()].copy_from_slice(activations);
        self.forward(batch)
    }

    fn activations(&mut self, tokens: usize) -> Result<Vec<f32>, Infallible> {
        Ok(self.decoder.backend.work.residual[..tokens * self.hidden()].to_vec())
    }
}

impl Rank for CpuRank {
    fn leave(&self, why: &str) {
        self.ops().leave(why);
    }
}

impl CpuDecoder {
    /// The configuration of the first rank's part.
    pub fn config(&self) -> &DecoderConfig {
        self.first().ops().config()
    }

    /// The first rank's device.
    pub fn backend(&self) -> &CpuBackend {
        &self.first().decoder.backend
    }

    /// The first rank's weights.
    pub fn weights(&self) -> &DecoderWeights<CpuBackend> {
        &self.first().decoder.weights
    }

    /// Computes a step: writes K and V of every token to the cache, and leaves the logits of the tokens that have any.
    ///
    /// # Panics
    /// If the batch exceeds the sizes of the decoder, or has tokens, positions or blocks that do not exist; or if
    /// another rank has failed.
    pub fn forward(&mut self, batch: &Batch) {
        let Ok(()) = Model::forward(self, batch);
    }

    /// Draws or scores a token for each row of logits of the last step. The logits are used up.
    pub fn sample(&mut self, tasks: &[RowTask<'_>]) -> Vec<Result<Drawn, SampleError>> {
        let Ok(drawn) = Model::sample(self, tasks);
        drawn
    }

    /// A copy of the first `rows` rows of logits of the last step, `[rows, vocabulary]`: for comparisons with a
    /// reference.
    pub fn logits(&self, rows: usize) -> Vec<f32> {
        let backend = self.backend();
        backend.work.logits[..rows * backend.ops.config().vocabulary].to_vec()
    }
}
