//! The interface of a device: the fused blocks of a decoder.

use super::layer::{Attention, Layer, Layout};

/// A device that computes a decoder's layers.
///
/// The residual stream `[tokens, hidden]`, the queries and the output of attention stay in the device's memory between
/// blocks. A tensor-parallel rank is a backend too: it computes with its part of the weights, and the blocks whose
/// description says so add up the results of all ranks.
///
/// A device may enqueue the work and compute it later, in order. Dispatch is static: a block costs no indirect call.
pub trait Backend: Layout + Sized {
    /// A prepared step: the data that depends on the tokens of the step but not on the layer.
    type Step<'a>;
    /// The error after which the device cannot compute any more.
    type Error;

    /// Whether any token of the step gets logits.
    fn has_logits(step: &Self::Step<'_>) -> bool;

    /// `residual[t] = table[token of t] · scale`, summed over the ranks, each of which has some rows of the table.
    fn embed(&mut self, step: &Self::Step<'_>, table: &Self::Matrix) -> Result<(), Self::Error>;

    /// Computes the norm of the residual stream and from it queries, keys and values, with biases, norms of heads and
    /// rotary positions. Writes keys and values to the cache of layer `index`.
    fn project_qkv(
        &mut self,
        step: &Self::Step<'_>,
        index: usize,
        layer: &Layer<Self>,
        attention: &Attention<Self>,
    ) -> Result<(), Self::Error>;

    /// Causal attention of the queries over their sequences' keys and values in layer `index`.
    fn attend(&mut self, step: &Self::Step<'_>, index: usize) -> Result<(), Self::Error>;

    /// `residual += norm(out · attended)`, summed over the ranks. The norm exists only in layers with a norm after the
    /// mixer.
    fn project_out(
        &mut self,
        step: &Self::Step<'_>,
        layer: &Layer<Self>,
        attention: &Attention<Self>,
    ) -> Result<(), Self::Error>;

    /// `residual += norm(down · (activation(gate · x) · (up · x)))`, summed over the ranks, where `x` is the layer's
    /// norm of the residual stream. The outer norm exists only in layers with a norm after the feed-forward block.
    fn feed_forward(
        &mut self,
        step: &Self::Step<'_>,
        layer: &Layer<Self>,
        gated: &Self::Gated,
    ) -> Result<(), Self::Error>;

    /// As [`Backend::feed_forward`] with `Σ weight · expert(x)` over the experts that the router chooses for each
    /// token.
    fn mix_experts(
        &mut self,
        step: &Self::Step<'_>,
        layer: &Layer<Self>,
        experts: &Self::Experts,
    ) -> Result<(), Self::Error>;

    /// Computes the final norm and the logits `[tokens with logits, vocabulary]`, with the model's soft cap if it has
    /// one.
    fn head(&mut self, step: &Self::Step<'_>, norm: &Self::Vector, output: &Self::Matrix) -> Result<(), Self::Error>;
}
