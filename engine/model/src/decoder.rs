//! A decoder: its weights on a device, and the walk through its layers, which is written here once for every device.
//!
//! Nothing here names a device. What one computes is a [`Backend`]; how steps are laid out, captured as graphs and waited for is
//! the business of what drives it.

mod backend;
pub(crate) mod kv_layers;
mod layer;
mod model;
mod split;

use std::fmt;

pub use backend::Backend;
pub use layer::{Attention, DecoderWeights, FeedForward, Head, Layer, Layout, Matrices, Mixer};
pub use model::{Model, StageModel, TokenMove};
pub use split::SplitDecoder;

/// A decoder, or a stage of one, on a device.
pub struct Decoder<B: Backend> {
    /// The device, with what outlives a step there: the KV cache and room for activations.
    pub backend: B,
    /// The weights.
    pub weights: DecoderWeights<B>,
}

impl<B: Backend> Decoder<B> {
    /// Computes a step: appends keys and values of every token, and leaves logits of the tokens that get them.
    ///
    /// A stage that does not embed tokens goes on from the activations that the caller has put into the residual stream.
    ///
    /// # Errors
    /// The device's own: nothing more can be computed there.
    pub fn forward(&mut self, step: &B::Step<'_>) -> Result<(), B::Error> {
        let Decoder { backend, weights } = self;
        if let Some(table) = weights.input_embedding() {
            backend.embed(step, table)?;
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            mix(backend, step, index, layer)?;
            match &layer.feed_forward {
                FeedForward::Dense(gated) => backend.feed_forward(step, layer, gated)?,
                FeedForward::Experts(experts) => backend.mix_experts(step, layer, experts)?,
            }
        }
        match weights.output().filter(|_| B::has_logits(step)) {
            Some((norm, output)) => backend.head(step, norm, output),
            None => Ok(()),
        }
    }
}

/// What lets a token see others.
fn mix<B: Backend>(backend: &mut B, step: &B::Step<'_>, index: usize, layer: &Layer<B>) -> Result<(), B::Error> {
    match &layer.mixer {
        Mixer::Attention(attention) => {
            backend.project_qkv(step, index, layer, attention)?;
            backend.attend(step, index)?;
            backend.project_out(step, layer, attention)
        }
    }
}

impl<B: Backend> fmt::Debug for Decoder<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Decoder({} layers)", self.weights.layers.len())
    }
}
