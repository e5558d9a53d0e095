//! A rank: a decoder, or its part of one, on one GPU, with everything that steps need besides kernels.

use std::io;
use std::sync::Arc;

use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::BlockId;
use windlass_kernels::cuda::ops::{self, PeerRank};
use windlass_kernels::cuda::{Device, DriverError, Pinned, Region, Stream};

use super::Replay;
use super::activation_buffer::ActivationBuffer;
use super::cache::{Cache, PageRoom, PageType};
use super::compute::{CudaBackend, CudaStep, Exchange, cache_shape, step_sizes};
use super::draws::Draws;
use super::graphs::{Buckets, GraphRoom, GraphSize, Graphs};
use super::inputs::ProductChoices;
use super::move_buffer::MoveBuffer;
use super::sampler::{self, Changes, SamplingTask};
use super::weights::CudaWeights;
use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::decoder::{Decoder, TokenMove};
use crate::sampler::{Drawn, RowTask, SampleError};

/// Error if a decoder that is not divided into stages is used as a stage.
const WHOLE: &str = "the decoder has no other stage";
/// The buffer of draws that are waited for at once: no other buffer is in use then.
const FIRST_BUFFER: usize = 0;

/// A rank's part of a decoder, loaded.
pub(super) struct RankPart {
    pub device: Device,
    /// Configuration of the part.
    pub config: DecoderConfig,
    pub weights: CudaWeights,
    /// Options of products with the weights.
    pub choices: ProductChoices,
    /// The memory region of the weights; `None` if the device does not map memory.
    pub weights_region: Option<Arc<Region>>,
    /// The first token id whose embedding the part has.
    pub first_token: usize,
}

/// A decoder, or a rank's part of one, on one GPU.
///
/// Fields are dropped in their order, graphs first: they refer to the memory of the fields after them.
#[derive(Debug)]
pub struct CudaRank {
    graphs: Graphs,
    graph_room: GraphRoom,
    buckets: Buckets,
    replay: Replay,
    pub(super) decoder: Decoder<CudaBackend>,
    draws: Draws,
    /// Changes of logits, one buffer for each step in flight.
    changes: [Changes; 2],
    move_buffer: MoveBuffer,
    /// Host buffer of logits, for the host's sampler.
    logits: Pinned<f32>,
    /// `None` unless the decoder is a pipeline stage.
    activation_buffer: Option<ActivationBuffer>,
    /// `None` without swap space.
    page_room: Option<PageRoom>,
    /// Memory that can be freed for a while. Addresses stay the same, so graphs stay valid.
    regions: Regions,
    stream: Stream,
}

/// The memory regions of weights and of K and V; `None` if the device does not map memory: then they stay allocated.
#[derive(Debug)]
struct Regions {
    weights: Option<Arc<Region>>,
    kv: Option<Arc<Region>>,
}

/// Memory that can be freed for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holding {
    /// K and V; their contents are lost.
    Kv,
    /// Weights, which the host keeps meanwhile.
    Weights,
}

/// A step up to its logits, as every rank computes it.
#[derive(Debug)]
pub(super) struct Step {
    pub batch: Batch,
    pub sampled_inputs: Vec<SampledInput>,
}

/// An input token that an earlier step in flight samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampledInput {
    /// Index among the tokens of the step.
    pub token: usize,
    /// The buffer of the step that samples it.
    pub buffer: usize,
    /// Index among the draws of that step.
    pub draw: usize,
}

