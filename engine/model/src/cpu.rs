//! The CPU as a backend: `windlass_kernels` over plain vectors.

use std::ops::Range;
use std::sync::Mutex;

use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::BlockCopy;
use windlass_kernels::ops::{self, AttentionRow, Product, RopeTable};
use windlass_kernels::{Activations, KvCache, KvLayout, KvType, PackedMatrix, Pool};

use crate::backend::{Backend, FileMatrix, Layer, PackError};
use crate::batch::{Batch, BatchRow};
use crate::config::DecoderConfig;
use crate::group::Member;
use crate::sampler::{self, Drawn, RowTask, SampleError};

/// The thread pool, the KV cache, the rotary table, and the quantized copy of a product's input.
#[derive(Debug)]
pub struct CpuBackend {
    config: DecoderConfig,
    pool: Pool,
    cache: KvCache,
    rope: RopeTable,
    activations: Activations,
    place: Place,
    /// The input of an op that works in place.
    scratch: Vec<f32>,
}

/// A backend's place among the ranks.
#[derive(Debug)]
pub(crate) struct Place {
    /// Where it meets the others.
    pub member: Member,
    /// Tokens whose embeddings and logits it holds.
    pub vocabulary: Range<usize>,
}

/// A batch with its rows in the form that attention reads.
#[derive(Debug)]
pub struct CpuStep<'a> {
    batch: &'a Batch,
    rows: Vec<AttentionRow<'a>>,
}

/// Activations of a step, one row per token.
#[derive(Debug)]
pub struct CpuWorkspace {
    residual: Vec<f32>,
    normed: Vec<f32>,
    projected: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    gated: Vec<f32>,
    /// One row per token that gets logits.
    logits: Vec<f32>,
}

impl CpuStep<'_> {
    fn tokens(&self) -> usize {
        self.batch.tokens().len()
    }
}

impl CpuBackend {
    /// A rank with a KV cache as `geometry` says. `config` is that of its part of the decoder.
    pub(crate) fn new(
        pool: Pool,
        activations: Activations,
        config: DecoderConfig,
        place: Place,
        geometry: &Geometry,
    ) -> CpuBackend {
        let [block_tokens, blocks, positions] =
            [geometry.block_tokens, geometry.blocks, geometry.max_sequence_tokens].map(|size| size as usize);
        let layout = KvLayout { block_tokens, kv_heads: config.kv_heads, head_dim: config.head_dim };
        let cache = KvCache::new(layout, KvType::Bf16, config.layers, blocks);
        let rope = RopeTable::new(config.rope.dims, positions, config.rope.theta, config.rope.factors.as_deref());
        CpuBackend { config, pool, cache, rope, activations, place, scratch: Vec::new() }
    }

    /// The instruction set in use.
    pub fn kernels(&self) -> &'static str {
        self.pool.kernels().name()
    }

    /// Root-mean-square norm of rows.
    fn rms_norm(&mut self, rows: usize, input: &[f32], weight: &[f32], out: &mut [f32]) {
        let values = rows * weight.len();
        ops::rms_norm(&self.pool, &input[..values], weight, self.config.norm_epsilon, &mut out[..values]);
    }

    /// Products of rows of one input with several matrices.
    fn linear<const N: usize>(&mut self, rows: usize, input: &[f32], products: [(&PackedMatrix, &mut Vec<f32>); N]) {
        let matrices = products.each_ref().map(|(matrix, _)| *matrix);
        self.activations.load(&self.pool, &input[..rows * matrices[0].cols()], &matrices);
        let mut products = products.map(|(matrix, out)| Product { matrix, out: &mut out[..rows * matrix.rows()] });
        ops::matmul_many(&self.pool, &self.activations, &mut products);
    }

    /// Root-mean-square norm of every head by itself.
    fn head_norm(&mut self, values: &mut [f32], weight: &[f32]) {
        self.scratch.clear();
        self.scratch.extend_from_slice(values);
        ops::rms_norm(&self.pool, &self.scratch, weight, self.config.norm_epsilon, values);
    }

    /// Adds up what the ranks have of `projected`.
    fn all_reduce(&mut self, step: &CpuStep<'_>, values: &mut [f32]) {
        self.place.member.all_reduce(&self.pool, &mut values[..step.tokens() * self.config.hidden]);
    }
}

