//! A decoder on one GPU, whole or a rank's part of it: what a step needs of the device besides its kernels.

use std::sync::Arc;

use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::BlockId;
use windlass_kernels::cuda::ops::{self, PeerRank};
use windlass_kernels::cuda::{Device, DriverError, Pinned, Region, Stream};

use super::Replay;
use super::cache::{Cache, PageType};
use super::compute::{Compute, Exchange, cache_shape, step_sizes};
use super::draws::Draws;
use super::graphs::{Buckets, GraphRoom, GraphSize, Graphs};
use super::handover::Handover;
use super::moves::Moves;
use super::sampler::{self, Answer, Changes};
use super::weights::Weights;
use crate::backend::TokenMove;
use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::sampler::{Drawn, RowTask, SampleError};

/// Why nothing crosses to another stage.
const WHOLE: &str = "the decoder has no other stage";
/// The turn of what is waited for at once: no other is in use then.
const OWN_TURN: usize = 0;

/// A rank's part of a decoder, loaded.
pub(super) struct RankPart {
    pub device: Device,
    /// Of the part.
    pub config: DecoderConfig,
    pub weights: Weights,
    /// Where they lie; none where the device maps no memory.
    pub weights_region: Option<Arc<Region>>,
    /// The first token whose embedding the part holds.
    pub first_token: usize,
}

/// One GPU's.
///
/// Fields are dropped in their order: graphs name the memory of what follows them.
#[derive(Debug)]
pub(super) struct Rank {
    graphs: Graphs,
    graph_room: GraphRoom,
    buckets: Buckets,
    replay: Replay,
    compute: Compute,
    draws: Draws,
    /// Of the steps in flight.
    changes: [Changes; 2],
    moves: Moves,
    /// Logits on their way to the sampler of the host.
    logits: Pinned<f32>,
    /// Absent where no stage comes before or behind.
    handover: Option<Handover>,
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
    pub feeds: Vec<Feed>,
}

/// A token that an earlier step in flight draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Feed {
    /// Which of the step's tokens it is.
    pub token: usize,
    /// The turn of the step that draws it.
    pub turn: usize,
    /// Which of that one's draws it is.
    pub draw: usize,
}

impl Rank {
    /// With a place in a group where the part is not all of the decoder.
    pub fn new(
        part: RankPart,
        peer: Option<PeerRank>,
        geometry: &Geometry,
        pages: PageType,
        replay: Replay,
    ) -> Result<Rank, DriverError> {
        let RankPart { device, config, weights, weights_region, first_token } = part;
        let regions = Regions { weights: weights_region, kv: Region::of(&device)? };
        let cache = Cache::new(&device.within(regions.kv.as_ref()), cache_shape(&config, geometry, pages))?;
        let Geometry { max_step_rows, max_step_tokens, max_step_logits, .. } = *geometry;
        let [rows, tokens, logits] = [max_step_rows, max_step_tokens, max_step_logits].map(|size| size as usize);
        let logits = if weights.head.is_some() { logits } else { 0 };
        let exchange = peer.map(|peer| Exchange { peer, first_token });
        let is_whole = weights.embedding().is_some() && weights.head.is_some();
        let changes = || Changes::new(&device, logits, config.vocabulary);
        let handover = (!is_whole).then(|| Handover::new(&device, tokens, config.hidden)).transpose()?;
        let (sizes, buckets) = (step_sizes(&config, weights.head.is_some(), geometry), Buckets::up_to(rows));
        let replayed = match replay {
            Replay::Graphs => buckets.sizes(sizes.reaches()),
            Replay::Eager => Vec::new(),
        };
        Ok(Rank {
            graphs: Graphs::new(replayed),
            buckets,
            replay,
            draws: Draws::new(&device, logits)?,
            changes: [changes()?, changes()?],
            moves: Moves::new(&device, &sizes)?,
            logits: device.pinned(logits * config.vocabulary)?,
            handover,
            compute: Compute::new(&device, config, weights, exchange, geometry, cache)?,
            regions,
            stream: device.stream()?,
            // Once all else is there: fields are made in this order.
            graph_room: GraphRoom::of(&device)?,
        })
    }

    /// Values of a token's logits.
    pub fn vocabulary(&self) -> usize {
        self.compute.config.vocabulary
    }

    /// Values of a token's activations.
    pub fn hidden(&self) -> usize {
        self.compute.config.hidden
    }