impl CudaRank {
    /// Makes a rank. `peer` is its index and link in the group, if the decoder is divided.
    pub(super) fn new(
        part: RankPart,
        peer: Option<(usize, PeerRank)>,
        geometry: &Geometry,
        pages: PageType,
        replay: Replay,
    ) -> Result<CudaRank, DriverError> {
        let RankPart { device, config, weights, choices, weights_region, first_token } = part;
        let regions = Regions { weights: weights_region, kv: Region::of(&device)? };
        let shape = cache_shape(&config, geometry, pages);
        let cache = Cache::new(&device.within(regions.kv.as_ref()), shape)?;
        let page_room = (geometry.swap_slots > 0).then(|| PageRoom::new(&device, &shape)).transpose()?;
        let Geometry { max_step_rows, max_step_tokens, max_step_logits, .. } = *geometry;
        let [rows, tokens, logits] = [max_step_rows, max_step_tokens, max_step_logits].map(|size| size as usize);
        let logits = if weights.head.is_some() { logits } else { 0 };
        let exchange = peer.map(|(rank, peer)| Exchange { peer, rank, first_token });
        let is_whole = weights.embeds && weights.head.is_some();
        let changes = || Changes::new(&device, logits, config.vocabulary);
        let activation_buffer =
            (!is_whole).then(|| ActivationBuffer::new(&device, tokens, config.hidden)).transpose()?;
        let (sizes, buckets) = (step_sizes(&config, weights.head.is_some(), geometry), Buckets::up_to(rows));
        let replayed = match replay {
            Replay::Graphs => buckets.sizes(sizes.reaches()),
            Replay::Eager => Vec::new(),
        };
        Ok(CudaRank {
            graphs: Graphs::new(replayed),
            buckets,
            replay,
            draws: Draws::new(&device, logits)?,
            changes: [changes()?, changes()?],
            move_buffer: MoveBuffer::new(&device, &sizes)?,
            logits: device.pinned(logits * config.vocabulary)?,
            activation_buffer,
            page_room,
            decoder: Decoder {
                backend: CudaBackend::new(&device, config, (&weights, &choices), exchange, geometry, cache)?,
                weights,
            },
            regions,
            stream: device.stream()?,
            // Measured after everything else is allocated: fields are made in this order.
            graph_room: GraphRoom::of(&device)?,
        })
    }

    /// Size of the vocabulary.
    pub(super) fn vocabulary(&self) -> usize {
        self.decoder.backend.config.vocabulary
    }

    /// Number of captured graphs.
    pub(super) fn graphs(&self) -> usize {
        self.graphs.count()
    }

    /// Number of sizes that graphs are captured for.
    pub(super) fn most_graphs(&self) -> usize {
        self.graphs.most()
    }

    /// The first size without a graph, if another can be captured.
    pub(super) fn missing_graph(&self) -> Option<GraphSize> {
        self.graphs.missing()
    }

    /// The memory left on its device for graphs.
    pub(super) fn graph_room(&self) -> &GraphRoom {
        &self.graph_room
    }

    /// Captures the graph of a size before a step needs it. No step is in flight.
    pub(super) fn capture(&mut self, size: GraphSize) -> Result<(), DriverError> {
        self.regions.check("a capture")?;
        let CudaRank { graphs, decoder, stream, .. } = self;
        let counts = decoder.backend.metadata.lay_out(size);
        graphs.capture(size, || stream.capture(|| decoder.forward(&CudaStep { counts, stream })))
    }

    /// Issues a step, unless its batch is empty.
    pub(super) fn step(&mut self, step: &Step) -> Result<(), DriverError> {
        match step.batch.is_empty() {
            true => Ok(()),
            false => self.issue(&step.batch, &step.sampled_inputs),
        }
    }

