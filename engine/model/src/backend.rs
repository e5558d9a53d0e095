//! What a device computes, at the grain of a decoder's fused blocks: how it fuses them, in which precision, and in which
//! buffers is its own matter. Dispatch is static. The backend also owns what outlives a step on the device: the KV cache
//! and the rotary table.
//!
//! A rank of a tensor-parallel group is a backend too: it computes with its part of the weights and meets the others
//! where sums and logits come together. [`Ranks`](crate::Ranks) drives a group as one.

use std::borrow::Cow;

use windlass_engine_core::plan::BlockCopy;
use windlass_kernels::{Integer, ShapeError, WeightType};

use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::sampler::{Drawn, RowTask, SampleError};

/// A device that computes a decoder's layers.
pub trait Backend: Sized {
    /// A weight matrix in the device's layout, `[outputs, inputs]`.
    type Matrix: Send;
    /// `N` matrices that multiply the same input: one by one, or as one where the device does that.
    type Stack<const N: usize>: AsRef<[Self::Matrix]> + Send;
    /// A vector of f32, such as a norm's weights.
    type Vector: Send;
    /// Activations of a step, allocated once for the largest one. Its bytes are
    /// `windlass_engine_contract::memory::workspace_bytes` at most.
    type Workspace: Send;
    /// A batch made ready for the device: what depends on its rows and not on the layer.
    type Step<'a>;

    /// Packs a matrix. Its bytes are not needed afterwards.
    fn matrix(&self, file: &FileMatrix<'_>) -> Result<Self::Matrix, PackError>;
    /// Packs matrices of the same input.
    fn stack<const N: usize>(&self, files: [FileMatrix<'_>; N]) -> Result<Self::Stack<N>, PackError>;
    /// Takes in a vector.
    fn vector(&self, values: Vec<f32>) -> Result<Self::Vector, PackError>;
    /// Room for steps of `tokens` tokens, of which `logit_rows` get logits.
    fn workspace(&self, config: &DecoderConfig, tokens: usize, logit_rows: usize) -> Result<Self::Workspace, PackError>;

    /// Makes a batch ready.
    fn begin<'a>(&mut self, batch: &'a Batch) -> Self::Step<'a>;
    /// Runs a step's blocks, which `issue` calls in their order. A device that recorded a step of this shape before may
    /// repeat that instead.
    fn run(&mut self, _step: &Self::Step<'_>, issue: impl FnOnce(&mut Self)) {
        issue(self);
    }
    /// Embeds the step's tokens.
    fn enter(&mut self, step: &Self::Step<'_>, embedding: &Self::Matrix, work: &mut Self::Workspace);
    /// Takes the activations that another process computed, a row of `hidden` values for each token.
    fn enter_from(&mut self, activations: &[f32], work: &mut Self::Workspace);
    /// Norm, q, k and v, rotary positions, and the append to the cache.
    fn project_qkv(&mut self, step: &Self::Step<'_>, index: usize, layer: &Layer<Self>, work: &mut Self::Workspace);
    /// Causal attention of the projected queries over their sequences' blocks.
    fn attend(&mut self, step: &Self::Step<'_>, index: usize, work: &mut Self::Workspace);
    /// Output projection, residual, and the feed-forward block's norm.
    fn project_out(&mut self, step: &Self::Step<'_>, layer: &Layer<Self>, work: &mut Self::Workspace);
    /// Gate and up, activation, down, residual.
    fn feed_forward(&mut self, step: &Self::Step<'_>, layer: &Layer<Self>, work: &mut Self::Workspace);
    /// Final norm and logits of the tokens that get them.
    fn head(&mut self, step: &Self::Step<'_>, norm: &Self::Vector, output: &Self::Matrix, work: &mut Self::Workspace);
    /// Draws or scores one token with each row of logits, which may be overwritten.
    fn sample(&mut self, work: &mut Self::Workspace, tasks: &[RowTask<'_>]) -> Vec<Result<Drawn, SampleError>>;
    /// Copies keys and values of whole blocks in all layers, in order.
    fn copy_blocks(&mut self, copies: &[BlockCopy]);

    /// The first `values` values of the residual stream: what another process goes on with.
    fn activations(&self, work: &Self::Workspace, values: usize) -> Vec<f32>;
    /// The first `values` logits: for tests and references.
    fn logits(&self, work: &Self::Workspace, values: usize) -> Vec<f32>;
    /// Tells the other ranks not to wait for this one any more.
    fn leave(&self, why: &str);
}

/// A matrix as a file has it, `[rows = outputs, cols = inputs]`.
#[derive(Clone, Debug)]
pub struct FileMatrix<'a> {
    /// The type of its bytes.
    pub kind: WeightType,
    /// What its floats are to become.
    pub quantized: Option<Integer>,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Row after row.
    pub bytes: Cow<'a, [u8]>,
}

/// Why a device did not take something in.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PackError {
    /// Its bytes do not make it.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The device refused, in its own words.
    #[error("{0}")]
    Device(String),
}

/// The weights of one decoder layer. Matrices are `[outputs, inputs]`.
#[allow(missing_docs)] // the field's own names
pub struct Layer<B: Backend> {
    pub attention_norm: B::Vector,
    /// Query, key and value.
    pub qkv: B::Stack<3>,
    /// Of query, key and value, one after the other.
    pub biases: Option<B::Vector>,
    /// Of the heads of query and key.
    pub head_norms: Option<[B::Vector; 2]>,
    /// Whether heads turn.
    pub rotary: bool,
    pub out: B::Matrix,
    pub feed_forward_norm: B::Vector,
    /// Gate and up.
    pub gate_up: B::Stack<2>,
    pub down: B::Matrix,
}

impl<B: Backend> Layer<B> {
    /// All matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &B::Matrix> {
        self.qkv.as_ref().iter().chain([&self.out]).chain(self.gate_up.as_ref()).chain([&self.down])
    }
}
