//! What steps run on: a decoder, wherever it computes, or a stage of one.

use std::io;

use windlass_engine_core::executor::Prepared;
use windlass_engine_core::plan::{BlockId, PlanRow, SwapSlotId};

use crate::batch::Batch;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::tier::Tier;

/// A decoder with its KV cache. Calls take effect in their order; a device may compute later, until something is read.
pub trait Model {
    /// That of a device or another process: nothing more can be computed.
    type Error: std::error::Error;

    /// Makes the calling thread the one that runs steps.
    fn confine(&self) {}
    /// As [`windlass_engine_core::executor::Executor::prepare`].
    fn prepare(&mut self) -> Result<Prepared, Self::Error> {
        Ok(Prepared::default())
    }
    /// Takes the memory of keys and values, or gives it back with everything in it.
    fn hold_kv(&mut self, held: bool) -> Result<(), Self::Error>;
    /// Whether such a device computes what a row asks for, and why not.
    fn check(_row: &PlanRow) -> Result<(), String> {
        Ok(())
    }
    /// Computes a batch and leaves the logits that it asks for.
    fn forward(&mut self, batch: &Batch) -> Result<(), Self::Error>;
    /// Draws or scores a token for each row of those, which are used up.
    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, Self::Error>;
    /// Copies keys and values of a whole block in all layers.
    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), Self::Error>;
    /// Keeps keys and values of a block, all layers, in a slot of the tier.
    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SwapSlotId) -> io::Result<()>;
    /// Brings them back into a block.
    fn load_block(&mut self, tier: &mut dyn Tier, slot: SwapSlotId, block: BlockId) -> io::Result<()>;
    /// Moves keys and values of single tokens in all layers, in order.
    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), Self::Error>;
}

/// A run of a decoder's layers: those of other stages come before or behind them.
pub trait StageModel: Model {
    /// Values of a token's activations.
    fn hidden(&self) -> usize;
    /// Whether it embeds tokens, so that no stage comes before it.
    fn embeds(&self) -> bool;
    /// As [`Model::forward`], from what the stage before gave: a row of `hidden` values for each token.
    fn forward_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), Self::Error>;
    /// What comes of a step whose stages before, where there are any, gave `activations`.
    fn forward_behind(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), Self::Error> {
        match self.embeds() {
            true => self.forward(batch),
            false => self.forward_from(batch, activations),
        }
    }
    /// What its layers gave for the last step's `tokens` tokens, a row each.
    fn activations(&mut self, tokens: usize) -> Result<Vec<f32>, Self::Error>;
}

/// Where keys and values of one token are, and where they belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenMove {
    /// A block, and a place in it.
    pub from: (BlockId, usize),
    /// The same.
    pub to: (BlockId, usize),
}
