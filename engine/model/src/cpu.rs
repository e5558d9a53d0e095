//! The CPU as a backend: `windlass_kernels` over plain vectors.

mod experts;

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::sync::Mutex;

use windlass_engine_contract::kv_groups::READ_TILE_TOKENS;
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::{BlockId, SlotId};
use windlass_kernels::ops::{self, AttentionRow, Product, RopeTable, Scoring};
use windlass_kernels::{Activations, Integer, KvCache, KvLayout, KvType, PackedMatrix, Pool, ShapeError, WeightType};

use crate::backend::{Backend, Experts, FileRows, Heads, Packer, Rows, Storage, TokenMove, Workspace};
use crate::batch::{Batch, BatchRow};
use crate::config::{Activation, DecoderConfig, RopeConfig};
use crate::group::Member;
use crate::kv_layers::{KvLayers, KvPlace};
use crate::sampler::{self, Drawn, RowTask, SampleError};
use crate::tier::Tier;

// What a windowed group keeps is enough for this device's attention.
const _: () = assert!(ops::ATTENTION_TILE_KEYS <= READ_TILE_TOKENS as usize);

/// The thread pool, the KV cache, the rotary table, and the quantized copy of a product's input.
#[derive(Debug)]
pub struct CpuBackend {
    config: DecoderConfig,
    pool: Pool,
    kv_layers: KvLayers,
    cache: KvCache,
    /// Blocks of the cache while its memory is held.
    blocks: usize,
    /// One for each of the configuration's `ropes`.
    ropes: Vec<RopeTable>,
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
    /// By group of layers.
    rows: Vec<Vec<AttentionRow<'a>>>,
}

impl CpuStep<'_> {
    fn tokens(&self) -> usize {
        self.batch.tokens().len()
    }

    fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.tokens(),
            Rows::LogitTokens => self.batch.logit_tokens().len(),
        }
    }
}

impl CpuBackend {
    /// A rank with a KV cache of type `kv`, as large as `geometry` says. `config` is that of its part of the decoder.
    pub(crate) fn new(
        pool: Pool,
        activations: Activations,
        config: DecoderConfig,
        kv: KvType,
        place: Place,
        geometry: &Geometry,
    ) -> CpuBackend {
        let [block_tokens, blocks, positions] =
            [geometry.block_tokens, geometry.blocks, geometry.max_sequence_tokens].map(|size| size as usize);
        let layout = KvLayout { block_tokens, kv_heads: config.kv_heads, head_dim: config.head_dim };
        let kv_layers = KvLayers::new(&config, &geometry.groups);
        let cache = KvCache::new(layout, kv, kv_layers.per_block, blocks);
        let table = |rope: &RopeConfig| {
            RopeTable::new(rope.dims, positions, rope.theta, rope.factors_for(positions), rope.magnitude)
        };
        let ropes = config.ropes().map(table).collect();
        CpuBackend { config, pool, kv_layers, cache, blocks, ropes, activations, place, scratch: Vec::new() }
    }

    /// Products of the tokens of one input, `[tokens, cols]`, with several matrices.
    fn multiply<const N: usize>(&mut self, input: &[f32], products: [(&PackedMatrix, &mut [f32]); N]) {
        let matrices = products.each_ref().map(|(matrix, _)| *matrix);
        if matrices.iter().any(|matrix| matrix.order() != matrices[0].order()) {
            return products.into_iter().for_each(|product| self.multiply(input, [product]));
        }
        self.activations.load(&self.pool, input, &matrices);
        let mut products = products.map(|(matrix, out)| Product { matrix, out });
        ops::matmul_many(&self.pool, &self.activations, &mut products);
    }

    fn gate(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        match self.config.activation {
            Activation::Silu => ops::silu_mul(&self.pool, gate, up, out),
            Activation::GeluTanh => ops::gelu_mul(&self.pool, gate, up, out),
        }
    }

    /// The instruction set in use.
    pub fn kernels(&self) -> &'static str {
        self.pool.kernels().name()
    }
}

impl Storage for CpuBackend {
    type Matrix = PackedMatrix;
    type Vector = Vec<f32>;
}

impl<'a> Packer<'a> for CpuBackend {
    fn matrix(
        &self,
        kind: WeightType,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
        order: Option<&[u32]>,
    ) -> Result<PackedMatrix, ShapeError> {
        let packed = self.pack_strips((kind, kind), [rows, cols], source, Ok)?;
        match order {
            None => Ok(packed),
            Some(order) => packed.ordered(order),
        }
    }

