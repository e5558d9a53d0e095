//! A CUDA GPU as a backend, over `windlass_kernels::cuda`. It names no driver: the same code runs on a GPU and on the
//! stand-in of tests.
//!
//! The residual stream and logits are f32, all between them bf16. Nothing is allocated after loading. A step of one
//! token per sequence is padded to the next of a few sizes, captured as a graph the first time and replayed after that.
//! Once the driver has refused something nothing more is issued, and [`CudaBackend::check`] tells what it was.

mod draws;
mod executor;
mod graphs;
mod metadata;

use std::sync::Arc;

use half::bf16;
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::BlockCopy;
use windlass_kernels::cuda::ops::{
    self, AttentionShape, DecodeWork, Heads, Output, PAGE_TOKENS, Pages, PagesMut, Placement, Rotation,
};
use windlass_kernels::cuda::weights::{LoadError, Matrix};
use windlass_kernels::cuda::{Device, DriverError, Memory, Pinned, Stream, View};
use windlass_kernels::{PackedMatrix, Pool, WeightType, floats};

use crate::backend::{Backend, FileMatrix, Layer, PackError};
use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::sampler::{self, Drawn, RowTask, SampleError};
use draws::{Draws, RowDraw};
pub use executor::CudaExecutor;
use graphs::{Buckets, Graphs};
use metadata::{Metadata, StepCounts, StepSizes};

/// Whether steps are captured as graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replay {
    /// Each size the first time that it is computed.
    #[default]
    Graphs,
    /// Never: for comparison.
    Eager,
}

/// One GPU: its stream, the KV cache, the rotary table, and what of a step lies on it.
#[derive(Debug)]
pub struct CudaBackend {
    config: DecoderConfig,
    device: Device,
    stream: Arc<Stream>,
    /// Converts weights on the host.
    pool: Pool,
    /// `[layer][page][K|V][kv_head][64][dim]`.
    cache: Memory<bf16>,
    /// Values of a layer's pages.
    layer_values: usize,
    rope: Memory<f32>,
    metadata: Metadata,
    draws: Draws,
    /// Logits on their way to a sampler of the host.
    logits: Pinned<f32>,
    buckets: Buckets,
    graphs: Graphs,
    replay: Replay,
    /// Tokens of the next step that lie on the device.
    feeds: Vec<Feed>,
    failed: Option<DriverError>,
}

/// A token that an earlier step in flight draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Feed {
    /// Which of the step's tokens it is.
    token: usize,
    /// The turn of the step that draws it.
    turn: usize,
    /// Which of that one's draws it is.
    draw: usize,
}

/// Activations of a step on the device, one row per token.
#[derive(Debug)]
pub struct CudaWorkspace {
    residual: Memory<f32>,
    normed: Memory<bf16>,
    projected: Memory<bf16>,
    query: Memory<bf16>,
    attended: Memory<bf16>,
    gate_up: Memory<bf16>,
    gated: Memory<bf16>,
    /// Splits of decoding: sums, and their logarithms.
    partial: Memory<f32>,
    partial_log: Memory<f32>,
    /// Residuals of the tokens that get logits, and their norm.
    picked: Memory<f32>,
    picked_normed: Memory<bf16>,
    logits: Memory<f32>,
}

/// A batch whose numbers are on the device.
#[derive(Clone, Copy, Debug)]
pub struct CudaStep {
    counts: StepCounts,
    /// The size that a step of one token per row was padded to; absent for others.
    bucket: Option<usize>,
}

impl CudaBackend {
    /// A backend with a KV cache as `geometry` says.
    pub(crate) fn new(
        device: &Device,
        pool: Pool,
        config: DecoderConfig,
        geometry: &Geometry,
        replay: Replay,
    ) -> Result<CudaBackend, PackError> {
        check(&config, geometry)?;
        let Geometry { blocks, max_sequence_tokens, max_step_rows, max_step_tokens, max_step_logits, .. } = *geometry;
        let [rows, tokens, logits, longest] =
            [max_step_rows, max_step_tokens, max_step_logits, max_sequence_tokens].map(|size| size as usize);
        let heads = heads(&config);
        // One page more than the scheduler knows: padded rows write there.
        let layer_values = (blocks as usize + 1) * heads.page_values();
        let sizes = StepSizes { tokens, rows, logits, longest, trash_page: blocks, heads };
        let rope = &config.rope;
        let table = ops::rope_table(rope.dims / 2, longest, rope.theta, rope.factors.as_deref());
        Ok(CudaBackend {
            stream: Arc::new(device.stream()?),
            pool,
            cache: device.allocate(config.layers * layer_values)?,
            layer_values,
            rope: device.upload(&table)?,
            metadata: Metadata::new(device, sizes)?,
            draws: Draws::new(device, rows)?,
            logits: device.pinned(logits * config.vocabulary)?,
            buckets: Buckets::up_to(rows),
            graphs: Graphs::default(),
            replay,
            feeds: Vec::new(),
            failed: None,
            device: device.clone(),
            config,
        })
    }

