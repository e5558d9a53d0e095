//! The blocks of a decoder on a GPU: each issues its kernels in order.

use half::bf16;
use windlass_engine_core::executor::Geometry;
use windlass_kernels::cuda::ops::{
    self, AttentionShape, Gate, GateLayout, Heads, Output, PeerRank, Placement, Places, Rotation,
};
use windlass_kernels::cuda::{Device, DriverError, Matrix, Memory, Stream, View, ViewMut};

use super::cache::{Cache, CacheShape, PageType};
use super::experts;
use super::input::{Gates, Input, Norm};
use super::inputs::{InputRoom, ProductChoices};
use super::metadata::{Metadata, StepCounts, StepSizes};
use super::weights::{CudaWeights, ExpertWeights, GatedWeights};
use super::workspace::Workspace;
use crate::config::{Activation, DecoderConfig, RopeConfig};
use crate::decoder::kv_layers::KvLayers;
use crate::decoder::{Attention, Backend, Layer, Layout};

/// The GPU of a decoder or of a rank: what the kernels of a step read and write besides weights.
#[derive(Debug)]
pub(super) struct CudaBackend {
    pub config: DecoderConfig,
    /// One table for each of the configuration's `ropes`.
    ropes: Vec<Rope>,
    pub metadata: Metadata,
    work: Workspace,
    kv_layers: KvLayers,
    pub cache: Cache,
    /// `None` unless the decoder is divided among ranks.
    pub exchange: Option<Exchange>,
}

/// A step whose metadata is on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct CudaStep<'a> {
    pub counts: StepCounts,
    /// The stream that its kernels are issued on.
    pub stream: &'a Stream,
}

/// The link of a rank to the other ranks of its group.
#[derive(Debug)]
pub(super) struct Exchange {
    /// Adds up the results of the ranks.
    pub peer: PeerRank,
    /// Index of this rank.
    pub rank: usize,
    /// The first token id whose embedding this rank has.
    pub first_token: usize,
}

/// A rotary embedding.
#[derive(Debug)]
struct Rope {
    /// Cosine and sine of every pair, for each position.
    table: Memory<f32>,
    /// Number of rotated pairs of values in a head.
    pairs: usize,
}

impl Rope {
    /// Makes the table for sequences of up to `longest` tokens.
    fn new(device: &Device, rope: &RopeConfig, longest: usize) -> Result<Rope, DriverError> {
        let pairs = rope.dims / 2;
        let table = ops::rope_table(pairs, longest, rope.theta, rope.factors_for(longest), rope.magnitude);
        Ok(Rope { table: device.upload(&table)?, pairs })
    }
}

/// The shape of the KV cache of a decoder.
pub(super) fn cache_shape(config: &DecoderConfig, geometry: &Geometry, kind: PageType) -> CacheShape {
    let layers = KvLayers::new(config, &geometry.groups).per_block;
    CacheShape { kind, heads: heads(config), layers, blocks: geometry.blocks as usize }
}

/// The sizes of the steps of a decoder, or of a stage with or without a head.
pub(super) fn step_sizes(config: &DecoderConfig, has_head: bool, geometry: &Geometry) -> StepSizes {
    let Geometry { blocks, max_sequence_tokens, max_step_rows, max_step_tokens, max_step_logits, groups, .. } =
        *geometry;
    StepSizes {
        tokens: max_step_tokens as usize,
        rows: max_step_rows as usize,
        logits: if has_head { max_step_logits as usize } else { 0 },
        longest: max_sequence_tokens as usize,
        trash_page: blocks,
        groups: groups.count() as usize,
        heads: heads(config),
    }
}

fn heads(config: &DecoderConfig) -> Heads {
    Heads { heads: config.heads, kv_heads: config.kv_heads, dim: config.head_dim }
}

impl CudaBackend {
    pub fn new(
        device: &Device,
        config: DecoderConfig,
        (weights, choices): (&CudaWeights, &ProductChoices),
        exchange: Option<Exchange>,
        geometry: &Geometry,
        cache: Cache,
    ) -> Result<CudaBackend, DriverError> {
        let sizes = step_sizes(&config, weights.head.is_some(), geometry);
        let ropes = config.ropes().map(|rope| Rope::new(device, rope, sizes.longest));
        Ok(CudaBackend {
            ropes: ropes.collect::<Result<_, _>>()?,
            metadata: Metadata::new(device, sizes)?,
            work: Workspace::new(device, &config, (weights, choices), &sizes)?,
            cache,
            kv_layers: KvLayers::new(&config, &geometry.groups),
            config,
            exchange,
        })
    }

