//! A decoder on one GPU: what a step needs of the device besides its kernels.

use std::io;

use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::{BlockId, PlanRow, SlotId};
use windlass_kernels::cuda::{Device, DriverError, Pinned, Stream};

use super::cache::{Cache, CacheShape, PageType};
use super::compute::{Compute, cache_shape};
use super::draws::{Draws, RowDraw};
use super::graphs::{Buckets, Graphs};
use super::weights::Weights;
use super::{CudaError, Replay, support};
use crate::backend::TokenMove;
use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::sampler::{self, Drawn, RowTask, SampleError};
use crate::step::Model;
use crate::tier::Tier;

/// A decoder on one GPU.
///
/// Fields are dropped in their order: graphs name the memory of what follows them.
#[derive(Debug)]
pub struct CudaDecoder {
    graphs: Graphs,
    buckets: Buckets,
    replay: Replay,
    compute: Compute,
    draws: Draws,
    /// Logits on their way to the sampler of the host.
    logits: Pinned<f32>,
    /// The cache while its memory is held.
    cache: CacheShape,
    stream: Stream,
    device: Device,
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

impl CudaDecoder {
    pub(super) fn new(
        device: &Device,
        config: DecoderConfig,
        weights: Weights,
        geometry: &Geometry,
        pages: PageType,
        replay: Replay,
    ) -> Result<CudaDecoder, DriverError> {
        let cache = cache_shape(&config, geometry, pages);
        let [rows, logits] = [geometry.max_step_rows, geometry.max_step_logits].map(|size| size as usize);
        Ok(CudaDecoder {
            graphs: Graphs::default(),
            buckets: Buckets::up_to(rows),
            replay,
            draws: Draws::new(device, rows)?,
            logits: device.pinned(logits * config.vocabulary)?,
            compute: Compute::new(device, config, weights, geometry, cache)?,
            cache,
            stream: device.stream()?,
            device: device.clone(),
        })
    }

    /// Graphs captured so far.
    pub fn graphs(&self) -> usize {
        self.graphs.count()
    }

    /// Issues a step's kernels. The tokens of `feeds` lie on the device, or will when the kernels run.
    pub(super) fn issue(&mut self, batch: &Batch, feeds: &[Feed]) -> Result<(), DriverError> {
        let CudaDecoder { graphs, compute, draws, stream, .. } = self;
        let (rows, tokens, logits) = (batch.rows().len(), batch.tokens().len(), batch.logit_tokens().len());
        let repeats = self.replay == Replay::Graphs && rows == tokens && rows == logits;
        let bucket = self.buckets.holding(rows).filter(|_| repeats);
        let counts = compute.metadata.upload(batch, bucket, stream)?;
        for (first, count) in runs(feeds) {
            let drawn = draws.on_device(first.turn, first.draw..first.draw + count);
            compute.metadata.feed(first.token, drawn, stream)?;
        }
        match bucket {
            None => compute.issue(&counts, stream),
            Some(bucket) => {
                let graph = graphs.get_or_capture(bucket, || stream.capture(|| compute.issue(&counts, stream)))?;
                stream.launch_graph(graph)
            }
        }
    }

    /// Draws a token from each of the first rows of logits, for the step of this turn.
    pub(super) fn draw(&mut self, turn: usize, draws: &[RowDraw<'_>]) -> Result<(), DriverError> {
        match draws {
            [] => self.draws.skip(turn, &self.stream),
            draws => {
                let vocabulary = self.compute.config.vocabulary;
                self.draws.draw(turn, draws, self.compute.logits(draws.len()), vocabulary, &self.stream)
            }
        }
    }

    /// Waits for the step of this turn, and gives the tokens that it drew.
    pub(super) fn drawn(&self, turn: usize, rows: usize) -> Result<Vec<u32>, DriverError> {
        self.draws.wait(turn, rows)
    }
}

impl Model for CudaDecoder {
    type Error = CudaError;

    /// Graphs know where the cache was, so they go with it.
    fn hold_kv(&mut self, held: bool) -> Result<(), CudaError> {
        self.stream.synchronize()?;
        self.graphs.clear();
        self.compute.cache = None;
        if held {
            self.compute.cache = Some(Cache::new(&self.device, self.cache)?);
        }
        Ok(())
    }

    fn check(&self, row: &PlanRow) -> Result<(), String> {
        support::check_row(row)
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), CudaError> {
        Ok(self.issue(batch, &[])?)
    }

    /// On the host: what the device's sampler does not do.
    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, CudaError> {
        let vocabulary = self.compute.config.vocabulary;
        if !tasks.is_empty() {
            self.stream.copy_to_host(&self.logits, 0, self.compute.logits(tasks.len()))?;
        }
        // Also without logits: the step's numbers may be written over once this returns.
        self.stream.synchronize()?;
        let mut logits = self.logits.read(0..tasks.len() * vocabulary);
        Ok(logits.chunks_exact_mut(vocabulary).zip(tasks).map(|(row, task)| sampler::sample(row, task)).collect())
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), CudaError> {
        match &mut self.compute.cache {
            Some(cache) => Ok(cache.copy(from.0 as usize, to.0 as usize, &self.stream)?),
            None => Err(DriverError::refused("a copy", "the KV cache was given back").into()),
        }
    }

    fn store_block(&mut self, _tier: &mut dyn Tier, _block: BlockId, _slot: SlotId) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn load_block(&mut self, _tier: &mut dyn Tier, _slot: SlotId, _block: BlockId) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), CudaError> {
        match moves {
            [] => Ok(()),
            _ => Err(CudaError::unsupported("guesses that branch", "no speculation")),
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