    /// What was refused, if anything was: nothing is issued after that.
    pub fn check(&self) -> Result<(), DriverError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Graphs captured so far.
    pub fn graphs(&self) -> usize {
        self.graphs.count()
    }

    /// Has the next step take tokens that lie on the device.
    fn feed(&mut self, feeds: Vec<Feed>) {
        self.feeds = feeds;
    }

    /// Draws a token from each of the first rows of logits, for the step of this turn.
    fn draw(&mut self, work: &CudaWorkspace, turn: usize, draws: &[RowDraw<'_>]) {
        let vocabulary = self.config.vocabulary;
        self.issue(|CudaBackend { draws: room, stream, .. }| match draws {
            [] => room.skip(turn, stream),
            draws => room.draw(turn, draws, work.logits.view(), vocabulary, stream),
        });
    }

    /// Waits for the tokens that the step of this turn drew.
    fn drawn(&self, turn: usize, rows: usize) -> Result<Vec<u32>, DriverError> {
        self.check()?;
        self.draws.wait(turn, rows)
    }

    /// Waits until all that was issued is done.
    fn settle(&self) -> Result<(), DriverError> {
        self.check()?;
        self.stream.synchronize()
    }

    /// Issues work unless something was refused before.
    fn issue(&mut self, work: impl FnOnce(&mut CudaBackend) -> Result<(), DriverError>) {
        if self.failed.is_none() {
            self.failed = work(self).err();
        }
    }

    fn upload(&mut self, batch: &Batch, bucket: Option<usize>) -> Result<StepCounts, DriverError> {
        let counts = self.metadata.upload(batch, bucket, &self.stream)?;
        for (first, count) in runs(&std::mem::take(&mut self.feeds)) {
            let drawn = self.draws.on_device(first.turn, first.draw..first.draw + count);
            self.metadata.feed(first.token, drawn, &self.stream)?;
        }
        Ok(counts)
    }

    fn attention_shape(&self) -> AttentionShape {
        let scale = 1.0 / (self.config.head_dim as f32).sqrt();
        AttentionShape { heads: heads(&self.config), scale, window: 0, cap: 0.0 }
    }

    fn pages(&self, layer: usize) -> Pages<'_> {
        Pages::Bf16(self.cache.slice(layer * self.layer_values..(layer + 1) * self.layer_values))
    }

    /// A copy of values on the device; no numbers where it refuses, which the next step will tell.
    fn read(&self, values: View<'_, f32>) -> Vec<f32> {
        let read = || -> Result<Vec<f32>, DriverError> {
            let staging = self.device.pinned(values.len())?;
            self.stream.copy_to_host(&staging, 0, values)?;
            self.stream.synchronize()?;
            Ok(staging.read(0..values.len()))
        };
        read().unwrap_or_else(|_| vec![f32::NAN; values.len()])
    }

    /// A file matrix in bf16.
    fn halves(&self, file: &FileMatrix<'_>) -> Result<Vec<bf16>, PackError> {
        let FileMatrix { kind, rows, cols, bytes, .. } = file;
        if matches!(kind, WeightType::F32 | WeightType::F16 | WeightType::BF16) {
            return Ok(floats(*kind, bytes).into_iter().map(bf16::from_f32).collect());
        }
        let packed = PackedMatrix::pack(&self.pool, *kind, *rows, *cols, bytes)?;
        let mut values = Vec::with_capacity(rows * cols);
        let mut row = vec![0.0; *cols];
        for index in 0..*rows {
            packed.dequantize_row(index, &mut row);
            values.extend(row.iter().copied().map(bf16::from_f32));
        }
        Ok(values)
    }
}

fn heads(config: &DecoderConfig) -> Heads {
    Heads { heads: config.heads, kv_heads: config.kv_heads, dim: config.head_dim }
}

