//! Drives a backend through a decoder's layers for one step.

use std::io;

use windlass_engine_core::plan::{BlockId, SlotId};

use crate::backend::{Backend, TokenMove, Workspace};
use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::tier::Tier;
use crate::weights::DecoderWeights;

/// A decoder on a device: weights, workspace and the device's state.
pub struct Decoder<B: Backend> {
    config: DecoderConfig,
    backend: B,
    weights: DecoderWeights<B>,
    workspace: Workspace<B>,
}

impl<B: Backend> Decoder<B> {
    /// A decoder for steps of at most `step_tokens` tokens, of which at most `logit_rows` get logits.
    pub fn new(
        config: DecoderConfig,
        backend: B,
        weights: DecoderWeights<B>,
        step_tokens: usize,
        logit_rows: usize,
    ) -> Decoder<B> {
        let workspace = Workspace::new(&backend, &config, step_tokens, logit_rows);
        Decoder { config, backend, weights, workspace }
    }

    /// Takes the memory of keys and values, or gives it back with everything in it.
    pub fn hold_kv(&mut self, held: bool) {
        self.backend.hold_kv(held);
    }

    /// What the decoder is.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The weights.
    pub fn weights(&self) -> &DecoderWeights<B> {
        &self.weights
    }

    /// Computes a step: appends K and V of every token, and leaves logits of the tokens that get them.
    ///
    /// # Panics
    /// When the batch is larger than the decoder was made for, or names tokens, positions or blocks it does not have.
    pub fn forward(&mut self, batch: &Batch) {
        self.compute(batch, None);
    }

    /// As [`forward`](Self::forward), from the activations of the stage before: a row of `hidden` values per token.
    pub fn forward_from(&mut self, batch: &Batch, activations: &[f32]) {
        self.compute(batch, Some(activations));
    }

    fn compute(&mut self, batch: &Batch, activations: Option<&[f32]>) {
        let (backend, work, weights) = (&mut self.backend, &mut self.workspace, &self.weights);
        let step = &backend.begin(batch);
        match (activations, &weights.embedding) {
            (Some(activations), _) => backend.write(activations, &mut work.residual),
            (None, Some(embedding)) => backend.enter(step, embedding, work),
            (None, None) => panic!("a later stage computes from activations"),
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            backend.project_qkv(step, index, layer, work);
            backend.attend(step, index, work);
            backend.project_out(step, layer, work);
            backend.feed_forward(step, layer, work);
        }
        if let Some((norm, output)) = weights.output().filter(|_| !batch.logit_tokens().is_empty()) {
            backend.head(step, norm, output, work);
        }
    }

    /// What the last step's layers gave for its `tokens` tokens, a row of `hidden` values each.
    pub fn activations(&self, tokens: usize) -> Vec<f32> {
        self.backend.read(&self.workspace.residual, tokens * self.config.hidden)
    }

    /// Copies K and V of a whole block.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        self.backend.copy_block(from, to);
    }

    /// Keeps K and V of a block in a slot of the tier.
    pub fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SlotId) -> io::Result<()> {
        self.backend.store_block(tier, block, slot)
    }

    /// Brings them back into a block.
    pub fn load_block(&mut self, tier: &mut dyn Tier, slot: SlotId, block: BlockId) -> io::Result<()> {
        self.backend.load_block(tier, slot, block)
    }

    /// Moves K and V of single tokens, in order.
    pub fn move_tokens(&mut self, moves: &[TokenMove]) {
        self.backend.move_tokens(moves);
    }

    /// Draws or scores a token for each row of logits that the last step left. The logits are used up.
    pub fn sample(&mut self, tasks: &[RowTask<'_>]) -> Vec<Result<Drawn, SampleError>> {
        self.backend.sample(&mut self.workspace.logits, tasks)
    }

    /// A copy of the first `rows` rows of logits that the last step left: for comparison with a reference.
    pub fn logits(&self, rows: usize) -> Vec<f32> {
        self.backend.read(&self.workspace.logits, rows * self.config.vocabulary)
    }
}
