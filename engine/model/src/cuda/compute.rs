//! The kernels of a step, in their order.

use half::bf16;
use windlass_engine_core::executor::Geometry;
use windlass_kernels::cuda::ops::{
    self, AttentionShape, Gate, GateLayout, Heads, Output, Pages, PagesMut, PeerRank, Placement, Places, Rotation,
};
use windlass_kernels::cuda::{Device, DriverError, Matrix, Memory, Stream, View, ViewMut};

use super::cache::{Cache, CacheShape, PageType};
use super::experts;
use super::input::{Gates, Input, Norm};
use super::inputs::InputRoom;
use super::metadata::{Metadata, StepCounts, StepSizes};
use super::weights::{FeedForwardWeights, GatedWeights, HeadWeights, LayerWeights, Weights};
use super::workspace::Workspace;
use crate::config::{Activation, DecoderConfig, RopeConfig};
use crate::kv_layers::KvLayers;

/// What a step's kernels read and write.
#[derive(Debug)]
pub(super) struct Compute {
    pub config: DecoderConfig,
    weights: Weights,
    /// One for each of the configuration's `ropes`.
    ropes: Vec<Rope>,
    pub metadata: Metadata,
    work: Workspace,
    kv_layers: KvLayers,
    pub cache: Cache,
    /// Absent where the decoder is whole.
    exchange: Option<Exchange>,
}

/// What a rank has of the group whose ranks hold a decoder together.
#[derive(Debug)]
pub(super) struct Exchange {
    /// Adds up what the ranks compute.
    pub peer: PeerRank,
    /// The first token whose embedding this rank holds.
    pub first_token: usize,
}

/// A rotary embedding.
#[derive(Debug)]
struct Rope {
    /// Cosine and sine of every pair, for each position.
    table: Memory<f32>,
    /// Pairs that turn.
    pairs: usize,
}

impl Rope {
    /// For sequences of up to `longest` tokens.
    fn new(device: &Device, rope: &RopeConfig, longest: usize) -> Result<Rope, DriverError> {
        let pairs = rope.dims / 2;
        let table = ops::rope_table(pairs, longest, rope.theta, rope.factors_for(longest), rope.magnitude);
        Ok(Rope { table: device.upload(&table)?, pairs })
    }
}

/// How large the cache of a decoder is.
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

impl Compute {
    pub fn new(
        device: &Device,
        config: DecoderConfig,
        weights: Weights,
        exchange: Option<Exchange>,
        geometry: &Geometry,
        cache: Cache,
    ) -> Result<Compute, DriverError> {
        let sizes = step_sizes(&config, weights.head.is_some(), geometry);
        let ropes = config.ropes().map(|rope| Rope::new(device, rope, sizes.longest));
        Ok(Compute {
            ropes: ropes.collect::<Result<_, _>>()?,
            metadata: Metadata::new(device, sizes)?,
            work: Workspace::new(device, &config, &weights, &sizes)?,
            weights,
            cache,
            kv_layers: KvLayers::new(&config, &geometry.groups),
            config,
            exchange,
        })
    }

    /// Whether tokens are embedded here.
    pub fn embeds(&self) -> bool {
        self.weights.embedding().is_some()
    }

    /// Whether logits are computed here.
    pub fn has_head(&self) -> bool {
        self.weights.head.is_some()
    }

    /// Where the activations of so many tokens begin, in a stage that others come before.
    pub fn entry(&mut self, tokens: usize) -> ViewMut<'_, f32> {
        self.work.residual.slice_mut(0..tokens * self.config.hidden)
    }

    /// What the layers gave for the first tokens of the last step.
    pub fn activations(&self, tokens: usize) -> View<'_, f32> {
        self.work.residual.slice(0..tokens * self.config.hidden)
    }

    /// The first rows of logits that the last step left.
    pub fn logits(&self, rows: usize) -> View<'_, f32> {
        self.work.logits.slice(0..rows * self.config.vocabulary)
    }

    /// The same, to change.
    pub fn logits_mut(&mut self, rows: usize) -> ViewMut<'_, f32> {
        self.work.logits.slice_mut(0..rows * self.config.vocabulary)
    }

    /// Issues every kernel of the step whose numbers are on the device, and whose activations are where there is a stage
    /// before.
    pub fn issue(&mut self, step: &StepCounts, stream: &Stream) -> Result<(), DriverError> {
        let Compute { config, weights, ropes, metadata, work, kv_layers, cache, exchange } = self;
        let mut kernels = Kernels { config, ropes, metadata, work, exchange, step, stream };
        if let Some(table) = weights.embedding() {
            kernels.embed(table)?;
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            let place = kv_layers.place(index);
            kernels.project_qkv(index, layer, place.group, cache.pages_mut(place.index))?;
            kernels.attend(index, place.group, cache.pages(place.index))?;
            kernels.project_out(layer)?;
            kernels.feed_forward(layer)?;
        }
        match weights.head.as_ref().filter(|_| step.logits > 0) {
            Some(HeadWeights { norm, output }) => kernels.head(norm, output),
            None => Ok(()),
        }
    }
}

