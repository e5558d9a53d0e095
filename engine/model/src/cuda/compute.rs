//! The kernels of a step, in their order.

use half::bf16;
use windlass_engine_core::executor::Geometry;
use windlass_kernels::cuda::ops::{
    self, AttentionShape, DecodeWork, Heads, Output, Pages, PagesMut, Placement, Places, Rotation,
};
use windlass_kernels::cuda::{Device, DriverError, Matrix, Memory, Stream, View, ViewMut};

use super::metadata::{Metadata, StepCounts, StepSizes};
use super::weights::{LayerWeights, Weights};
use super::workspace::Workspace;
use crate::config::DecoderConfig;

/// What a step's kernels read and write.
#[derive(Debug)]
pub(super) struct Compute {
    pub config: DecoderConfig,
    weights: Weights,
    /// Cosine and sine of every pair, for each position.
    rope: Memory<f32>,
    pub metadata: Metadata,
    work: Workspace,
    /// Absent while its memory is given back.
    pub cache: Option<Cache>,
}

/// Keys and values, `[layer][page][K|V][kv_head][64][dim]`.
#[derive(Debug)]
pub(super) struct Cache {
    values: Memory<bf16>,
    /// Values of a layer's pages.
    layer: usize,
    /// Values of a page.
    page: usize,
    layers: usize,
}

impl Cache {
    /// Pages for so many blocks, and one more that padded rows write to.
    pub fn new(device: &Device, config: &DecoderConfig, blocks: u32) -> Result<Cache, DriverError> {
        let (page, layers) = (heads(config).page_values(), config.layers);
        let layer = (blocks as usize + 1) * page;
        Ok(Cache { values: device.allocate(layers * layer)?, layer, page, layers })
    }

    /// Copies a page in all layers.
    pub fn copy(&mut self, from: usize, to: usize, stream: &Stream) -> Result<(), DriverError> {
        let &mut Cache { layer, page, layers, .. } = self;
        (0..layers).try_for_each(|index| {
            let [from, to] = [from, to].map(|at| index * layer + at * page);
            stream.copy_within(self.values.view_mut(), from..from + page, to)
        })
    }

    fn pages(&self, index: usize) -> Pages<'_> {
        Pages::Bf16(self.values.slice(index * self.layer..(index + 1) * self.layer))
    }

    fn pages_mut(&mut self, index: usize) -> PagesMut<'_> {
        PagesMut::Bf16(self.values.slice_mut(index * self.layer..(index + 1) * self.layer))
    }
}

/// The sizes of a decoder's steps.
pub(super) fn step_sizes(config: &DecoderConfig, geometry: &Geometry) -> StepSizes {
    let Geometry { blocks, max_sequence_tokens, max_step_rows, max_step_tokens, max_step_logits, .. } = *geometry;
    StepSizes {
        tokens: max_step_tokens as usize,
        rows: max_step_rows as usize,
        logits: max_step_logits as usize,
        longest: max_sequence_tokens as usize,
        trash_page: blocks,
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
        geometry: &Geometry,
    ) -> Result<Compute, DriverError> {
        let (sizes, rope) = (step_sizes(&config, geometry), &config.rope);
        let table = ops::rope_table(rope.dims / 2, sizes.longest, rope.theta, rope.factors.as_deref());
        Ok(Compute {
            weights,
            rope: device.upload(&table)?,
            metadata: Metadata::new(device, sizes)?,
            work: Workspace::new(device, &config, &sizes)?,
            cache: Some(Cache::new(device, &config, geometry.blocks)?),
            config,
        })
    }

    /// The first rows of logits that the last step left.
    pub fn logits(&self, rows: usize) -> View<'_, f32> {
        self.work.logits.slice(0..rows * self.config.vocabulary)
    }

    /// Issues every kernel of the step whose numbers are on the device.
    pub fn issue(&mut self, step: &StepCounts, stream: &Stream) -> Result<(), DriverError> {
        let Compute { config, weights, rope, metadata, work, cache } = self;
        let Some(cache) = cache else { return Err(DriverError::refused("a step", "the KV cache was given back")) };
        let mut kernels = Kernels { config, rope, metadata, work, step, stream };
        kernels.embed(&weights.embedding)?;
        for (index, layer) in weights.layers.iter().enumerate() {
            kernels.project_qkv(layer, cache.pages_mut(index))?;
            kernels.attend(cache.pages(index))?;
            kernels.project_out(layer)?;
            kernels.feed_forward(layer)?;
        }
        match step.logits {
            0 => Ok(()),
            _ => kernels.head(&weights.norm, weights.output()),
        }
    }
}

/// A step while its kernels are issued.
struct Kernels<'a> {
    config: &'a DecoderConfig,
    rope: &'a Memory<f32>,
    metadata: &'a Metadata,
    work: &'a mut Workspace,
    step: &'a StepCounts,
    stream: &'a Stream,
}

