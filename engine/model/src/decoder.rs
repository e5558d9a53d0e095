//! Drives a backend through a decoder's layers for one step.

use windlass_engine_core::plan::BlockCopy;

use crate::backend::{Backend, PackError};
use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::weights::DecoderWeights;

/// A decoder on a device: weights, workspace and the device's state.
pub struct Decoder<B: Backend> {
    config: DecoderConfig,
    backend: B,
    weights: DecoderWeights<B>,
    workspace: B::Workspace,
}

impl<B: Backend> Decoder<B> {
    /// A decoder for steps of at most `step_tokens` tokens, of which at most `logit_rows` get logits.
    pub fn new(
        config: DecoderConfig,
        backend: B,
        weights: DecoderWeights<B>,
        step_tokens: usize,
        logit_rows: usize,
    ) -> Result<Decoder<B>, PackError> {
        let workspace = backend.workspace(&config, step_tokens, logit_rows)?;
        Ok(Decoder { config, backend, weights, workspace })
    }

    /// What the decoder is.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The device and its buffers.
    pub(crate) fn device(&mut self) -> (&mut B, &mut B::Workspace) {
        (&mut self.backend, &mut self.workspace)
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
        let embedding = match activations {
            Some(activations) => {
                backend.enter_from(activations, work);
                None
            }
            None if weights.embeds() => weights.embedding.as_ref(),
            None => panic!("a later stage computes from activations"),
        };
        let head = weights.output().filter(|_| !batch.logit_tokens().is_empty());
        backend.run(step, |backend| {
            if let Some(embedding) = embedding {
                backend.enter(step, embedding, work);
            }
            for (index, layer) in weights.layers.iter().enumerate() {
                backend.project_qkv(step, index, layer, work);
                backend.attend(step, index, work);
                backend.project_out(step, layer, work);
                backend.feed_forward(step, layer, work);
            }
            if let Some((norm, output)) = head {
                backend.head(step, norm, output, work);
            }
        });
    }

    /// What the last step's layers gave for its `tokens` tokens, a row of `hidden` values each.
    pub fn activations(&self, tokens: usize) -> Vec<f32> {
        self.backend.activations(&self.workspace, tokens * self.config.hidden)
    }

    /// Copies K and V of whole blocks, in order.
    pub fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        self.backend.copy_blocks(copies);
    }

    /// Draws or scores a token for each row of logits that the last step left. The logits are used up.
    pub fn sample(&mut self, tasks: &[RowTask<'_>]) -> Vec<Result<Drawn, SampleError>> {
        self.backend.sample(&mut self.workspace, tasks)
    }

    /// A copy of the first `rows` rows of logits that the last step left: for comparison with a reference.
    pub fn logits(&self, rows: usize) -> Vec<f32> {
        self.backend.logits(&self.workspace, rows * self.config.vocabulary)
    }
}