/// A step while its kernels are issued.
struct Kernels<'a> {
    config: &'a DecoderConfig,
    ropes: &'a [Rope],
    metadata: &'a Metadata,
    work: &'a mut Workspace,
    exchange: &'a mut Option<Exchange>,
    step: &'a StepCounts,
    stream: &'a Stream,
}

impl Kernels<'_> {
    fn embed(&mut self, table: &Matrix) -> Result<(), DriverError> {
        let (tokens, scale) = (self.metadata.tokens(), self.config.embedding_scale);
        let out = residual(&mut self.work.residual, self.step, self.config);
        let Some(Exchange { peer, first_token }) = self.exchange else {
            return ops::embed(self.stream, tokens, table, 0, scale, out);
        };
        ops::embed(self.stream, tokens, table, *first_token, scale, peer.floats(out.len()))?;
        peer.reduce_floats(self.stream, out)
    }

    /// Norm, q, k and v, bias, norm and rotation of heads, and the append to the pages.
    fn project_qkv(
        &mut self,
        index: usize,
        layer: &LayerWeights,
        group: usize,
        pages: PagesMut<'_>,
    ) -> Result<(), DriverError> {
        let (tokens, heads) = (self.step.tokens, heads(self.config));
        let Workspace { residual, normed, projected, query, inputs, .. } = &mut *self.work;
        let input = Input::Norm(norm(residual, &layer.attention_norm, self.step, self.config), normed);
        let width = tokens * heads.projected_width();
        inputs.multiply(self.stream, &layer.qkv, input, Output::Bf16(projected.slice_mut(0..width)))?;
        let (positions, slots) = (self.metadata.positions(), self.metadata.slots(group));
        let places = Places { positions, slots };
        let query = query.slice_mut(0..tokens * heads.query_width());
        let placement = placement(layer, self.config, &self.ropes[self.config.rope_index(index)]);
        ops::place_heads(self.stream, heads, placement, projected.slice(0..width), places, query, pages)
    }

    /// Rows of one token, split over their keys, and rows of several, in tiles, with those whose guesses branch behind.
    fn attend(&mut self, index: usize, group: usize, pages: Pages<'_>) -> Result<(), DriverError> {
        let shape = attention(self.config, index);
        let values = self.step.tokens * self.config.query_width();
        let Workspace { query, attended, splits, .. } = &mut *self.work;
        let query = query.slice(0..values);
        if self.step.decodes > 0 {
            let rows = self.metadata.decode_rows(group);
            ops::attention_decode(self.stream, &shape, rows, query, pages, splits, attended.slice_mut(0..values))?;
        }
        if self.step.tiles > 0 {
            let chunks = self.metadata.chunks(group);
            ops::attention_prefill(self.stream, &shape, chunks, query, pages, attended.slice_mut(0..values))?;
        }
        // By themselves: another kernel computes them, where there is one for the others alone.
        if self.step.branching_tiles > 0 {
            let chunks = self.metadata.branching(group);
            ops::attention_prefill(self.stream, &shape, chunks, query, pages, attended.slice_mut(0..values))?;
        }
        Ok(())
    }

    /// Output projection and residual.
    fn project_out(&mut self, layer: &LayerWeights) -> Result<(), DriverError> {
        let Workspace { residual: sums, normed, attended, inputs, .. } = &mut *self.work;
        let attended = attended.slice(0..self.step.tokens * self.config.query_width());
        let norm = layer.post_attention_norm.as_ref().map(|norm| (norm, normed));
        let residual = residual(sums, self.step, self.config);
        let product = |out: Output<'_>| inputs.multiply(self.stream, &layer.out, Input::Values(attended), out);
        add_product(self.stream, self.config, self.exchange, product, norm, residual)
    }

    /// Norm, gate and up, activation, down, residual; or those of a few experts.
    fn feed_forward(&mut self, layer: &LayerWeights) -> Result<(), DriverError> {
        match &layer.feed_forward {
            FeedForwardWeights::Dense(gated) => self.gated(gated, layer),
            FeedForwardWeights::Experts(weights) => {
                let Workspace { residual, normed, .. } = &mut *self.work;
                let out = normed.slice_mut(0..self.step.tokens * self.config.hidden);
                norm(residual, &layer.feed_forward_norm, self.step, self.config).compute(self.stream, out)?;
                experts::mix(self.stream, weights, gate(self.config), self.step.tokens, self.work, self.exchange)
            }
        }
    }

    fn gated(&mut self, weights: &GatedWeights, layer: &LayerWeights) -> Result<(), DriverError> {
        let Workspace { residual: sums, normed, gate_up, gated, inputs, .. } = &mut *self.work;
        let input = Input::Norm(norm(sums, &layer.feed_forward_norm, self.step, self.config), normed);
        let gated = gate_product(self.stream, gate(self.config), weights, input, inputs, gate_up, gated)?;
        let norm = layer.post_feed_forward_norm.as_ref().map(|norm| (norm, normed));
        let residual = residual(sums, self.step, self.config);
        let product = |out: Output<'_>| inputs.multiply(self.stream, &weights.down, gated, out);
        add_product(self.stream, self.config, self.exchange, product, norm, residual)
    }

    /// Final norm and logits of the tokens that get them.
    fn head(&mut self, norm: &Memory<f32>, output: &Matrix) -> Result<(), DriverError> {
        let (hidden, rows) = (self.config.hidden, self.step.logits);
        let Workspace { residual, picked, picked_normed, logits, inputs, .. } = &mut *self.work;
        let (all, values) = (residual.slice(0..self.step.tokens * hidden), rows * hidden);
        let tokens = self.metadata.logit_tokens();
        ops::gather_rows(self.stream, tokens, all, hidden, picked.slice_mut(0..values))?;
        let normed = picked_normed.slice_mut(0..values);
        ops::rms_norm(self.stream, picked.slice(0..values), norm.view(), self.config.norm_epsilon, normed)?;
        let (normed, values) = (picked_normed.slice(0..values), rows * self.config.vocabulary);
        match self.exchange {
            None => inputs.multiply_head(self.stream, output, normed, Output::F32(logits.slice_mut(0..values)))?,
            Some(Exchange { peer, .. }) => {
                inputs.multiply_head(self.stream, output, normed, Output::F32(peer.columns(rows)))?;
                peer.gather_columns(self.stream, logits.slice_mut(0..values))?;
            }
        }
        match self.config.logit_soft_cap {
            Some(cap) => ops::soft_cap(self.stream, cap, logits.slice_mut(0..values)),
            None => Ok(()),
        }
    }
}