/// Refuses what the kernels do not compute.
fn check(config: &DecoderConfig, geometry: &Geometry) -> Result<(), PackError> {
    let refuse = |what: String| Err(PackError::Device(what));
    if geometry.block_tokens as usize != PAGE_TOKENS {
        return refuse(format!("blocks have {} tokens; on CUDA they have {PAGE_TOKENS}", geometry.block_tokens));
    }
    if ![32, 64, 96, 128].contains(&config.head_dim) {
        return refuse(format!("heads have {} values; the CUDA kernels take 32, 64, 96 or 128", config.head_dim));
    }
    match config.heads / config.kv_heads {
        group if group > 16 => refuse(format!("{group} query heads share a key head; the CUDA kernels take up to 16")),
        _ => Ok(()),
    }
}

/// Feeds of neighbours as one copy each: the first, and how many follow one another.
fn runs(feeds: &[Feed]) -> Vec<(Feed, usize)> {
    let mut runs: Vec<(Feed, usize)> = Vec::new();
    for feed in feeds {
        match runs.last_mut() {
            Some((first, count))
                if feed.turn == first.turn && feed.token == first.token + *count && feed.draw == first.draw + *count =>
            {
                *count += 1;
            }
            _ => runs.push((*feed, 1)),
        }
    }
    runs
}

impl From<DriverError> for PackError {
    fn from(error: DriverError) -> PackError {
        PackError::Device(error.to_string())
    }
}

impl From<LoadError> for PackError {
    fn from(error: LoadError) -> PackError {
        match error {
            LoadError::Shape(error) => PackError::Shape(error),
            error => PackError::Device(error.to_string()),
        }
    }
}

impl Backend for CudaBackend {
    type Matrix = Matrix;
    /// As one, outputs after outputs.
    type Stack<const N: usize> = [Matrix; 1];
    type Vector = Memory<f32>;
    type Workspace = CudaWorkspace;
    type Step<'a> = CudaStep;

    fn matrix(&self, file: &FileMatrix<'_>) -> Result<Matrix, PackError> {
        let FileMatrix { kind, quantized, rows, cols, bytes } = file;
        match quantized {
            None => Ok(Matrix::load(&self.device, &self.pool, *kind, *rows, *cols, bytes)?),
            Some(_) => Err(PackError::Device("weights are not quantized at load on CUDA yet: use auto".into())),
        }
    }

    fn stack<const N: usize>(&self, files: [FileMatrix<'_>; N]) -> Result<[Matrix; 1], PackError> {
        let FileMatrix { kind, quantized, cols, .. } = files[0];
        let rows = files.iter().map(|file| file.rows).sum();
        if files.iter().all(|file| file.kind == kind) {
            let bytes = files.iter().map(|file| &*file.bytes).collect::<Vec<_>>().concat().into();
            return Ok([self.matrix(&FileMatrix { kind, quantized, rows, cols, bytes })?]);
        }
        let halves = files.iter().map(|file| self.halves(file)).collect::<Result<Vec<_>, _>>()?;
        Ok([Matrix::bf16(&self.device, rows, cols, &halves.concat())?])
    }

    fn vector(&self, values: Vec<f32>) -> Result<Memory<f32>, PackError> {
        Ok(self.device.upload(&values)?)
    }

    fn workspace(&self, config: &DecoderConfig, tokens: usize, logit_rows: usize) -> Result<CudaWorkspace, PackError> {
        let (device, heads) = (&self.device, heads(config));
        let halves = |width: usize| device.allocate::<bf16>(tokens * width);
        let sizes = self.metadata.sizes();
        let splits = sizes.rows * config.heads * sizes.splits();
        Ok(CudaWorkspace {
            residual: device.allocate(tokens * config.hidden)?,
            normed: halves(config.hidden)?,
            projected: halves(heads.projected_width().max(config.hidden))?,
            query: halves(heads.query_width())?,
            attended: halves(heads.query_width())?,
            gate_up: halves(2 * config.feed_forward)?,
            gated: halves(config.feed_forward)?,
            partial: device.allocate(splits * config.head_dim)?,
            partial_log: device.allocate(splits)?,
            picked: device.allocate(logit_rows * config.hidden)?,
            picked_normed: device.allocate(logit_rows * config.hidden)?,
            logits: device.allocate(logit_rows * config.vocabulary)?,
        })
    }

    fn begin<'a>(&mut self, batch: &'a Batch) -> CudaStep {
        let rows = batch.rows().len();
        let decodes = rows == batch.tokens().len() && rows == batch.logit_tokens().len();
        let bucket = self.buckets.holding(rows).filter(|_| decodes);
        let mut step = CudaStep { counts: StepCounts::default(), bucket };
        self.issue(|backend| {
            step.counts = backend.upload(batch, bucket)?;
            Ok(())
        });
        step
    }