    /// Where a stage that is not the first reads the activations of `tokens` tokens.
    pub fn entry(&mut self, tokens: usize) -> ViewMut<'_, f32> {
        self.work.residual.slice_mut(0..tokens * self.config.hidden)
    }

    /// The activations `[tokens, hidden]` of the last step after the last layer.
    pub fn activations(&self, tokens: usize) -> View<'_, f32> {
        self.work.residual.slice(0..tokens * self.config.hidden)
    }

    /// The first `rows` rows of logits of the last step.
    pub fn logits(&self, rows: usize) -> View<'_, f32> {
        self.work.logits.slice(0..rows * self.config.vocabulary)
    }

    /// The first `rows` rows of logits of the last step, mutable.
    pub fn logits_mut(&mut self, rows: usize) -> ViewMut<'_, f32> {
        self.work.logits.slice_mut(0..rows * self.config.vocabulary)
    }
}

impl Layout for CudaBackend {
    type Matrix = Matrix;
    type Vector = Memory<f32>;
    type Qkv = Matrix;
    type Gated = GatedWeights;
    type Experts = ExpertWeights;
}

/// Calls issue kernels; the results are there when the stream has run them.
impl Backend for CudaBackend {
    type Step<'a> = CudaStep<'a>;
    type Error = DriverError;

    fn has_logits(step: &CudaStep<'_>) -> bool {
        step.counts.logits > 0
    }

    fn embed(&mut self, step: &CudaStep<'_>, table: &Matrix) -> Result<(), DriverError> {
        let (tokens, scale) = (self.metadata.tokens(), self.config.embedding_scale);
        let out = residual(&mut self.work.residual, step, &self.config);
        let Some(Exchange { peer, first_token, .. }) = &mut self.exchange else {
            return ops::embed(step.stream, tokens, table, 0, scale, out);
        };
        ops::embed(step.stream, tokens, table, *first_token, scale, peer.floats(out.len()))?;
        peer.reduce_floats(step.stream, out)
    }

    fn project_qkv(
        &mut self,
        step: &CudaStep<'_>,
        index: usize,
        layer: &Layer<CudaBackend>,
        attention: &Attention<CudaBackend>,
    ) -> Result<(), DriverError> {
        let CudaBackend { config, ropes, metadata, work, kv_layers, cache, .. } = self;
        let (heads, location) = (heads(config), kv_layers.location(index));
        let Workspace { residual, normed, projected, query, inputs, .. } = work;
        let input = Input::Norm(norm(residual, &layer.mixer_norm, step, config), normed);
        let width = step.counts.tokens * heads.projected_width();
        inputs.multiply(step.stream, &attention.qkv, input, Output::Bf16(projected.slice_mut(0..width)))?;
        let places = Places { positions: metadata.positions(), slots: metadata.slots(location.group) };
        let query = query.slice_mut(0..step.counts.tokens * heads.query_width());
        let placement = placement(attention, config, &ropes[config.rope_index(index)]);
        let pages = cache.pages_mut(location.index);
        ops::place_heads(step.stream, heads, placement, projected.slice(0..width), places, query, pages)
    }

    /// Attends in up to three launches: rows of one token, split over their keys; rows of several tokens, in tiles; and
    /// tiles of rows whose draft tokens branch.
    fn attend(&mut self, step: &CudaStep<'_>, index: usize) -> Result<(), DriverError> {
        let CudaBackend { config, metadata, work, kv_layers, cache, .. } = self;
        let (shape, location) = (attention_shape(config, index), kv_layers.location(index));
        let (counts, stream) = (step.counts, step.stream);
        let values = counts.tokens * config.query_width();
        let Workspace { query, attended, splits, .. } = work;
        let (query, pages, out) = (query.slice(0..values), cache.pages(location.index), 0..values);
        if counts.decodes > 0 {
            let rows = metadata.decode_rows(location.group);
            ops::attention_decode(stream, &shape, rows, query, pages, splits, attended.slice_mut(out.clone()))?;
        }
        if counts.tiles > 0 {
            let chunks = metadata.chunks(location.group);
            ops::attention_prefill(stream, &shape, chunks, query, pages, attended.slice_mut(out.clone()))?;
        }
        // They have a launch of their own because a faster kernel may compute the rows that do not branch.
        if counts.branching_tiles > 0 {
            let chunks = metadata.branching(location.group);
            ops::attention_prefill(stream, &shape, chunks, query, pages, attended.slice_mut(out))?;
        }
        Ok(())
    }

