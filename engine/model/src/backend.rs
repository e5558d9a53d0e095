//! What a device computes, at the grain of a decoder's fused blocks.
//!
//! Each fused block has a body over primitive ops; a device overrides the blocks that it fuses. Dispatch is static and
//! buffers are opaque: a device's may lie in its own memory. The backend also owns what outlives a step on the device:
//! the KV cache and the rotary table.
//!
//! A rank of a tensor-parallel group is a backend too: it computes with its part of the weights and meets the others
//! where sums and logits come together. [`Ranks`](crate::Ranks) drives a group as one.

use std::borrow::Cow;
use std::io;
use std::ops::Range;

use windlass_engine_core::plan::{BlockId, SlotId};
use windlass_kernels::{Integer, ShapeError, WeightType};

use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::packed::Float8;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::tier::Tier;

/// What holds the weights of a decoder.
pub trait Storage {
    /// A weight matrix in the device's layout, `[outputs, inputs]`.
    type Matrix;
    /// A vector of f32, such as a norm's weights.
    type Vector;
}

/// A matrix's rows as the kernels' file has them, of a file that is there as long as `'a`. A device that makes its own of them
/// asks for some at a time.
pub trait FileRows<'a> {
    /// The bytes of some rows.
    fn get(&self, rows: Range<usize>) -> Cow<'a, [u8]>;
    /// Gives back what memory these rows take, where they lie in the file; they can be had again.
    fn release(&self, rows: Range<usize>);
}

/// What takes in the weights of a decoder, of a file that is there as long as `'a`.
pub trait Packer<'a>: Storage {
    /// Packs a file tensor of `[rows, cols]`, whose column `c` multiplies input `order[c]` where there is an order, and
    /// nothing where that is `NO_INPUT`.
    fn matrix(
        &self,
        kind: WeightType,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
        order: Option<&[u32]>,
    ) -> Result<Self::Matrix, ShapeError>;
    /// Packs a file tensor of floats as integers.
    fn quantized_matrix(
        &self,
        from: WeightType,
        to: Integer,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
    ) -> Result<Self::Matrix, ShapeError>;
    /// Packs eight-bit floats as they are, on a device that multiplies them so and where `values` has them: elsewhere they
    /// become integers first.
    fn float8_matrix(
        &self,
        _rows: usize,
        _cols: usize,
        _values: impl FnOnce() -> Option<Float8>,
    ) -> Option<Self::Matrix> {
        None
    }
    /// Takes in a vector.
    fn vector(&self, values: Vec<f32>) -> Self::Vector;
}

/// A device that computes a decoder's layers.
///
/// `Step` carries a step's token count and places; a buffer's rows beyond that count are never read. Widths come from
/// the weights and the configuration, so one buffer serves any width it has room for.
pub trait Backend: Storage + for<'a> Packer<'a> + Sized {
    /// Room for f32 activations.
    type Buffer;
    /// A batch made ready for the device: what depends on its rows and not on the layer.
    type Step<'a>;