    fn run(&mut self, step: &CudaStep, issue: impl FnOnce(&mut Self)) {
        let Some(bucket) = step.bucket.filter(|_| self.replay == Replay::Graphs) else { return issue(self) };
        let stream = Arc::clone(&self.stream);
        if self.graphs.of(bucket).is_none() && self.failed.is_none() {
            let captured = stream.capture(|| {
                issue(self);
                self.check()
            });
            match captured {
                Ok(graph) => self.graphs.keep(bucket, graph),
                Err(error) => self.failed = Some(error),
            }
        }
        self.issue(|backend| backend.graphs.of(bucket).map_or(Ok(()), |graph| stream.launch_graph(graph)));
    }

    fn enter(&mut self, step: &CudaStep, embedding: &Matrix, work: &mut CudaWorkspace) {
        self.issue(|CudaBackend { stream, metadata, config, .. }| {
            let out = work.residual.slice_mut(0..step.counts.tokens * config.hidden);
            ops::embed(stream, metadata.tokens(&step.counts), embedding, out)
        });
    }

    fn enter_from(&mut self, activations: &[f32], work: &mut CudaWorkspace) {
        self.issue(|CudaBackend { device, stream, .. }| {
            let staging = device.pinned(activations.len())?;
            staging.write(0, activations);
            stream.copy_to_device(work.residual.slice_mut(0..activations.len()), &staging, 0)?;
            stream.synchronize()
        });
    }

    fn project_qkv(&mut self, step: &CudaStep, index: usize, layer: &Layer<Self>, work: &mut CudaWorkspace) {
        self.issue(|CudaBackend { stream, cache, layer_values, rope, metadata, config, .. }| {
            let (tokens, hidden, heads) = (step.counts.tokens, config.hidden, heads(config));
            let normed = work.normed.slice_mut(0..tokens * hidden);
            let residual = work.residual.slice(0..tokens * hidden);
            ops::rms_norm(stream, residual, layer.attention_norm.view(), config.norm_epsilon, normed)?;
            let [qkv] = &layer.qkv;
            let width = tokens * heads.projected_width();
            let projected = Output::Bf16(work.projected.slice_mut(0..width));
            ops::linear(stream, qkv, work.normed.slice(0..tokens * hidden), projected)?;
            let (table, pairs, pairing) = (rope.view(), config.rope.dims / 2, config.rope.pairing);
            let placement = Placement {
                bias: layer.biases.as_ref().map(Memory::view),
                norms: layer.head_norms.as_ref().map(|norms| norms.each_ref().map(Memory::view)),
                epsilon: config.norm_epsilon,
                rotation: layer.rotary.then_some(Rotation { table, pairs, pairing }),
            };
            let (positions, slots) = (metadata.positions(&step.counts), metadata.slots(&step.counts));
            let query = work.query.slice_mut(0..tokens * heads.query_width());
            let pages = PagesMut::Bf16(cache.slice_mut(index * *layer_values..(index + 1) * *layer_values));
            ops::place_heads(stream, heads, placement, work.projected.slice(0..width), positions, query, slots, pages)
        });
    }

    fn attend(&mut self, step: &CudaStep, index: usize, work: &mut CudaWorkspace) {
        self.issue(|backend| {
            let (stream, shape, pages) = (&backend.stream, backend.attention_shape(), backend.pages(index));
            let values = step.counts.tokens * shape.heads.query_width();
            let CudaWorkspace { query, attended, partial, partial_log, .. } = work;
            let query = query.slice(0..values);
            if step.counts.decodes > 0 {
                let rows = backend.metadata.decode_rows(&step.counts);
                let splits = DecodeWork { partial: partial.view_mut(), partial_log: partial_log.view_mut() };
                ops::attention_decode(stream, &shape, rows, query, pages, splits, attended.slice_mut(0..values))?;
            }
            match step.counts.chunks {
                0 => Ok(()),
                _ => {
                    let chunks = backend.metadata.chunks(&step.counts);
                    ops::attention_prefill(stream, &shape, chunks, query, pages, attended.slice_mut(0..values))
                }
            }
        });
    }

