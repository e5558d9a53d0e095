//! Operations of a CPU on activations `[tokens, width]`, row-major.

use std::ops::Range;

use windlass_engine_core::executor::Geometry;
use windlass_kernels::ops::{self, AttentionRow, Product, RopeTable, Scoring};
use windlass_kernels::{Activations, KvCache, KvLayout, KvType, PackedMatrix, Pool};

use super::collectives::Member;
use crate::batch::{Batch, BatchRow};
use crate::config::{Activation, DecoderConfig, RopeConfig};
use crate::decoder::kv_layers::{KvLayers, KvLocation};

/// The thread pool, the KV cache, the rotary tables, and the quantized copy of a product's input.
#[derive(Debug)]
pub(crate) struct CpuOps {
    config: DecoderConfig,
    pool: Pool,
    kv_layers: KvLayers,
    cache: KvCache,
    /// Number of blocks of the cache while it is allocated.
    blocks: usize,
    /// One table for each of the configuration's `ropes`.
    ropes: Vec<RopeTable>,
    activations: Activations,
    share: Share,
    /// A copy of the input of an operation that works in place.
    pub(super) scratch: Vec<f32>,
}

/// The link of a rank to its group.
#[derive(Debug)]
pub(crate) struct Share {
    /// The rank's side of the collectives.
    pub member: Member,
    /// The token ids whose embeddings and logits this rank has.
    pub vocabulary: Range<usize>,
}

/// A batch, with its rows in the form that attention reads.
#[derive(Debug)]
pub struct CpuStep<'a> {
    batch: &'a Batch,
    /// The rows, for each group of layers.
    rows: Vec<Vec<AttentionRow<'a>>>,
}

impl CpuStep<'_> {
    /// Number of tokens of the step.
    pub(super) fn tokens(&self) -> usize {
        self.batch.tokens().len()
    }

    /// Indices of the tokens that get logits.
    pub(super) fn logit_tokens(&self) -> &[usize] {
        self.batch.logit_tokens()
    }
}

impl CpuOps {
    /// Makes the operations, with a KV cache of type `kv` of the sizes of `geometry`. `config` is that of the rank's
    /// part.
    pub fn new(
        pool: Pool,
        activations: Activations,
        config: DecoderConfig,
        kv: KvType,
        share: Share,
        geometry: &Geometry,
    ) -> CpuOps {
        let [block_tokens, blocks, positions] =
            [geometry.block_tokens, geometry.blocks, geometry.max_sequence_tokens].map(|size| size as usize);
        let layout = KvLayout { block_tokens, kv_heads: config.kv_heads, head_dim: config.head_dim };
        let kv_layers = KvLayers::new(&config, &geometry.groups);
        let cache = KvCache::new(layout, kv, kv_layers.per_block, blocks);
        let table = |rope: &RopeConfig| {
            RopeTable::new(rope.dims, positions, rope.theta, rope.factors_for(positions), rope.magnitude)
        };
        let ropes = config.ropes().map(table).collect();
        CpuOps { config, pool, kv_layers, cache, blocks, ropes, activations, share, scratch: Vec::new() }
    }

    /// The configuration of the rank's part of the decoder.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    pub fn kernels(&self) -> &'static str {
        self.pool.kernels().name()
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    pub(super) fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Allocates the memory of the cache if `held`, else frees it with its contents.
    pub(super) fn hold_kv(&mut self, held: bool) {
        let blocks = if held { self.blocks } else { 0 };
        self.cache = KvCache::new(self.cache.layout(), self.cache.kind(), self.cache.layers(), blocks);
    }