impl Kernels<'_> {
    fn embed(&mut self, table: &Matrix) -> Result<(), DriverError> {
        let out = self.work.residual.slice_mut(0..self.step.tokens * self.config.hidden);
        ops::embed(self.stream, self.metadata.tokens(self.step), table, out)
    }

    /// Norm, q, k and v, bias, norm and rotation of heads, and the append to the pages.
    fn project_qkv(&mut self, layer: &LayerWeights, pages: PagesMut<'_>) -> Result<(), DriverError> {
        let (tokens, heads) = (self.step.tokens, heads(self.config));
        self.norm(&layer.attention_norm)?;
        let Workspace { normed, projected, query, .. } = &mut *self.work;
        let width = tokens * heads.projected_width();
        let out = Output::Bf16(projected.slice_mut(0..width));
        ops::linear(self.stream, &layer.qkv, normed.slice(0..tokens * self.config.hidden), out)?;
        let places = Places { positions: self.metadata.positions(self.step), slots: self.metadata.slots(self.step) };
        let query = query.slice_mut(0..tokens * heads.query_width());
        let placement = placement(layer, self.config, self.rope);
        ops::place_heads(self.stream, heads, placement, projected.slice(0..width), places, query, pages)
    }

    /// Rows of one token, split over their keys, and rows of several, in tiles.
    fn attend(&mut self, pages: Pages<'_>) -> Result<(), DriverError> {
        let shape =
            AttentionShape { heads: heads(self.config), scale: self.config.attention_scale, window: 0, cap: 0.0 };
        let values = self.step.tokens * self.config.query_width();
        let Workspace { query, attended, partial, partial_log, .. } = &mut *self.work;
        let query = query.slice(0..values);
        if self.step.decodes > 0 {
            let rows = self.metadata.decode_rows(self.step);
            let splits = DecodeWork { partial: partial.view_mut(), partial_log: partial_log.view_mut() };
            ops::attention_decode(self.stream, &shape, rows, query, pages, splits, attended.slice_mut(0..values))?;
        }
        if self.step.chunks > 0 {
            let chunks = self.metadata.chunks(self.step);
            ops::attention_prefill(self.stream, &shape, chunks, query, pages, attended.slice_mut(0..values))?;
        }
        Ok(())
    }

    /// Output projection, residual, and the feed-forward block's norm.
    fn project_out(&mut self, layer: &LayerWeights) -> Result<(), DriverError> {
        let attended = self.work.attended.slice(0..self.step.tokens * self.config.query_width());
        let residual = residual(&mut self.work.residual, self.step, self.config);
        ops::linear(self.stream, &layer.out, attended, Output::AddTo(residual))?;
        self.norm(&layer.feed_forward_norm)
    }

    /// Gate and up, activation, down, residual.
    fn feed_forward(&mut self, layer: &LayerWeights) -> Result<(), DriverError> {
        let (tokens, width) = (self.step.tokens, self.config.feed_forward);
        let Workspace { residual: sums, normed, gate_up, gated, .. } = &mut *self.work;
        let out = Output::Bf16(gate_up.slice_mut(0..2 * tokens * width));
        ops::linear(self.stream, &layer.gate_up, normed.slice(0..tokens * self.config.hidden), out)?;
        ops::silu_mul(self.stream, gate_up.slice(0..2 * tokens * width), width, gated.slice_mut(0..tokens * width))?;
        let out = Output::AddTo(residual(sums, self.step, self.config));
        ops::linear(self.stream, &layer.down, gated.slice(0..tokens * width), out)
    }

    /// Final norm and logits of the tokens that get them.
    fn head(&mut self, norm: &Memory<f32>, output: &Matrix) -> Result<(), DriverError> {
        let (hidden, rows) = (self.config.hidden, self.step.logits);
        let Workspace { residual, picked, picked_normed, logits, .. } = &mut *self.work;
        let (all, values) = (residual.slice(0..self.step.tokens * hidden), rows * hidden);
        let tokens = self.metadata.logit_tokens(self.step);
        ops::gather_rows(self.stream, tokens, all, hidden, picked.slice_mut(0..values))?;
        let normed = picked_normed.slice_mut(0..values);
        ops::rms_norm(self.stream, picked.slice(0..values), norm.view(), self.config.norm_epsilon, normed)?;
        let out = Output::F32(logits.slice_mut(0..rows * self.config.vocabulary));
        ops::linear(self.stream, output, picked_normed.slice(0..values), out)
    }

    /// Norms the residual stream.
    fn norm(&mut self, weight: &Memory<f32>) -> Result<(), DriverError> {
        let values = self.step.tokens * self.config.hidden;
        let Workspace { residual, normed, .. } = &mut *self.work;
        let (residual, normed) = (residual.slice(0..values), normed.slice_mut(0..values));
        ops::rms_norm(self.stream, residual, weight.view(), self.config.norm_epsilon, normed)
    }
}

/// The residual stream of a step's tokens.
fn residual<'a>(memory: &'a mut Memory<f32>, step: &StepCounts, config: &DecoderConfig) -> ViewMut<'a, f32> {
    memory.slice_mut(0..step.tokens * config.hidden)
}

/// What is done to a layer's heads.
fn placement<'a>(layer: &'a LayerWeights, config: &DecoderConfig, table: &'a Memory<f32>) -> Placement<'a> {
    let rope = &config.rope;
    let rotation = Rotation { table: table.view(), pairs: rope.dims / 2, pairing: rope.pairing };
    Placement {
        bias: layer.biases.as_ref().map(Memory::view),
        norms: layer.head_norms.as_ref().map(|norms| norms.each_ref().map(Memory::view)),
        epsilon: config.norm_epsilon,
        rotation: layer.rotary.then_some(rotation),
    }
}