    /// Whether tokens are embedded here.
    pub fn embeds(&self) -> bool {
        self.compute.embeds()
    }

    /// Graphs captured so far.
    pub fn graphs(&self) -> usize {
        self.graphs.count()
    }

    /// As many as there may be.
    pub fn most_graphs(&self) -> usize {
        self.graphs.most()
    }

    /// The first size of a step that has none.
    pub fn missing_graph(&self) -> Option<GraphSize> {
        self.graphs.missing()
    }

    /// What its device has left for more of them.
    pub fn graph_room(&self) -> &GraphRoom {
        &self.graph_room
    }

    /// Captures the graph of a step that has not come yet. Nothing is in flight, and nothing runs.
    pub fn capture(&mut self, size: GraphSize) -> Result<(), DriverError> {
        self.regions.check("a capture")?;
        let Rank { graphs, compute, stream, .. } = self;
        let counts = compute.metadata.lay_out(size);
        graphs.capture(size, || stream.capture(|| compute.issue(&counts, stream)))
    }

    /// Issues a step, where any of its rows is computed.
    pub fn step(&mut self, step: &Step) -> Result<(), DriverError> {
        match step.batch.is_empty() {
            true => Ok(()),
            false => self.issue(&step.batch, &step.feeds),
        }
    }

    /// Issues a step's kernels from what the stage before gave, a row of activations for each token. The step before has
    /// been waited for.
    pub fn issue_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), DriverError> {
        let tokens = self.bucket(batch).unwrap_or(batch.tokens().len());
        let Rank { handover, compute, stream, .. } = self;
        let Some(handover) = handover else { return Err(DriverError::refused("a step", WHOLE)) };
        handover.bring(activations, compute.entry(tokens), stream)?;
        self.issue(batch, &[])
    }

    /// What the layers gave for the last step's `tokens` tokens, once it is done.
    pub fn activations(&self, tokens: usize) -> Result<Vec<f32>, DriverError> {
        match &self.handover {
            Some(handover) => handover.fetch(self.compute.activations(tokens), &self.stream),
            None => Err(DriverError::refused("activations", WHOLE)),
        }
    }

    /// Issues a step's kernels. The tokens of `feeds` lie on the device, or will when the kernels run.
    pub fn issue(&mut self, batch: &Batch, feeds: &[Feed]) -> Result<(), DriverError> {
        self.regions.check("a step")?;
        let bucket = self.bucket(batch);
        let Rank { graphs, compute, draws, stream, .. } = self;
        let counts = compute.metadata.upload(batch, bucket, stream)?;
        for (first, count) in runs(feeds) {
            let drawn = draws.on_device(first.turn, first.draw..first.draw + count);
            compute.metadata.feed(first.token, drawn, stream)?;
        }
        match bucket {
            None => compute.issue(&counts, stream),
            Some(bucket) => {
                let size = GraphSize { bucket, reach: counts.reach };
                match graphs.of_step(size, || stream.capture(|| compute.issue(&counts, stream)))? {
                    Some(graph) => stream.launch_graph(graph),
                    None => compute.issue(&counts, stream),
                }
            }
        }
    }

    /// The number of rows of one token that a step is padded to where it is replayed.
    fn bucket(&self, batch: &Batch) -> Option<usize> {
        let (tokens, logits) = (batch.tokens().len(), batch.logit_tokens().len());
        let all_alike = self.compute.metadata.decodes_alone(batch) && (tokens == logits || !self.compute.has_head());
        let repeats = self.replay == Replay::Graphs && all_alike;
        self.buckets.holding(tokens).filter(|_| repeats)
    }

    /// Has the device draw a token from each of the first rows of logits that the last step left, or tell of them, for the step
    /// of this turn: none that is in flight beside it has the same.
    pub fn draw(&mut self, turn: usize, answers: &[Answer]) -> Result<(), DriverError> {
        let (rows, vocabulary) = (answers.len(), self.vocabulary());
        let Rank { changes, draws, compute, stream, .. } = self;
        if answers.is_empty() {
            return draws.skip(turn, stream);
        }
        changes[turn].apply(answers, compute.logits_mut(rows), stream)?;
        draws.draw(turn, &sampler::draws(answers), compute.logits(rows), vocabulary, stream)
    }

    /// Waits for the step of this turn.
    pub fn wait(&self, turn: usize) -> Result<(), DriverError> {
        self.draws.wait(turn)
    }

    /// The tokens that the step of this turn drew; it has been waited for.
    pub fn drawn(&self, turn: usize, rows: usize) -> Vec<Drawn> {
        self.draws.drawn(turn, rows)
    }

    /// Waits for all that was issued.
    pub fn settle(&self) -> Result<(), DriverError> {
        self.stream.synchronize()
    }

    /// Draws from the first rows of logits that the last step left, or tells of them. No step may be in flight whose draws have
    /// not been read.
    pub fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, DriverError> {
        if tasks.is_empty() {
            // Also without logits: the step's numbers may be written over once this returns.
            return self.stream.synchronize().map(|()| Vec::new());
        }
        let answers = sampler::answers(tasks, self.vocabulary());
        for (row, _) in answers.iter().enumerate().filter(|(_, answer)| matches!(answer, Answer::OnHost)) {
            self.copy_logits(row)?;
        }
        self.draw(OWN_TURN, &answers)?;
        self.stream.synchronize()?;
        let drawn = self.draws.drawn(OWN_TURN, tasks.len());
        let rows = tasks.iter().zip(&answers).zip(drawn).enumerate();
        rows.map(|(row, ((task, answer), drawn))| self.read(row, task, answer, drawn)).collect()
    }

    /// What came of a row; `drawn` is what the device gave.
    fn read(
        &self,
        row: usize,
        task: &RowTask<'_>,
        answer: &Answer,
        drawn: Drawn,
    ) -> Result<Result<Drawn, SampleError>, DriverError> {
        match (answer, drawn.token) {
            (Answer::OnHost, _) => Ok(self.sample_on_host(row, task)),
            (Answer::OnDevice(_), ops::ALL_BANNED) => Ok(Err(SampleError::AllBanned)),
            (Answer::OnDevice(_), ops::NOT_FINITE) => {
                // The host says which token's logit it is.
                self.copy_logits(row)?;
                self.stream.synchronize()?;
                Ok(self.sample_on_host(row, task))
            }
            (Answer::OnDevice(_), _) => Ok(Ok(drawn)),
        }
    }

    fn sample_on_host(&self, row: usize, task: &RowTask<'_>) -> Result<Drawn, SampleError> {
        let mut logits = self.logits.read(row * self.vocabulary()..(row + 1) * self.vocabulary());
        crate::sampler::sample(&mut logits, task)
    }

    /// Has a row of logits copied to the host.
    fn copy_logits(&self, row: usize) -> Result<(), DriverError> {
        let place = row * self.vocabulary()..(row + 1) * self.vocabulary();
        self.stream.copy_to_host(&self.logits, place.start, self.compute.logits(row + 1).slice(place))
    }

    /// The first rows of logits that the last step left, one after the other, once it is done.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>, DriverError> {
        (0..rows).try_for_each(|row| self.copy_logits(row))?;
        self.stream.synchronize()?;
        Ok(self.logits.read(0..rows * self.vocabulary()))
    }

    /// The region of the weights.
    pub fn weights_region(&self) -> Option<&Arc<Region>> {
        self.regions.weights.as_ref()
    }

    /// Takes memory, or gives it back.
    pub fn hold(&mut self, what: Holding, held: bool) -> Result<(), DriverError> {
        self.stream.synchronize()?;
        if !held {
            self.graphs.end_unused();
        }
        self.regions.hold(what, held)
    }

    /// Copies keys and values of a block.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), DriverError> {
        self.regions.check("a copy")?;
        self.compute.cache.copy(from.0 as usize, to.0 as usize, &self.stream)
    }

    /// Moves keys and values of tokens, in order, behind the steps that were issued.
    pub fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), DriverError> {
        self.regions.check("a move")?;
        let Rank { moves: room, compute, stream, .. } = self;
        room.issue(moves, &mut compute.cache, stream)
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
fn runs(feeds: &[Feed]) -> Vec<(Feed, usize)> {
    let mut runs: Vec<(Feed, usize)> = Vec::new();
    for feed in feeds {
        match runs.last_mut() {
            Some((first, count))
                if feed.turn == first.turn
                    && feed.token == first.token + *count
                    && feed.draw == first.draw + *count =>
            {
                *count += 1;
            }
            _ => runs.push((*feed, 1)),
        }
    }
    runs
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
