//! A decoder: the weights on a device, and the forward pass through the layers, which is the same for every device.
//!
//! The code here is independent of the device. A [`Backend`] computes the blocks; its driver lays out steps, captures
//! them as graphs and waits for them.

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

/// A decoder, or one pipeline stage of a decoder, on a device.
pub struct Decoder<B: Backend> {
    /// The device, with everything that lives longer than a step: the KV cache and the buffers for activations.
    pub backend: B,
    /// The weights.
    pub weights: DecoderWeights<B>,
}

impl<B: Backend> Decoder<B> {
    /// Computes a step: writes K and V of every token to the cache, and leaves the logits of the tokens that have any.
    ///
    /// A stage that does not embed tokens starts from the activations that the caller has written to the residual
    /// stream.
    ///
    /// # Errors
    /// The error of the device, which cannot compute anything after it.
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

/// Computes the mixer of a layer.
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