    fn project_out(
        &mut self,
        step: &CudaStep<'_>,
        layer: &Layer<CudaBackend>,
        attention: &Attention<CudaBackend>,
    ) -> Result<(), DriverError> {
        let CudaBackend { config, work, exchange, .. } = self;
        let Workspace { residual: sums, normed, attended, inputs, .. } = work;
        let attended = attended.slice(0..step.counts.tokens * config.query_width());
        let norm = layer.post_mixer_norm.as_ref().map(|norm| (norm, normed));
        let residual = residual(sums, step, config);
        let product = |out: Output<'_>| inputs.multiply(step.stream, &attention.out, Input::Values(attended), out);
        add_product(step.stream, config, exchange, product, norm, residual)
    }

    fn feed_forward(
        &mut self,
        step: &CudaStep<'_>,
        layer: &Layer<CudaBackend>,
        gated: &GatedWeights,
    ) -> Result<(), DriverError> {
        let CudaBackend { config, work, exchange, .. } = self;
        let Workspace { residual: sums, normed, gate_up, gated: room, inputs, .. } = work;
        let input = Input::Norm(norm(sums, &layer.feed_forward_norm, step, config), normed);
        let values = gate_product(step.stream, gate(config), gated, input, inputs, gate_up, room)?;
        let norm = layer.post_feed_forward_norm.as_ref().map(|norm| (norm, normed));
        let residual = residual(sums, step, config);
        let product = |out: Output<'_>| inputs.multiply(step.stream, &gated.down, values, out);
        add_product(step.stream, config, exchange, product, norm, residual)
    }

    fn mix_experts(
        &mut self,
        step: &CudaStep<'_>,
        layer: &Layer<CudaBackend>,
        experts: &ExpertWeights,
    ) -> Result<(), DriverError> {
        let CudaBackend { config, work, exchange, .. } = self;
        let Workspace { residual, normed, .. } = &mut *work;
        let out = normed.slice_mut(0..step.counts.tokens * config.hidden);
        norm(residual, &layer.feed_forward_norm, step, config).compute(step.stream, out)?;
        experts::mix(step, config, experts, layer.post_feed_forward_norm.as_ref(), work, exchange)
    }

    fn head(&mut self, step: &CudaStep<'_>, norm: &Memory<f32>, output: &Matrix) -> Result<(), DriverError> {
        let CudaBackend { config, metadata, work, exchange, .. } = self;
        let (hidden, rows, stream) = (config.hidden, step.counts.logits, step.stream);
        let Workspace { residual, picked, picked_normed, logits, inputs, .. } = work;
        let (all, values) = (residual.slice(0..step.counts.tokens * hidden), rows * hidden);
        ops::gather_rows(stream, metadata.logit_tokens(), all, hidden, picked.slice_mut(0..values))?;
        let normed = picked_normed.slice_mut(0..values);
        ops::rms_norm(stream, picked.slice(0..values), norm.view(), config.norm_epsilon, normed)?;
        let (normed, values) = (picked_normed.slice(0..values), rows * config.vocabulary);
        match exchange {
            None => inputs.multiply_head(stream, output, normed, Output::F32(logits.slice_mut(0..values)))?,
            Some(Exchange { peer, .. }) => {
                inputs.multiply_head(stream, output, normed, Output::F32(peer.columns(rows)))?;
                peer.gather_columns(stream, logits.slice_mut(0..values))?;
            }
        }
        match config.logit_soft_cap {
            Some(cap) => ops::soft_cap(stream, cap, logits.slice_mut(0..values)),
            None => Ok(()),
        }
    }
}

/// The residual stream of a step's tokens.
fn residual<'a>(memory: &'a mut Memory<f32>, step: &CudaStep<'_>, config: &DecoderConfig) -> ViewMut<'a, f32> {
    memory.slice_mut(0..step.counts.tokens * config.hidden)
}