    /// Issues a step's kernels from the activations `[tokens, hidden]` of the previous stage. The previous step must
    /// have ended.
    pub(super) fn issue_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), DriverError> {
        let tokens = self.bucket(batch).unwrap_or(batch.tokens().len());
        let CudaRank { activation_buffer, decoder, stream, .. } = self;
        let Some(activation_buffer) = activation_buffer else { return Err(DriverError::refused("a step", WHOLE)) };
        activation_buffer.upload(activations, decoder.backend.entry(tokens), stream)?;
        self.issue(batch, &[])
    }

    /// The activations `[tokens, hidden]` of the last step, after it has ended.
    pub(super) fn fetch_activations(&self, tokens: usize) -> Result<Vec<f32>, DriverError> {
        match &self.activation_buffer {
            Some(activation_buffer) => activation_buffer.fetch(self.decoder.backend.activations(tokens), &self.stream),
            None => Err(DriverError::refused("activations", WHOLE)),
        }
    }

    /// Issues a step's kernels. The tokens of `sampled_inputs` are on the device when the kernels run.
    pub(super) fn issue(&mut self, batch: &Batch, sampled_inputs: &[SampledInput]) -> Result<(), DriverError> {
        self.regions.check("a step")?;
        let bucket = self.bucket(batch);
        let CudaRank { graphs, decoder, draws, stream, .. } = self;
        let counts = decoder.backend.metadata.upload(batch, bucket, stream)?;
        let step = CudaStep { counts, stream };
        for (first, count) in runs(sampled_inputs) {
            let drawn = draws.on_device(first.buffer, first.draw..first.draw + count);
            decoder.backend.metadata.write_tokens(first.token, drawn, stream)?;
        }
        match bucket {
            None => decoder.forward(&step),
            Some(bucket) => {
                let size = GraphSize { bucket, reach: counts.reach };
                match graphs.of_step(size, || stream.capture(|| decoder.forward(&step)))? {
                    Some(graph) => stream.launch_graph(graph),
                    None => decoder.forward(&step),
                }
            }
        }
    }

    /// The number of rows that a step is padded to for replay; `None` if it is not replayed.
    fn bucket(&self, batch: &Batch) -> Option<usize> {
        let (tokens, logits) = (batch.tokens().len(), batch.logit_tokens().len());
        let has_head = self.decoder.weights.head.is_some();
        let all_alike = self.decoder.backend.metadata.decodes_alone(batch) && (tokens == logits || !has_head);
        let repeats = self.replay == Replay::Graphs && all_alike;
        self.buckets.holding(tokens).filter(|_| repeats)
    }

    /// Draws a token on the device from each of the first rows of logits of the last step, or scores a token. No other
    /// step in flight may have this buffer.
    pub(super) fn draw(&mut self, buffer: usize, sampling_tasks: &[SamplingTask]) -> Result<(), DriverError> {
        let (rows, vocabulary) = (sampling_tasks.len(), self.vocabulary());
        let CudaRank { changes, draws, decoder, stream, .. } = self;
        if sampling_tasks.is_empty() {
            return draws.skip(buffer, stream);
        }
        changes[buffer].apply(sampling_tasks, decoder.backend.logits_mut(rows), stream)?;
        draws.draw(buffer, &sampler::draws(sampling_tasks), decoder.backend.logits(rows), vocabulary, stream)
    }

    /// Waits for the step with this buffer.
    pub(super) fn wait(&self, buffer: usize) -> Result<(), DriverError> {
        self.draws.wait(buffer)
    }

    /// The tokens of the step with this buffer, after [`wait`](Self::wait).
    pub(super) fn drawn(&self, buffer: usize, rows: usize) -> Vec<Drawn> {
        self.draws.drawn(buffer, rows)
    }

    /// Waits for all issued work.
    pub(super) fn synchronize_stream(&self) -> Result<(), DriverError> {
        self.stream.synchronize()
    }

    /// Draws from the first rows of logits of the last step, or scores, and waits. The draws of all steps in flight
    /// must have been read.
    pub(super) fn draw_and_wait(
        &mut self,
        tasks: &[RowTask<'_>],
    ) -> Result<Vec<Result<Drawn, SampleError>>, DriverError> {
        if tasks.is_empty() {
            // Wait also without logits: the caller may overwrite the step's metadata after this.
            return self.stream.synchronize().map(|()| Vec::new());
        }
        let sampling_tasks = sampler::sampling_tasks(tasks, self.vocabulary());
        for (row, _) in sampling_tasks.iter().enumerate().filter(|(_, task)| matches!(task, SamplingTask::OnHost)) {
            self.copy_logits(row)?;
        }
        self.draw(FIRST_BUFFER, &sampling_tasks)?;
        self.stream.synchronize()?;
        let drawn = self.draws.drawn(FIRST_BUFFER, tasks.len());
        let rows = tasks.iter().zip(&sampling_tasks).zip(drawn).enumerate();
        rows.map(|(row, ((task, sampling_task), drawn))| self.read(row, task, sampling_task, drawn)).collect()
    }

    /// The result of a row; `drawn` is what the device drew.
    fn read(
        &self,
        row: usize,
        task: &RowTask<'_>,
        sampling_task: &SamplingTask,
        drawn: Drawn,
    ) -> Result<Result<Drawn, SampleError>, DriverError> {
        match (sampling_task, drawn.token) {
            (SamplingTask::OnHost, _) => Ok(self.sample_on_host(row, task)),
            (SamplingTask::OnDevice(_), ops::ALL_BANNED) => Ok(Err(SampleError::AllBanned)),
            (SamplingTask::OnDevice(_), ops::NOT_FINITE) => {
                // The host's sampler finds the token whose logit is not finite.
                self.copy_logits(row)?;
                self.stream.synchronize()?;
                Ok(self.sample_on_host(row, task))
            }
            (SamplingTask::OnDevice(_), _) => Ok(Ok(drawn)),
        }
    }

    fn sample_on_host(&self, row: usize, task: &RowTask<'_>) -> Result<Drawn, SampleError> {
        let mut logits = self.logits.read(row * self.vocabulary()..(row + 1) * self.vocabulary());
        crate::sampler::sample(&mut logits, task)
    }

    /// Copies a row of logits to the host.
    fn copy_logits(&self, row: usize) -> Result<(), DriverError> {
        let place = row * self.vocabulary()..(row + 1) * self.vocabulary();
        self.stream.copy_to_host(&self.logits, place.start, self.decoder.backend.logits(row + 1).slice(place))
    }

    /// The first rows of logits of the last step, concatenated, after it has ended.
    pub(super) fn logits(&self, rows: usize) -> Result<Vec<f32>, DriverError> {
        (0..rows).try_for_each(|row| self.copy_logits(row))?;
        self.stream.synchronize()?;
        Ok(self.logits.read(0..rows * self.vocabulary()))
    }

    /// The memory region of the weights.
    pub(super) fn weights_region(&self) -> Option<&Arc<Region>> {
        self.regions.weights.as_ref()
    }

    /// Allocates memory if `held`, else frees it.
    pub(super) fn hold(&mut self, what: Holding, held: bool) -> Result<(), DriverError> {
        self.stream.synchronize()?;
        if !held {
            self.graphs.end_unused();
        }
        self.regions.hold(what, held)
    }

    /// Copies K and V of a block.
    pub(super) fn copy_page(&mut self, from: BlockId, to: BlockId) -> Result<(), DriverError> {
        self.regions.check("a copy")?;
        self.decoder.backend.cache.copy(from.0 as usize, to.0 as usize, &self.stream)
    }

    /// Calls `store` with K and V of a block, after all steps that write them.
    pub(super) fn with_block(&self, block: BlockId, store: impl FnOnce(&[u8]) -> io::Result<()>) -> io::Result<()> {
        self.regions.check("a copy").map_err(io::Error::other)?;
        let room = self.page_room.as_ref().ok_or_else(no_swap_space)?;
        store(&room.fetch(&self.decoder.backend.cache, block.0 as usize, &self.stream).map_err(io::Error::other)?)
    }

    /// Overwrites K and V of a block with the bytes that `load` writes, before any later step reads them.
    pub(super) fn fill_block(
        &mut self,
        block: BlockId,
        load: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.regions.check("a copy").map_err(io::Error::other)?;
        let CudaRank { decoder, page_room, stream, .. } = self;
        let room = page_room.as_mut().ok_or_else(no_swap_space)?;
        let mut bytes = vec![0; room.bytes()];
        load(&mut bytes)?;
        room.bring(&bytes, &mut decoder.backend.cache, block.0 as usize, stream).map_err(io::Error::other)
    }

    /// Moves K and V of tokens, in order, after all issued steps.
    pub(super) fn issue_moves(&mut self, moves: &[TokenMove]) -> Result<(), DriverError> {
        self.regions.check("a move")?;
        let CudaRank { move_buffer, decoder, stream, .. } = self;
        move_buffer.issue(moves, &mut decoder.backend.cache, stream)
    }
}

