//! A decoder on one GPU, whole or a rank's part of it: what a step needs of the device besides its kernels.

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

/// Why nothing crosses to another stage.
const WHOLE: &str = "the decoder has no other stage";
/// The turn of what is waited for at once: no other is in use then.
const FIRST_BUFFER: usize = 0;

/// A rank's part of a decoder, loaded.
pub(super) struct RankPart {
    pub device: Device,
    /// Of the part.
    pub config: DecoderConfig,
    pub weights: CudaWeights,
    /// How they are multiplied.
    pub choices: ProductChoices,
    /// Where they lie; none where the device maps no memory.
    pub weights_region: Option<Arc<Region>>,
    /// The first token whose embedding the part holds.
    pub first_token: usize,
}

/// One GPU's.
///
/// Fields are dropped in their order: graphs name the memory of what follows them.
#[derive(Debug)]
pub struct CudaRank {
    graphs: Graphs,
    graph_room: GraphRoom,
    buckets: Buckets,
    replay: Replay,
    pub(super) decoder: Decoder<CudaBackend>,
    draws: Draws,
    /// Of the steps in flight.
    changes: [Changes; 2],
    move_buffer: MoveBuffer,
    /// Logits on their way to the sampler of the host.
    logits: Pinned<f32>,
    /// Absent where no stage comes before or behind.
    activation_buffer: Option<ActivationBuffer>,
    /// Absent where no block leaves the pool.
    page_room: Option<PageRoom>,
    /// What is given back for a while, if the device maps memory. Addresses stay, and so do graphs.
    regions: Regions,
    stream: Stream,
}

/// Where a rank's weights lie, and its keys and values; none where the device maps no memory: they stay.
#[derive(Debug)]
struct Regions {
    weights: Option<Arc<Region>>,
    kv: Option<Arc<Region>>,
}

/// What may be given back for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holding {
    /// Keys and values, with everything in them.
    Kv,
    /// Weights, which the host keeps.
    Weights,
}

/// A step as every rank computes it, up to its logits.
#[derive(Debug)]
pub(super) struct Step {
    pub batch: Batch,
    pub sampled_inputs: Vec<SampledInput>,
}

/// A token that an earlier step in flight draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampledInput {
    /// Which of the step's tokens it is.
    pub token: usize,
    /// The turn of the step that draws it.
    pub buffer: usize,
    /// Which of that one's draws it is.
    pub draw: usize,
}