/// A norm of the residual stream of a step's tokens.
fn norm<'a>(
    residual: &'a Memory<f32>,
    weight: &'a Memory<f32>,
    step: &CudaStep<'_>,
    config: &DecoderConfig,
) -> Norm<'a> {
    let residual = residual.slice(0..step.counts.tokens * config.hidden);
    Norm { residual, weight: weight.view(), epsilon: config.norm_epsilon }
}

/// Computes `activation(gate · input) · (up · input)` for each token: the input of the down projection. If the product
/// applies the gate, the result is in `gated`; else gates and ups are in `gate_up`, and the next product applies the
/// gate.
pub(super) fn gate_product<'a>(
    stream: &Stream,
    gate: Gate,
    weights: &GatedWeights,
    input: Input<'_>,
    inputs: &mut InputRoom,
    gate_up: &'a mut Memory<bf16>,
    gated: &'a mut Memory<bf16>,
) -> Result<Input<'a>, DriverError> {
    let (tokens, width) = (input.len() / weights.gate_up.inputs(), weights.down.inputs());
    let (matrix, facts, out) = (&weights.gate_up, stream.device().facts(), 0..tokens * width);
    if weights.layout == GateLayout::Eights && inputs.gates(facts, matrix, tokens) {
        inputs.multiply(stream, matrix, input, Output::Gated(gated.slice_mut(out.clone()), gate))?;
        Ok(Input::Values(gated.slice(out)))
    } else {
        let both = 0..2 * tokens * width;
        inputs.multiply(stream, matrix, input, Output::Bf16(gate_up.slice_mut(both.clone())))?;
        Ok(Input::Gates(Gates { gate, layout: weights.layout, gate_up: gate_up.slice(both), width }, gated))
    }
}

/// Computes `residual += product`, or `residual += norm(product)` with a norm, summed over the ranks. `product` writes
/// to the output that it is given. The buffer beside the norm holds the product until it is normed.
pub(super) fn add_product(
    stream: &Stream,
    config: &DecoderConfig,
    exchange: &mut Option<Exchange>,
    product: impl FnOnce(Output<'_>) -> Result<(), DriverError>,
    norm: Option<(&Memory<f32>, &mut Memory<bf16>)>,
    residual: ViewMut<'_, f32>,
) -> Result<(), DriverError> {
    let values = residual.len();
    match (exchange, norm) {
        (None, None) => product(Output::AddTo(residual)),
        (None, Some((norm, room))) => {
            product(Output::Bf16(room.slice_mut(0..values)))?;
            ops::add_normed(stream, residual, room.slice(0..values), norm.view(), config.norm_epsilon)
        }
        (Some(Exchange { peer, .. }), None) => {
            product(Output::Bf16(peer.part(values)))?;
            peer.add_reduced(stream, residual)
        }
        (Some(Exchange { peer, .. }), Some((norm, room))) => {
            product(Output::Bf16(peer.part(values)))?;
            peer.reduce(stream, room.slice_mut(0..values))?;
            ops::add_normed(stream, residual, room.slice(0..values), norm.view(), config.norm_epsilon)
        }
    }
}

/// The parameters of a layer's attention.
fn attention_shape(config: &DecoderConfig, layer: usize) -> AttentionShape {
    AttentionShape {
        heads: heads(config),
        scale: config.attention_scale,
        // A window that does not fit u32 is longer than any sequence.
        window: config.window(layer).map_or(0, |window| u32::try_from(window).unwrap_or(0)),
        cap: config.attention_soft_cap.unwrap_or(0.0),
    }
}

pub(super) fn gate(config: &DecoderConfig) -> Gate {
    match config.activation {
        Activation::Silu => Gate::Silu,
        Activation::GeluTanh => Gate::GeluTanh,
    }
}

/// The operations on a layer's heads after projection: biases, norms and rotation.
fn placement<'a>(attention: &'a Attention<CudaBackend>, config: &DecoderConfig, rope: &'a Rope) -> Placement<'a> {
    let rotation = Rotation { table: rope.table.view(), pairs: rope.pairs, pairing: config.rope.pairing };
    Placement {
        bias: attention.bias.as_ref().map(Memory::view),
        norms: attention.head_norms.as_ref().map(|norms| norms.each_ref().map(Memory::view)),
        epsilon: config.norm_epsilon,
        rotation: attention.is_rotary.then_some(rotation),
    }
}