fn no_swap_space() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "there is no swap space")
}

impl Regions {
    fn hold(&self, what: Holding, held: bool) -> Result<(), DriverError> {
        let region = match what {
            Holding::Kv => &self.kv,
            Holding::Weights => &self.weights,
        };
        match region {
            None => Ok(()),
            Some(region) if held => region.take_back(),
            Some(region) => {
                if what == Holding::Weights {
                    region.keep()?;
                }
                region.give_back()
            }
        }
    }

    /// Fails if memory that a call needs was freed.
    fn check(&self, call: &'static str) -> Result<(), DriverError> {
        match self.kv.iter().chain(&self.weights).all(|region| region.is_held()) {
            true => Ok(()),
            false => Err(DriverError::refused(call, "its memory was given back")),
        }
    }
}

/// Groups sampled inputs that one copy can write: the first of each run, and the length of the run.
fn runs(sampled_inputs: &[SampledInput]) -> Vec<(SampledInput, usize)> {
    let mut runs: Vec<(SampledInput, usize)> = Vec::new();
    for sampled_input in sampled_inputs {
        match runs.last_mut() {
            Some((first, count))
                if sampled_input.buffer == first.buffer
                    && sampled_input.token == first.token + *count
                    && sampled_input.draw == first.draw + *count =>
            {
                *count += 1;
            }
            _ => runs.push((*sampled_input, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_fed_by_one_copy() {
        let sampled_input = |token, buffer, draw| SampledInput { token, buffer, draw };
        let sampled_inputs = [
            sampled_input(0, 0, 3),
            sampled_input(1, 0, 4),
            sampled_input(2, 0, 6),
            sampled_input(3, 1, 7),
            sampled_input(5, 1, 8),
        ];
        let expected = [(sampled_inputs[0], 2), (sampled_inputs[2], 1), (sampled_inputs[3], 1), (sampled_inputs[4], 1)];
        assert_eq!(runs(&sampled_inputs), expected);
    }
}
