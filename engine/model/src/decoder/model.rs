//! The interface that steps are run on: a decoder on any device, or one stage of a decoder.

use std::io;

use windlass_engine_core::executor::Prepared;
use windlass_engine_core::plan::{BlockId, PlanRow, SwapSlotId};

use crate::batch::Batch;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::tier::Tier;

/// A decoder with its KV cache. Calls take effect in order; a device may compute later, until results are read.
pub trait Model {
    /// The error of a device or of another process, after which nothing can be computed.
    type Error: std::error::Error;

    /// Declares the calling thread the one that runs steps.
    fn confine(&self) {}
    /// As [`windlass_engine_core::executor::Executor::prepare`].
    fn prepare(&mut self) -> Result<Prepared, Self::Error> {
        Ok(Prepared::default())
    }
    /// Allocates the memory of K and V if `held`, else frees it with its contents.
    fn hold_kv(&mut self, held: bool) -> Result<(), Self::Error>;
    /// Whether such a device can compute a row, else why not.
    fn check(_row: &PlanRow) -> Result<(), String> {
        Ok(())
    }
    /// Computes a batch and leaves the logits that it asks for.
    fn forward(&mut self, batch: &Batch) -> Result<(), Self::Error>;
    /// Draws or scores a token for each row of logits of the last batch. The logits are used up.
    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, Self::Error>;
    /// Copies K and V of a whole block in all layers.
    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), Self::Error>;
    /// Stores K and V of a block, all layers, in a swap slot of the tier.
    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SwapSlotId) -> io::Result<()>;
    /// Loads a swap slot into a block.
    fn load_block(&mut self, tier: &mut dyn Tier, slot: SwapSlotId, block: BlockId) -> io::Result<()>;
    /// Moves K and V of single tokens in all layers, in order.
    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), Self::Error>;
}

/// A pipeline stage: consecutive layers of a decoder.
pub trait StageModel: Model {
    /// Activation values per token.
    fn hidden(&self) -> usize;
    /// Whether it embeds tokens: it is the first stage.
    fn embeds(&self) -> bool;
    /// As [`Model::forward`], from the activations `[tokens, hidden]` of the previous stage.
    fn forward_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), Self::Error>;
    /// Computes a step from the activations of the previous stage, if there is one.
    fn forward_behind(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), Self::Error> {
        match self.embeds() {
            true => self.forward(batch),
            false => self.forward_from(batch, activations),
        }
    }
    /// The activations `[tokens, hidden]` of the last step.
    fn activations(&mut self, tokens: usize) -> Result<Vec<f32>, Self::Error>;
}

/// A move of K and V of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenMove {
    /// Block, and offset of the token in it.
    pub from: (BlockId, usize),
    /// Block, and offset of the token in it.
    pub to: (BlockId, usize),
}