    fn project_out(&mut self, step: &CudaStep, layer: &Layer<Self>, work: &mut CudaWorkspace) {
        self.issue(|CudaBackend { stream, config, .. }| {
            let (tokens, hidden) = (step.counts.tokens, config.hidden);
            let attended = work.attended.slice(0..tokens * config.query_width());
            ops::linear(stream, &layer.out, attended, Output::AddTo(work.residual.slice_mut(0..tokens * hidden)))?;
            let (residual, normed) = (work.residual.slice(0..tokens * hidden), work.normed.slice_mut(0..tokens * hidden));
            ops::rms_norm(stream, residual, layer.feed_forward_norm.view(), config.norm_epsilon, normed)
        });
    }

    fn feed_forward(&mut self, step: &CudaStep, layer: &Layer<Self>, work: &mut CudaWorkspace) {
        self.issue(|CudaBackend { stream, config, .. }| {
            let (tokens, hidden, width) = (step.counts.tokens, config.hidden, config.feed_forward);
            let [gate_up] = &layer.gate_up;
            let out = Output::Bf16(work.gate_up.slice_mut(0..2 * tokens * width));
            ops::linear(stream, gate_up, work.normed.slice(0..tokens * hidden), out)?;
            let gated = work.gated.slice_mut(0..tokens * width);
            ops::silu_mul(stream, work.gate_up.slice(0..2 * tokens * width), width, gated)?;
            let residual = Output::AddTo(work.residual.slice_mut(0..tokens * hidden));
            ops::linear(stream, &layer.down, work.gated.slice(0..tokens * width), residual)
        });
    }

    fn head(&mut self, step: &CudaStep, norm: &Memory<f32>, output: &Matrix, work: &mut CudaWorkspace) {
        self.issue(|CudaBackend { stream, metadata, config, .. }| {
            let StepCounts { tokens, logits, .. } = step.counts;
            let (hidden, picked) = (config.hidden, logits * config.hidden);
            let residual = work.residual.slice(0..tokens * hidden);
            let tokens = metadata.logit_tokens(&step.counts);
            ops::gather_rows(stream, tokens, residual, hidden, work.picked.slice_mut(0..picked))?;
            let normed = work.picked_normed.slice_mut(0..picked);
            ops::rms_norm(stream, work.picked.slice(0..picked), norm.view(), config.norm_epsilon, normed)?;
            let out = Output::F32(work.logits.slice_mut(0..logits * config.vocabulary));
            ops::linear(stream, output, work.picked_normed.slice(0..picked), out)
        });
    }

    /// On the host: what the device's sampler does not do.
    fn sample(&mut self, work: &mut CudaWorkspace, tasks: &[RowTask<'_>]) -> Vec<Result<Drawn, SampleError>> {
        let vocabulary = self.config.vocabulary;
        let values = tasks.len() * vocabulary;
        self.issue(|CudaBackend { stream, logits, .. }| {
            stream.copy_to_host(logits, 0, work.logits.slice(0..values))?;
            stream.synchronize()
        });
        if self.failed.is_some() {
            return vec![Err(SampleError::NotFinite { token: 0 }); tasks.len()];
        }
        let mut logits = self.logits.read(0..values);
        logits.chunks_exact_mut(vocabulary).zip(tasks).map(|(row, task)| sampler::sample(row, task)).collect()
    }

    fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        self.issue(|CudaBackend { stream, cache, layer_values, config, .. }| {
            let page = heads(config).page_values();
            for (copy, layer) in copies.iter().flat_map(|copy| (0..config.layers).map(move |layer| (copy, layer))) {
                let [from, to] = [copy.from.0, copy.to.0].map(|block| layer * *layer_values + block as usize * page);
                stream.copy_within(cache.view_mut(), from..from + page, to)?;
            }
            Ok(())
        });
    }

    fn activations(&self, work: &CudaWorkspace, values: usize) -> Vec<f32> {
        self.read(work.residual.slice(0..values))
    }

    fn logits(&self, work: &CudaWorkspace, values: usize) -> Vec<f32> {
        self.read(work.logits.slice(0..values))
    }

    fn leave(&self, _why: &str) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_fed_by_one_copy() {
        let feed = |token, turn, draw| Feed { token, turn, draw };
        let feeds = [feed(0, 0, 3), feed(1, 0, 4), feed(2, 0, 6), feed(3, 1, 7), feed(5, 1, 8)];
        let expected = [(feeds[0], 2), (feeds[2], 1), (feeds[3], 1), (feeds[4], 1)];
        assert_eq!(runs(&feeds), expected);
    }
}