/// The residual stream of a step's tokens.
fn residual<'a>(memory: &'a mut Memory<f32>, step: &StepCounts, config: &DecoderConfig) -> ViewMut<'a, f32> {
    memory.slice_mut(0..step.tokens * config.hidden)
}

/// A norm of theirs.
fn norm<'a>(residual: &'a Memory<f32>, weight: &'a Memory<f32>, step: &StepCounts, config: &DecoderConfig) -> Norm<'a> {
    let residual = residual.slice(0..step.tokens * config.hidden);
    Norm { residual, weight: weight.view(), epsilon: config.norm_epsilon }
}

/// `activation(gate · input) · (up · input)` for each token: what goes down. It lies in `gated` where the product gates; else gates
/// and ups lie in `gate_up`.
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

/// `residual += product`, added up over the ranks; `product` goes where it is told. With a norm it is normed before it is added:
/// the room beside that holds it until then.
fn add_product(
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

/// What a layer's attention computes.
fn attention(config: &DecoderConfig, layer: usize) -> AttentionShape {
    AttentionShape {
        heads: heads(config),
        scale: config.attention_scale,
        // No sequence is longer than positions count.
        window: config.window(layer).map_or(0, |window| u32::try_from(window).unwrap_or(0)),
        cap: config.attention_soft_cap.unwrap_or(0.0),
    }
}

fn gate(config: &DecoderConfig) -> Gate {
    match config.activation {
        Activation::Silu => Gate::Silu,
        Activation::GeluTanh => Gate::GeluTanh,
    }
}

/// What is done to a layer's heads.
fn placement<'a>(layer: &'a LayerWeights, config: &DecoderConfig, rope: &'a Rope) -> Placement<'a> {
    let rotation = Rotation { table: rope.table.view(), pairs: rope.pairs, pairing: config.rope.pairing };
    Placement {
        bias: layer.biases.as_ref().map(Memory::view),
        norms: layer.head_norms.as_ref().map(|norms| norms.each_ref().map(Memory::view)),
        epsilon: config.norm_epsilon,
        rotation: layer.rotary.then_some(rotation),
    }
}