fn add_bias(values: &mut [f32], bias: &[f32]) {
    for token in values.chunks_exact_mut(bias.len()) {
        token.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
    }
}

impl Backend for CpuBackend {
    type Matrix = PackedMatrix;
    type Stack<const N: usize> = [PackedMatrix; N];
    type Vector = Vec<f32>;
    type Workspace = CpuWorkspace;
    type Step<'a> = CpuStep<'a>;

    fn matrix(&self, file: &FileMatrix<'_>) -> Result<PackedMatrix, PackError> {
        let FileMatrix { kind, quantized, rows, cols, bytes } = file;
        Ok(match quantized {
            None => PackedMatrix::pack(&self.pool, *kind, *rows, *cols, bytes),
            Some(to) => PackedMatrix::quantize(&self.pool, *kind, *to, *rows, *cols, bytes),
        }?)
    }

    fn stack<const N: usize>(&self, files: [FileMatrix<'_>; N]) -> Result<[PackedMatrix; N], PackError> {
        let packed = files.iter().map(|file| self.matrix(file)).collect::<Result<Vec<_>, _>>()?;
        Ok(packed.try_into().unwrap_or_else(|_| unreachable!("as many as files")))
    }

    fn vector(&self, values: Vec<f32>) -> Result<Vec<f32>, PackError> {
        Ok(values)
    }

    fn workspace(&self, config: &DecoderConfig, tokens: usize, logit_rows: usize) -> Result<CpuWorkspace, PackError> {
        let rows = |width: usize| vec![0.0; tokens * width];
        Ok(CpuWorkspace {
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
            logits: vec![0.0; logit_rows * config.vocabulary],
        })
    }

    fn begin<'a>(&mut self, batch: &'a Batch) -> CpuStep<'a> {
        let row = |row: BatchRow<'a>| AttentionRow {
            block_table: row.blocks,
            first_position: row.first_position as usize,
            tokens: row.tokens,
        };
        CpuStep { batch, rows: batch.rows().map(row).collect() }
    }

    /// Tokens whose row another rank holds are zeros here.
    fn enter(&mut self, step: &CpuStep<'_>, embedding: &PackedMatrix, work: &mut CpuWorkspace) {
        let held = &self.place.vocabulary;
        for (&token, out) in step.batch.tokens().iter().zip(work.residual.chunks_exact_mut(embedding.cols())) {
            match held.contains(&(token as usize)) {
                true => embedding.dequantize_row(token as usize - held.start, out),
                false => out.fill(0.0),
            }
        }
        self.all_reduce(step, &mut work.residual);
    }

    fn enter_from(&mut self, activations: &[f32], work: &mut CpuWorkspace) {
        work.residual[..activations.len()].copy_from_slice(activations);
    }

    fn project_qkv(&mut self, step: &CpuStep<'_>, index: usize, layer: &Layer<Self>, work: &mut CpuWorkspace) {
        let (tokens, [query, key, value]) = (step.tokens(), &layer.qkv);
        self.rms_norm(tokens, &work.residual, &layer.attention_norm, &mut work.normed);
        let products = [(query, &mut work.query), (key, &mut work.key), (value, &mut work.value)];
        self.linear(tokens, &work.normed, products);
        let (query_width, kv_width) = (self.config.query_width(), self.config.kv_width());
        let query = &mut work.query[..tokens * query_width];
        let [key, value] = [&mut work.key, &mut work.value].map(|values| &mut values[..tokens * kv_width]);
        if let Some(biases) = &layer.biases {
            let (of_query, rest) = biases.split_at(query_width);
            let (of_key, of_value) = rest.split_at(kv_width);
            add_bias(query, of_query);
            add_bias(key, of_key);
            add_bias(value, of_value);
        }
        if let Some([of_query, of_key]) = &layer.head_norms {
            self.head_norm(query, of_query);
            self.head_norm(key, of_key);
        }
        if layer.rotary {
            let (pairing, head_dim, positions) =
                (self.config.rope.pairing, self.config.head_dim, step.batch.positions());
            ops::rope(&self.pool, &self.rope, pairing, positions, head_dim, query);
            ops::rope(&self.pool, &self.rope, pairing, positions, head_dim, key);
        }
        ops::append_kv(&self.pool, &mut self.cache, index, &step.rows, key, value);
    }

    fn attend(&mut self, step: &CpuStep<'_>, index: usize, work: &mut CpuWorkspace) {
        let values = step.tokens() * self.config.query_width();
        let (query, out) = (&work.query[..values], &mut work.attended[..values]);
        let scale = 1.0 / (self.config.head_dim as f32).sqrt();
        ops::paged_attention(&self.pool, &self.cache, index, self.config.heads, scale, &step.rows, query, out);
    }

    fn project_out(&mut self, step: &CpuStep<'_>, layer: &Layer<Self>, work: &mut CpuWorkspace) {
        self.linear(step.tokens(), &work.attended, [(&layer.out, &mut work.projected)]);
        self.all_reduce(step, &mut work.projected);
        let (values, norm) = (step.tokens() * self.config.hidden, &layer.feed_forward_norm);
        let (residual, normed) = (&mut work.residual[..values], &mut work.normed[..values]);
        ops::add_rms_norm(&self.pool, residual, &work.projected[..values], norm, self.config.norm_epsilon, normed);
    }

    fn feed_forward(&mut self, step: &CpuStep<'_>, layer: &Layer<Self>, work: &mut CpuWorkspace) {
        let (tokens, [gate, up]) = (step.tokens(), &layer.gate_up);
        self.linear(tokens, &work.normed, [(gate, &mut work.gate), (up, &mut work.up)]);
        let gated = tokens * self.config.feed_forward;
        ops::silu_mul(&self.pool, &work.gate[..gated], &work.up[..gated], &mut work.gated[..gated]);
        self.linear(tokens, &work.gated, [(&layer.down, &mut work.projected)]);
        self.all_reduce(step, &mut work.projected);
        let values = tokens * self.config.hidden;
        ops::add(&self.pool, &mut work.residual[..values], &work.projected[..values]);
    }

    fn head(&mut self, step: &CpuStep<'_>, norm: &Vec<f32>, output: &PackedMatrix, work: &mut CpuWorkspace) {
        let (width, logit_tokens) = (self.config.hidden, step.batch.logit_tokens());
        for (&token, out) in logit_tokens.iter().zip(work.projected.chunks_exact_mut(width)) {
            out.copy_from_slice(&work.residual[token * width..][..width]);
        }
        let rows = logit_tokens.len();
        self.rms_norm(rows, &work.projected, norm, &mut work.normed);
        self.linear(rows, &work.normed, [(output, &mut work.logits)]);
        let Place { member, vocabulary } = &mut self.place;
        member.gather_columns(rows, vocabulary.len(), &mut work.logits);
    }

    fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        for BlockCopy { from, to } in copies {
            self.cache.copy_block(from.0 as usize, to.0 as usize);
        }
    }

    fn activations(&self, work: &CpuWorkspace, values: usize) -> Vec<f32> {
        work.residual[..values].to_vec()
    }

    fn logits(&self, work: &CpuWorkspace, values: usize) -> Vec<f32> {
        work.logits[..values].to_vec()
    }

    fn leave(&self, why: &str) {
        self.place.member.leave(why);
    }

    fn sample(&mut self, work: &mut CpuWorkspace, tasks: &[RowTask<'_>]) -> Vec<Result<Drawn, SampleError>> {
        type Slot<'a> = Mutex<(&'a mut [f32], Result<Drawn, SampleError>)>;
        let rows = work.logits.chunks_exact_mut(self.config.vocabulary).take(tasks.len());
        let slots: Vec<Slot<'_>> = rows.map(|row| Mutex::new((row, Err(SampleError::AllBanned)))).collect();
        self.pool.for_each_chunk(tasks.len(), 1, |range| {
            for index in range {
                // One worker alone takes each slot; a poisoned one belongs to a panic that ends the step anyway.
                let mut slot = slots[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                let (row, drawn) = &mut *slot;
                *drawn = sampler::sample(row, &tasks[index]);
            }
        });
        slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).1).collect()
    }
}