    /// Allocates room for `values` f32.
    fn buffer(&self, values: usize) -> Self::Buffer;
    /// Takes the memory of keys and values, or gives it back with everything in it. A backend that cannot keeps it.
    fn hold_kv(&mut self, _held: bool) {}
    /// Makes a batch ready.
    fn begin<'a>(&mut self, batch: &'a Batch) -> Self::Step<'a>;

    /// `out[t] = table[token of t]`; of a token whose row another rank holds, zeros.
    fn embed(&mut self, step: &Self::Step<'_>, table: &Self::Matrix, out: &mut Self::Buffer);
    /// `out[i] = input[token of the i-th logits]`.
    fn gather_logit_tokens(&mut self, step: &Self::Step<'_>, input: &Self::Buffer, out: &mut Self::Buffer);
    /// Root-mean-square norm of `rows` tokens.
    fn rms_norm(
        &mut self,
        rows: Rows,
        step: &Self::Step<'_>,
        input: &Self::Buffer,
        weight: &Self::Vector,
        out: &mut Self::Buffer,
    );
    /// `residual += addend`, and its norm into `out`.
    fn add_rms_norm(
        &mut self,
        step: &Self::Step<'_>,
        residual: &mut Self::Buffer,
        addend: &Self::Buffer,
        weight: &Self::Vector,
        out: &mut Self::Buffer,
    );
    /// `residual += addend`.
    fn add(&mut self, step: &Self::Step<'_>, residual: &mut Self::Buffer, addend: &Self::Buffer);
    /// Products of `rows` tokens of one input with several matrices.
    fn linear<const N: usize>(
        &mut self,
        rows: Rows,
        step: &Self::Step<'_>,
        input: &Self::Buffer,
        products: [(&Self::Matrix, &mut Self::Buffer); N],
    );
    /// `values[t] += bias` for every token.
    fn add_bias(&mut self, step: &Self::Step<'_>, values: &mut Self::Buffer, bias: &Self::Vector);
    /// Root-mean-square norm of every head of queries or keys by itself.
    fn head_norm(&mut self, step: &Self::Step<'_>, heads: Heads, values: &mut Self::Buffer, weight: &Self::Vector);
    /// Turns every query and key head of a layer by its token's position.
    fn rope(&mut self, step: &Self::Step<'_>, layer: usize, query: &mut Self::Buffer, key: &mut Self::Buffer);
    /// Writes keys and values into their blocks.
    fn append_kv(&mut self, step: &Self::Step<'_>, layer: usize, key: &Self::Buffer, value: &Self::Buffer);
    /// Causal attention of the queries over their sequences' blocks.
    fn attention(&mut self, step: &Self::Step<'_>, layer: usize, query: &Self::Buffer, out: &mut Self::Buffer);
    /// `out = activation(gate) · up`.
    fn activate(&mut self, step: &Self::Step<'_>, gate: &Self::Buffer, up: &Self::Buffer, out: &mut Self::Buffer);
    /// `projected = Σ weight · expert(normed)` over the experts that the router gives each token.
    fn mix_experts(&mut self, step: &Self::Step<'_>, experts: &Experts<Self>, work: &mut Workspace<Self>);
    /// Bends logits where the model has a cap for them.
    fn cap_logits(&mut self, step: &Self::Step<'_>, logits: &mut Self::Buffer);
    /// Adds up what the ranks hold of `values`, which are as wide as the residual stream, in the order of ranks. Alone,
    /// nothing changes.
    fn all_reduce(&mut self, step: &Self::Step<'_>, values: &mut Self::Buffer);
    /// Puts the ranks' columns of logits side by side on the first rank. Alone, nothing changes.
    fn gather_logits(&mut self, step: &Self::Step<'_>, logits: &mut Self::Buffer);
    /// Tells the other ranks not to wait for this one any more.
    fn leave(&self, why: &str);
    /// Puts values into the beginning of a buffer: activations that came from another process.
    fn write(&mut self, values: &[f32], buffer: &mut Self::Buffer);
    /// The first `values` of a buffer, for tests, references and other processes: not on the way of a step within one.
    fn read(&self, buffer: &Self::Buffer, values: usize) -> Vec<f32>;
    /// Copies keys and values of a whole block in all layers.
    fn copy_block(&mut self, from: BlockId, to: BlockId);
    /// Keeps keys and values of a block, all layers, in a slot of the tier.
    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SlotId) -> io::Result<()>;
    /// Brings them back into a block.
    fn load_block(&mut self, tier: &mut dyn Tier, slot: SlotId, block: BlockId) -> io::Result<()>;
    /// Moves keys and values of single tokens in all layers, in order: from a block and a place in it to another.
    fn move_tokens(&mut self, moves: &[TokenMove]);
    /// Draws or scores one token with each row of logits, which may be overwritten.
    fn sample(&mut self, logits: &mut Self::Buffer, tasks: &[RowTask<'_>]) -> Vec<Result<Drawn, SampleError>>;

    /// Norm, q, k and v, rotary positions, and the append to the cache.
    fn project_qkv(&mut self, step: &Self::Step<'_>, index: usize, layer: &Layer<Self>, work: &mut Workspace<Self>) {
        self.rms_norm(Rows::Tokens, step, &work.residual, &layer.attention_norm, &mut work.normed);
        let products = [(&layer.query, &mut work.query), (&layer.key, &mut work.key), (&layer.value, &mut work.value)];
        self.linear(Rows::Tokens, step, &work.normed, products);
        if let Some([query, key, value]) = &layer.biases {
            self.add_bias(step, &mut work.query, query);
            self.add_bias(step, &mut work.key, key);
            self.add_bias(step, &mut work.value, value);
        }
        if let Some([query, key]) = &layer.head_norms {
            self.head_norm(step, Heads::Query, &mut work.query, query);
            self.head_norm(step, Heads::Key, &mut work.key, key);
        }
        if layer.rotary {
            self.rope(step, index, &mut work.query, &mut work.key);
        }
        self.append_kv(step, index, &work.key, &work.value);
    }

    /// Embeds the step's tokens.
    fn enter(&mut self, step: &Self::Step<'_>, embedding: &Self::Matrix, work: &mut Workspace<Self>) {
        self.embed(step, embedding, &mut work.residual);
        self.all_reduce(step, &mut work.residual);
    }

    /// Attention of the projected queries.
    fn attend(&mut self, step: &Self::Step<'_>, index: usize, work: &mut Workspace<Self>) {
        self.attention(step, index, &work.query, &mut work.attended);
    }

    /// Output projection, residual, and the feed-forward block's norm.
    fn project_out(&mut self, step: &Self::Step<'_>, layer: &Layer<Self>, work: &mut Workspace<Self>) {
        self.linear(Rows::Tokens, step, &work.attended, [(&layer.out, &mut work.projected)]);
        self.all_reduce(step, &mut work.projected);
        self.norm_projected(step, layer.post_attention_norm.as_ref(), work);
        let norm = &layer.feed_forward_norm;
        self.add_rms_norm(step, &mut work.residual, &work.projected, norm, &mut work.normed);
    }

    /// Gate and up, activation, down, residual; or those of a few experts.
    fn feed_forward(&mut self, step: &Self::Step<'_>, layer: &Layer<Self>, work: &mut Workspace<Self>) {
        match &layer.feed_forward {
            FeedForward::Dense(Gated { gate, up, down }) => {
                let products = [(gate, &mut work.gate), (up, &mut work.up)];
                self.linear(Rows::Tokens, step, &work.normed, products);
                self.activate(step, &work.gate, &work.up, &mut work.gated);
                self.linear(Rows::Tokens, step, &work.gated, [(down, &mut work.projected)]);
            }
            FeedForward::Experts(experts) => self.mix_experts(step, experts, work),
        }
        self.all_reduce(step, &mut work.projected);
        self.norm_projected(step, layer.post_feed_forward_norm.as_ref(), work);
        self.add(step, &mut work.residual, &work.projected);
    }

    /// Norms what a block gave, in families that do.
    fn norm_projected(&mut self, step: &Self::Step<'_>, norm: Option<&Self::Vector>, work: &mut Workspace<Self>) {
        if let Some(norm) = norm {
            self.rms_norm(Rows::Tokens, step, &work.projected, norm, &mut work.normed);
            std::mem::swap(&mut work.projected, &mut work.normed);
        }
    }

    /// Final norm and logits of the tokens that get them.
    fn head(&mut self, step: &Self::Step<'_>, norm: &Self::Vector, output: &Self::Matrix, work: &mut Workspace<Self>) {
        self.gather_logit_tokens(step, &work.residual, &mut work.projected);
        self.rms_norm(Rows::LogitTokens, step, &work.projected, norm, &mut work.normed);
        self.linear(Rows::LogitTokens, step, &work.normed, [(output, &mut work.logits)]);
        self.cap_logits(step, &mut work.logits);
        self.gather_logits(step, &mut work.logits);
    }
}

/// Where keys and values of one token are, and where they belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenMove {
    /// Block, and place in it.
    pub from: (BlockId, usize),
    /// The same.
    pub to: (BlockId, usize),
}

/// Which rows of its buffers an op computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// One for each token of the step.
    Tokens,
    /// One for each token that gets logits.
    LogitTokens,
}

/// Which heads an op computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// Those of queries.
    Query,
    /// Those of keys.
    Key,
}

/// The weights of one decoder layer. Matrices are `[outputs, inputs]`.
#[allow(missing_docs)] // the field's own names
pub struct Layer<P: Storage> {
    pub attention_norm: P::Vector,
    pub query: P::Matrix,
    pub key: P::Matrix,
    pub value: P::Matrix,
    pub out: P::Matrix,
    /// Of query, key and value.
    pub biases: Option<[P::Vector; 3]>,
    /// Of the heads of query and key.
    pub head_norms: Option<[P::Vector; 2]>,
    /// Whether heads turn.
    pub rotary: bool,
    /// Of what the attention gives.
    pub post_attention_norm: Option<P::Vector>,
    pub feed_forward_norm: P::Vector,
    pub feed_forward: FeedForward<P>,
    /// Of what the feed-forward block gives.
    pub post_feed_forward_norm: Option<P::Vector>,
}

/// A layer's feed-forward block.
pub enum FeedForward<P: Storage> {
    /// One for all tokens.
    Dense(Gated<P>),
    /// A few of many for each token.
    Experts(Experts<P>),
}

/// A gated feed-forward block: `down · (activation(gate · x) · (up · x))`.
#[allow(missing_docs)] // the field's own names
pub struct Gated<P: Storage> {
    pub gate: P::Matrix,
    pub up: P::Matrix,
    pub down: P::Matrix,
}

/// A mixture of experts.
pub struct Experts<P: Storage> {
    /// Gives each token a score for each expert.
    pub router: P::Matrix,
    /// In the order of their scores.
    pub experts: Vec<Gated<P>>,
    /// One that every token goes through besides.
    pub shared: Option<SharedExpert<P>>,
}

/// An expert that every token goes through.
pub struct SharedExpert<P: Storage> {
    /// The expert.
    pub gated: Gated<P>,
    /// Its weight is the logistic function of this with the token.
    pub gate: P::Vector,
}

impl<P: Storage> Layer<P> {
    /// All matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &P::Matrix> {
        [&self.query, &self.key, &self.value, &self.out].into_iter().chain(self.feed_forward.matrices())
    }
}

impl<P: Storage> FeedForward<P> {
    fn matrices(&self) -> Vec<&P::Matrix> {
        match self {
            FeedForward::Dense(gated) => gated.matrices().to_vec(),
            FeedForward::Experts(Experts { router, experts, shared }) => {
                let shared = shared.iter().map(|shared| &shared.gated);
                experts.iter().chain(shared).flat_map(Gated::matrices).chain([router]).collect()
            }
        }
    }
}

impl<P: Storage> Gated<P> {
    fn matrices(&self) -> [&P::Matrix; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

/// Activations of a step, one row per token: allocated once for the largest step. Its bytes are
/// `windlass_engine_contract::memory::workspace_bytes`.
#[allow(missing_docs)] // the field's own names
pub struct Workspace<B: Backend> {
    pub residual: B::Buffer,
    pub normed: B::Buffer,
    pub projected: B::Buffer,
    pub query: B::Buffer,
    pub key: B::Buffer,
    pub value: B::Buffer,
    pub attended: B::Buffer,
    pub gate: B::Buffer,
    pub up: B::Buffer,
    pub gated: B::Buffer,
    /// One row per token that gets logits.
    pub logits: B::Buffer,
}

impl<B: Backend> Workspace<B> {
    /// Room for steps of `tokens` tokens, of which `logit_rows` get logits.
    pub fn new(backend: &B, config: &DecoderConfig, tokens: usize, logit_rows: usize) -> Workspace<B> {
        let rows = |width: usize| backend.buffer(tokens * width);
        Workspace {
            residual: rows(config.hidden),
            normed: rows(config.hidden),
            projected: rows(config.hidden),
            query: rows(config.query_width()),
            key: rows(config.kv_width()),
            value: rows(config.kv_width()),
            attended: rows(config.query_width()),
            gate: rows(config.feed_forward),
            up: rows(config.feed_forward),
            gated: rows(config.feed_forward),
            logits: backend.buffer(logit_rows * config.vocabulary),
        }
    }
}