    fn quantized_matrix(
        &self,
        from: WeightType,
        to: Integer,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
    ) -> Result<PackedMatrix, ShapeError> {
        let quantize = |floats: Cow<'a, [u8]>| {
            let rows = floats.len() / from.row_bytes(cols).unwrap_or(1);
            to.quantize(&self.pool, from, rows, cols, &floats).map(Cow::Owned)
        };
        self.pack_strips((from, to.weight_type()), [rows, cols], source, quantize)
    }

    fn vector(&self, values: Vec<f32>) -> Vec<f32> {
        values
    }
}

impl CpuBackend {
    /// Packs rows of the first type that `make` makes rows of the second of: some at a time, whose memory is given back then.
    fn pack_strips<'a>(
        &self,
        (from, to): (WeightType, WeightType),
        [rows, cols]: [usize; 2],
        source: &impl FileRows<'a>,
        make: impl Fn(Cow<'a, [u8]>) -> Result<Cow<'a, [u8]>, ShapeError>,
    ) -> Result<PackedMatrix, ShapeError> {
        let mut packed = PackedMatrix::zeroed(to, rows, cols)?;
        for strip in PackedMatrix::strips(rows, from.row_bytes(cols).unwrap_or(0)) {
            packed.fill(&self.pool, strip.clone(), &make(source.get(strip.clone()))?)?;
            source.release(strip);
        }
        Ok(packed)
    }
}

impl Backend for CpuBackend {
    type Buffer = Vec<f32>;
    type Step<'a> = CpuStep<'a>;

    fn buffer(&self, values: usize) -> Vec<f32> {
        vec![0.0; values]
    }

    fn hold_kv(&mut self, held: bool) {
        let blocks = if held { self.blocks } else { 0 };
        self.cache = KvCache::new(self.cache.layout(), self.cache.kind(), self.cache.layers(), blocks);
    }

