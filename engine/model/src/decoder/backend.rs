//! What a device computes of a decoder, at the grain of fused blocks.

use super::layer::{Attention, Layer, Layout};

/// A device that computes a decoder's layers.
///
/// The residual stream, `[tokens, hidden]`, goes from block to block in the device's own memory, as do queries and what they
/// attended. A rank of a tensor-parallel group is a backend too: it computes with its part of the weights, and adds up what its
/// peers hold where a block says so.
///
/// A device may only enqueue what it is told, and compute it later, in order. Dispatch is static, so a block costs no indirect
/// call.
pub trait Backend: Layout + Sized {
    /// A step made ready for the device: what depends on its tokens and not on a layer.
    type Step<'a>;
    /// Why nothing more can be computed.
    type Error;

    /// Whether any token of the step gets logits.
    fn has_logits(step: &Self::Step<'_>) -> bool;

    /// `residual[t] = table[token of t] · scale`, added up over the ranks, which hold some rows each.
    fn embed(&mut self, step: &Self::Step<'_>, table: &Self::Matrix) -> Result<(), Self::Error>;

    /// Norm of the residual stream, queries, keys and values of it, biases, norms of heads, rotary positions; keys and values
    /// go into the cache of layer `index`.
    fn project_qkv(
        &mut self,
        step: &Self::Step<'_>,
        index: usize,
        layer: &Layer<Self>,
        attention: &Attention<Self>,
    ) -> Result<(), Self::Error>;

    /// Causal attention of the queries over their sequences' keys and values in layer `index`.
    fn attend(&mut self, step: &Self::Step<'_>, index: usize) -> Result<(), Self::Error>;

    /// `residual += norm(out · attended)`, added up over the ranks; the norm is there where the layer has one behind its mixer.
    fn project_out(
        &mut self,
        step: &Self::Step<'_>,
        layer: &Layer<Self>,
        attention: &Attention<Self>,
    ) -> Result<(), Self::Error>;

    /// `residual += norm(down · (activation(gate · x) · (up · x)))`, added up over the ranks, where `x` is the layer's norm of the
    /// residual stream; the outer norm is there where the layer has one behind.
    fn feed_forward(
        &mut self,
        step: &Self::Step<'_>,
        layer: &Layer<Self>,
        gated: &Self::Gated,
    ) -> Result<(), Self::Error>;

    /// The same with `Σ weight · expert(x)` over the experts that the router chooses for each token.
    fn mix_experts(
        &mut self,
        step: &Self::Step<'_>,
        layer: &Layer<Self>,
        experts: &Self::Experts,
    ) -> Result<(), Self::Error>;

    /// Norm and logits, `[tokens with logits, vocabulary]`, of the tokens that get them; with the model's cap where it has one.
    fn head(&mut self, step: &Self::Step<'_>, norm: &Self::Vector, output: &Self::Matrix) -> Result<(), Self::Error>;
}