    /// Prepares a batch.
    pub(super) fn begin<'a>(&self, batch: &'a Batch) -> CpuStep<'a> {
        let groups = self.kv_layers.groups;
        let row = |row: BatchRow<'a>, group| AttentionRow {
            block_table: row.table(group, groups),
            first_position: row.first_position as usize,
            tokens: row.tokens,
            seen: row.seen,
        };
        let rows = |group| batch.rows().map(|of| row(of, group)).collect();
        CpuStep { batch, rows: (0..groups).map(rows).collect() }
    }

    /// `out[t] = table[token of t] · scale`; zeros if another rank has the row.
    pub(super) fn embed(&self, step: &CpuStep<'_>, table: &PackedMatrix, out: &mut [f32]) {
        let held = &self.share.vocabulary;
        for (&token, out) in step.batch.tokens().iter().zip(out.chunks_exact_mut(table.cols())) {
            match held.contains(&(token as usize)) {
                true => table.dequantize_row(token as usize - held.start, out),
                false => out.fill(0.0),
            }
        }
        if self.config.embedding_scale != 1.0 {
            let values = &mut out[..step.tokens() * table.cols()];
            values.iter_mut().for_each(|value| *value *= self.config.embedding_scale);
        }
    }

    /// `out[i] = input[i-th token with logits]`.
    pub(super) fn gather_logit_tokens(&self, step: &CpuStep<'_>, input: &[f32], out: &mut [f32]) {
        let width = self.config.hidden;
        for (&token, out) in step.logit_tokens().iter().zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&input[token * width..][..width]);
        }
    }

    /// Root-mean-square norm of the first `tokens` tokens (Zhang and Sennrich 2019).
    pub(super) fn rms_norm(&self, tokens: usize, input: &[f32], weight: &[f32], out: &mut [f32]) {
        let values = tokens * weight.len();
        ops::rms_norm(&self.pool, &input[..values], weight, self.config.norm_epsilon, &mut out[..values]);
    }

    /// `residual += addend`, and `out` is the norm of the sum.
    pub(super) fn add_rms_norm(
        &self,
        tokens: usize,
        residual: &mut [f32],
        addend: &[f32],
        weight: &[f32],
        out: &mut [f32],
    ) {
        let values = tokens * weight.len();
        let (residual, addend, out) = (&mut residual[..values], &addend[..values], &mut out[..values]);
        ops::add_rms_norm(&self.pool, residual, addend, weight, self.config.norm_epsilon, out);
    }

    /// `residual += addend`.
    pub(super) fn add(&self, tokens: usize, residual: &mut [f32], addend: &[f32]) {
        let values = tokens * self.config.hidden;
        ops::add(&self.pool, &mut residual[..values], &addend[..values]);
    }

    /// Products of the first `tokens` tokens with several matrices of the same input.
    pub(super) fn multiply<const N: usize>(
        &mut self,
        tokens: usize,
        input: &[f32],
        products: [(&PackedMatrix, &mut [f32]); N],
    ) {
        let matrices = products.each_ref().map(|(matrix, _)| *matrix);
        if matrices.iter().any(|matrix| matrix.order() != matrices[0].order()) {
            return products.into_iter().for_each(|product| self.multiply(tokens, input, [product]));
        }
        self.activations.load(&self.pool, &input[..tokens * matrices[0].inputs()], &matrices);
        let mut products = products.map(|(matrix, out)| Product { matrix, out: &mut out[..tokens * matrix.rows()] });
        ops::matmul_many(&self.pool, &self.activations, &mut products);
    }

    /// Root-mean-square norm of every head of the first `tokens` tokens, whose heads have `width` values together.
    pub(super) fn norm_heads(&mut self, tokens: usize, width: usize, values: &mut [f32], weight: &[f32]) {
        let values = &mut values[..tokens * width];
        self.scratch.clear();
        self.scratch.extend_from_slice(values);
        ops::rms_norm(&self.pool, &self.scratch, weight, self.config.norm_epsilon, values);
    }

    /// Rotates every query and key head of a layer by its token's position (RoPE, Su et al. 2021).
    pub(super) fn rope(&self, step: &CpuStep<'_>, layer: usize, query: &mut [f32], key: &mut [f32]) {
        let (pairing, head_dim) = (self.config.rope.pairing, self.config.head_dim);
        let table = &self.ropes[self.config.rope_index(layer)];
        for (values, width) in [(query, self.config.query_width()), (key, self.config.kv_width())] {
            let values = &mut values[..step.tokens() * width];
            ops::rope(&self.pool, table, pairing, step.batch.positions(), head_dim, values);
        }
    }

    /// Writes keys and values to their blocks.
    pub(super) fn append_kv(&mut self, step: &CpuStep<'_>, layer: usize, key: &[f32], value: &[f32]) {
        let values = step.tokens() * self.config.kv_width();
        let KvLocation { group, index } = self.kv_layers.location(layer);
        ops::append_kv(&self.pool, &mut self.cache, index, &step.rows[group], &key[..values], &value[..values]);
    }

    /// Causal attention of the queries over their sequences' blocks.
    pub(super) fn attention(&self, step: &CpuStep<'_>, layer: usize, query: &[f32], out: &mut [f32]) {
        let values = step.tokens() * self.config.query_width();
        let (query, out) = (&query[..values], &mut out[..values]);
        let DecoderConfig { attention_scale, attention_soft_cap, heads, .. } = self.config;
        let scoring =
            Scoring { scale: attention_scale, soft_cap: attention_soft_cap, window: self.config.window(layer) };
        let KvLocation { group, index } = self.kv_layers.location(layer);
        ops::paged_attention(&self.pool, &self.cache, index, heads, scoring, &step.rows[group], query, out);
    }

    /// `out = activation(gate) · up`.
    pub(super) fn gate(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        match self.config.activation {
            Activation::Silu => ops::silu_mul(&self.pool, gate, up, out),
            Activation::GeluTanh => ops::gelu_mul(&self.pool, gate, up, out),
        }
    }

    /// Applies the model's soft cap to logits, if it has one.
    pub(super) fn cap_logits(&self, rows: usize, logits: &mut [f32]) {
        if let Some(cap) = self.config.logit_soft_cap {
            ops::soft_cap(&self.pool, cap, &mut logits[..rows * self.share.vocabulary.len()]);
        }
    }

    /// Replaces `values` `[tokens, hidden]` by their sum over the ranks, in the order of ranks. A single rank leaves
    /// them unchanged.
    pub(super) fn all_reduce(&mut self, tokens: usize, values: &mut [f32]) {
        self.share.member.all_reduce(&self.pool, &mut values[..tokens * self.config.hidden]);
    }

    /// Gathers the ranks' columns of logits on the first rank. A single rank leaves them unchanged.
    pub(super) fn gather_logits(&mut self, rows: usize, logits: &mut [f32]) {
        let Share { member, vocabulary } = &mut self.share;
        member.gather_columns(rows, vocabulary.len(), logits);
    }

    /// Makes the other ranks stop waiting for this one.
    pub(super) fn leave(&self, why: &str) {
        self.share.member.leave(why);
    }
}

/// `values[t] += bias` for every token.
pub(super) fn add_bias(tokens: usize, values: &mut [f32], bias: &[f32]) {
    for token in values[..tokens * bias.len()].chunks_exact_mut(bias.len()) {
        token.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
    }
}