    fn begin<'a>(&mut self, batch: &'a Batch) -> CpuStep<'a> {
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

    fn embed(&mut self, step: &CpuStep<'_>, table: &PackedMatrix, out: &mut Vec<f32>) {
        let held = &self.place.vocabulary;
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

    fn gather_logit_tokens(&mut self, step: &CpuStep<'_>, input: &Vec<f32>, out: &mut Vec<f32>) {
        let width = self.config.hidden;
        for (&token, out) in step.batch.logit_tokens().iter().zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&input[token * width..][..width]);
        }
    }

    fn rms_norm(&mut self, rows: Rows, step: &CpuStep<'_>, input: &Vec<f32>, weight: &Vec<f32>, out: &mut Vec<f32>) {
        let values = step.count(rows) * weight.len();
        ops::rms_norm(&self.pool, &input[..values], weight, self.config.norm_epsilon, &mut out[..values]);
    }

    fn add_rms_norm(
        &mut self,
        step: &CpuStep<'_>,
        residual: &mut Vec<f32>,
        addend: &Vec<f32>,
        weight: &Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        let values = step.tokens() * weight.len();
        let (residual, addend, out) = (&mut residual[..values], &addend[..values], &mut out[..values]);
        ops::add_rms_norm(&self.pool, residual, addend, weight, self.config.norm_epsilon, out);
    }

    fn add(&mut self, step: &CpuStep<'_>, residual: &mut Vec<f32>, addend: &Vec<f32>) {
        let values = step.tokens() * self.config.hidden;
        ops::add(&self.pool, &mut residual[..values], &addend[..values]);
    }

    fn linear<const N: usize>(
        &mut self,
        rows: Rows,
        step: &CpuStep<'_>,
        input: &Vec<f32>,
        products: [(&PackedMatrix, &mut Vec<f32>); N],
    ) {
        let count = step.count(rows);
        let values = count * products[0].0.inputs();
        self.multiply(&input[..values], products.map(|(matrix, out)| (matrix, &mut out[..count * matrix.rows()])));
    }

    fn add_bias(&mut self, step: &CpuStep<'_>, values: &mut Vec<f32>, bias: &Vec<f32>) {
        for token in values[..step.tokens() * bias.len()].chunks_exact_mut(bias.len()) {
            token.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
    }

    fn head_norm(&mut self, step: &CpuStep<'_>, heads: Heads, values: &mut Vec<f32>, weight: &Vec<f32>) {
        let width = match heads {
            Heads::Query => self.config.query_width(),
            Heads::Key => self.config.kv_width(),
        };
        let values = &mut values[..step.tokens() * width];
        self.scratch.clear();
        self.scratch.extend_from_slice(values);
        ops::rms_norm(&self.pool, &self.scratch, weight, self.config.norm_epsilon, values);
    }

    fn rope(&mut self, step: &CpuStep<'_>, layer: usize, query: &mut Vec<f32>, key: &mut Vec<f32>) {
        let (pairing, head_dim) = (self.config.rope.pairing, self.config.head_dim);
        let table = &self.ropes[self.config.rope_index(layer)];
        for (values, width) in [(query, self.config.query_width()), (key, self.config.kv_width())] {
            let values = &mut values[..step.tokens() * width];
            ops::rope(&self.pool, table, pairing, step.batch.positions(), head_dim, values);
        }
    }

    fn append_kv(&mut self, step: &CpuStep<'_>, layer: usize, key: &Vec<f32>, value: &Vec<f32>) {
        let values = step.tokens() * self.config.kv_width();
        let KvPlace { group, index } = self.kv_layers.place(layer);
        ops::append_kv(&self.pool, &mut self.cache, index, &step.rows[group], &key[..values], &value[..values]);
    }

    fn attention(&mut self, step: &CpuStep<'_>, layer: usize, query: &Vec<f32>, out: &mut Vec<f32>) {
        let values = step.tokens() * self.config.query_width();
        let (query, out) = (&query[..values], &mut out[..values]);
        let DecoderConfig { attention_scale, attention_soft_cap, heads, .. } = self.config;
        let scoring =
            Scoring { scale: attention_scale, soft_cap: attention_soft_cap, window: self.config.window(layer) };
        let KvPlace { group, index } = self.kv_layers.place(layer);
        ops::paged_attention(&self.pool, &self.cache, index, heads, scoring, &step.rows[group], query, out);
    }

    fn activate(&mut self, step: &CpuStep<'_>, gate: &Vec<f32>, up: &Vec<f32>, out: &mut Vec<f32>) {
        let values = step.tokens() * self.config.feed_forward;
        self.gate(&gate[..values], &up[..values], &mut out[..values]);
    }

    fn mix_experts(&mut self, step: &CpuStep<'_>, experts: &Experts<CpuBackend>, work: &mut Workspace<CpuBackend>) {
        self.mix(step.tokens(), experts, work);
    }

    fn cap_logits(&mut self, step: &CpuStep<'_>, logits: &mut Vec<f32>) {
        if let Some(cap) = self.config.logit_soft_cap {
            let values = step.count(Rows::LogitTokens) * self.place.vocabulary.len();
            ops::soft_cap(&self.pool, cap, &mut logits[..values]);
        }
    }

    fn all_reduce(&mut self, step: &CpuStep<'_>, values: &mut Vec<f32>) {
        self.place.member.all_reduce(&self.pool, &mut values[..step.tokens() * self.config.hidden]);
    }

    fn gather_logits(&mut self, step: &CpuStep<'_>, logits: &mut Vec<f32>) {
        let Place { member, vocabulary } = &mut self.place;
        member.gather_columns(step.count(Rows::LogitTokens), vocabulary.len(), logits);
    }

    fn leave(&self, why: &str) {
        self.place.member.leave(why);
    }

    fn write(&mut self, values: &[f32], buffer: &mut Vec<f32>) {
        buffer[..values.len()].copy_from_slice(values);
    }

    fn read(&self, buffer: &Vec<f32>, values: usize) -> Vec<f32> {
        buffer[..values].to_vec()
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) {
        self.cache.copy_block(from.0 as usize, to.0 as usize);
    }

    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SlotId) -> io::Result<()> {
        tier.store(slot.0 as usize, &self.cache.block_bytes(block.0 as usize))
    }

    fn load_block(&mut self, tier: &mut dyn Tier, slot: SlotId, block: BlockId) -> io::Result<()> {
        tier.load(slot.0 as usize, &mut self.cache.block_bytes_mut(block.0 as usize))
    }

    fn move_tokens(&mut self, moves: &[TokenMove]) {
        for TokenMove { from, to } in moves {
            self.cache.move_token((from.0.0 as usize, from.1), (to.0.0 as usize, to.1));
        }
    }

    fn sample(&mut self, logits: &mut Vec<f32>, tasks: &[RowTask<'_>]) -> Vec<Result<Drawn, SampleError>> {
        type Slot<'a> = Mutex<(&'a mut [f32], Result<Drawn, SampleError>)>;
        let rows = logits.chunks_exact_mut(self.config.vocabulary).take(tasks.len());
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