impl CudaRank {
    /// With a place in a group where the part is not all of the decoder.
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
            // Once all else is there: fields are made in this order.
            graph_room: GraphRoom::of(&device)?,
        })
    }

    /// Values of a token's logits.
    pub(super) fn vocabulary(&self) -> usize {
        self.decoder.backend.config.vocabulary
    }

    /// Graphs captured so far.
    pub(super) fn graphs(&self) -> usize {
        self.graphs.count()
    }

    /// As many as there may be.
    pub(super) fn most_graphs(&self) -> usize {
        self.graphs.most()
    }

    /// The first size of a step that has none.
    pub(super) fn missing_graph(&self) -> Option<GraphSize> {
        self.graphs.missing()
    }

    /// What its device has left for more of them.
    pub(super) fn graph_room(&self) -> &GraphRoom {
        &self.graph_room
    }

    /// Captures the graph of a step that has not come yet. Nothing is in flight, and nothing runs.
    pub(super) fn capture(&mut self, size: GraphSize) -> Result<(), DriverError> {
        self.regions.check("a capture")?;
        let CudaRank { graphs, decoder, stream, .. } = self;
        let counts = decoder.backend.metadata.lay_out(size);
        graphs.capture(size, || stream.capture(|| decoder.forward(&CudaStep { counts, stream })))
    }

    /// Issues a step, where any of its rows is computed.
    pub(super) fn step(&mut self, step: &Step) -> Result<(), DriverError> {
        match step.batch.is_empty() {
            true => Ok(()),
            false => self.issue(&step.batch, &step.sampled_inputs),
        }
    }

    /// Issues a step's kernels from what the stage before gave, a row of activations for each token. The step before has
    /// been waited for.
    pub(super) fn issue_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), DriverError> {
        let tokens = self.bucket(batch).unwrap_or(batch.tokens().len());
        let CudaRank { activation_buffer, decoder, stream, .. } = self;
        let Some(activation_buffer) = activation_buffer else { return Err(DriverError::refused("a step", WHOLE)) };
        activation_buffer.upload(activations, decoder.backend.entry(tokens), stream)?;
        self.issue(batch, &[])
    }

    /// What the layers gave for the last step's `tokens` tokens, once it is done.
    pub(super) fn fetch_activations(&self, tokens: usize) -> Result<Vec<f32>, DriverError> {
        match &self.activation_buffer {
            Some(activation_buffer) => activation_buffer.fetch(self.decoder.backend.activations(tokens), &self.stream),
            None => Err(DriverError::refused("activations", WHOLE)),
        }
    }

    /// Issues a step's kernels. The tokens of `sampled_inputs` lie on the device, or will when the kernels run.
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

    /// The number of rows of one token that a step is padded to where it is replayed.
    fn bucket(&self, batch: &Batch) -> Option<usize> {
        let (tokens, logits) = (batch.tokens().len(), batch.logit_tokens().len());
        let has_head = self.decoder.weights.head.is_some();
        let all_alike = self.decoder.backend.metadata.decodes_alone(batch) && (tokens == logits || !has_head);
        let repeats = self.replay == Replay::Graphs && all_alike;
        self.buckets.holding(tokens).filter(|_| repeats)
    }

    /// Has the device draw a token from each of the first rows of logits that the last step left, or tell of them, for the step
    /// of this turn: none that is in flight beside it has the same.
    pub(super) fn draw(&mut self, buffer: usize, sampling_tasks: &[SamplingTask]) -> Result<(), DriverError> {
        let (rows, vocabulary) = (sampling_tasks.len(), self.vocabulary());
        let CudaRank { changes, draws, decoder, stream, .. } = self;
        if sampling_tasks.is_empty() {
            return draws.skip(buffer, stream);
        }
        changes[buffer].apply(sampling_tasks, decoder.backend.logits_mut(rows), stream)?;
        draws.draw(buffer, &sampler::draws(sampling_tasks), decoder.backend.logits(rows), vocabulary, stream)
    }

    /// Waits for the step of this turn.
    pub(super) fn wait(&self, buffer: usize) -> Result<(), DriverError> {
        self.draws.wait(buffer)
    }

    /// The tokens that the step of this turn drew; it has been waited for.
    pub(super) fn drawn(&self, buffer: usize, rows: usize) -> Vec<Drawn> {
        self.draws.drawn(buffer, rows)
    }

    /// Waits for all that was issued.
    pub(super) fn synchronize_stream(&self) -> Result<(), DriverError> {
        self.stream.synchronize()
    }

    /// Draws from the first rows of logits that the last step left, or tells of them. No step may be in flight whose draws have
    /// not been read.
    pub(super) fn draw_and_wait(
        &mut self,
        tasks: &[RowTask<'_>],
    ) -> Result<Vec<Result<Drawn, SampleError>>, DriverError> {
        if tasks.is_empty() {
            // Also without logits: the step's numbers may be written over once this returns.
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

    /// What came of a row; `drawn` is what the device gave.
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
                // The host says which token's logit it is.
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

    /// Has a row of logits copied to the host.
    fn copy_logits(&self, row: usize) -> Result<(), DriverError> {
        let place = row * self.vocabulary()..(row + 1) * self.vocabulary();
        self.stream.copy_to_host(&self.logits, place.start, self.decoder.backend.logits(row + 1).slice(place))
    }

    /// The first rows of logits that the last step left, one after the other, once it is done.
    pub(super) fn logits(&self, rows: usize) -> Result<Vec<f32>, DriverError> {
        (0..rows).try_for_each(|row| self.copy_logits(row))?;
        self.stream.synchronize()?;
        Ok(self.logits.read(0..rows * self.vocabulary()))
    }

    /// The region of the weights.
    pub(super) fn weights_region(&self) -> Option<&Arc<Region>> {
        self.regions.weights.as_ref()
    }

    /// Takes memory, or gives it back.
    pub(super) fn hold(&mut self, what: Holding, held: bool) -> Result<(), DriverError> {
        self.stream.synchronize()?;
        if !held {
            self.graphs.end_unused();
        }
        self.regions.hold(what, held)
    }

    /// Copies keys and values of a block.
    pub(super) fn copy_page(&mut self, from: BlockId, to: BlockId) -> Result<(), DriverError> {
        self.regions.check("a copy")?;
        self.decoder.backend.cache.copy(from.0 as usize, to.0 as usize, &self.stream)
    }

    /// Gives `store` keys and values of a block, once all steps that write them are done.
    pub(super) fn with_block(&self, block: BlockId, store: impl FnOnce(&[u8]) -> io::Result<()>) -> io::Result<()> {
        self.regions.check("a copy").map_err(io::Error::other)?;
        let room = self.page_room()?;
        store(&room.fetch(&self.decoder.backend.cache, block.0 as usize, &self.stream).map_err(io::Error::other)?)
    }

    /// Overwrites keys and values of a block with what `load` gives, before any later step reads them.
    pub(super) fn fill_block(
        &mut self,
        block: BlockId,
        load: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.regions.check("a copy").map_err(io::Error::other)?;
        let mut bytes = vec![0; self.page_room()?.bytes()];
        load(&mut bytes)?;
        let CudaRank { decoder, page_room, stream, .. } = self;
        let Some(room) = page_room else { return Ok(()) };
        room.bring(&bytes, &mut decoder.backend.cache, block.0 as usize, stream).map_err(io::Error::other)
    }

    fn page_room(&self) -> io::Result<&PageRoom> {
        self.page_room.as_ref().ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "there is no swap space"))
    }

    /// Moves keys and values of tokens, in order, behind the steps that were issued.
    pub(super) fn issue_moves(&mut self, moves: &[TokenMove]) -> Result<(), DriverError> {
        self.regions.check("a move")?;
        let CudaRank { move_buffer, decoder, stream, .. } = self;
        move_buffer.issue(moves, &mut decoder.backend.cache, stream)
    }
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

    /// Refuses what needs memory that was given back.
    fn check(&self, call: &'static str) -> Result<(), DriverError> {
        match self.kv.iter().chain(&self.weights).all(|region| region.is_held()) {
            true => Ok(()),
            false => Err(DriverError::refused(call, "its memory was given back")),
        }
    }
}

/// Feeds of neighbours as one copy each: the first, and how many follow one another.
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
