//! A decoder on one GPU, or on the GPUs of a tensor-parallel group, driven as one.

use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use windlass_engine_core::executor::Prepared;
use windlass_engine_core::plan::{BlockId, PlanRow, SlotId};
use windlass_kernels::cuda::ops::PeerGroup;
use windlass_kernels::cuda::{DriverError, Region};

use super::follower::{Command, Follower};
use super::graphs::{GraphRoom, GraphSize};
use super::rank::{Feed, Holding, Rank, Step};
use super::sampler::Answer;
use super::{CudaError, support};
use crate::backend::TokenMove;
use crate::batch::Batch;
use crate::pipeline::StageModel;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::step::Model;
use crate::tier::Tier;

/// A decoder on one or more GPUs.
///
/// All ranks issue the same steps in the same order. They meet in their kernels, and draw the same tokens of the same
/// logits, so that no token goes from one to another. The first one issues on the calling thread.
#[derive(Debug)]
pub struct CudaDecoder {
    first: Rank,
    others: Vec<Follower>,
    /// Absent where there is one rank.
    peers: Option<Arc<PeerGroup>>,
    /// Where each rank's weights lie; none where the devices map no memory.
    weights: Option<Vec<Arc<Region>>>,
    /// What each rank's device has left for graphs.
    graph_rooms: Vec<GraphRoom>,
}

impl CudaDecoder {
    /// One rank alone.
    pub(super) fn alone(rank: Rank) -> CudaDecoder {
        let (weights, graph_rooms) = (weights_of([&rank]), vec![rank.graph_room().clone()]);
        CudaDecoder { first: rank, others: Vec::new(), peers: None, weights, graph_rooms }
    }

    /// A group of `first` and `others`, which are in the order of ranks.
    pub(super) fn group(first: Rank, others: Vec<Rank>, peers: Arc<PeerGroup>) -> io::Result<CudaDecoder> {
        let ranks = || [&first].into_iter().chain(&others);
        let (weights, graph_rooms) = (weights_of(ranks()), ranks().map(|rank| rank.graph_room().clone()).collect());
        let mut decoder =
            CudaDecoder { first, others: Vec::new(), peers: Some(Arc::clone(&peers)), weights, graph_rooms };
        for (index, rank) in others.into_iter().enumerate() {
            decoder.others.push(Follower::start(index + 1, rank, Arc::clone(&peers))?);
        }
        Ok(decoder)
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.others.len() + 1
    }

    /// Graphs captured so far, by each rank.
    pub fn graphs(&self) -> usize {
        self.first.graphs()
    }

    /// The first `rows` rows of logits that the last step left, `[rows, vocabulary]`, once it is done: for comparisons. Draws
    /// may have changed them, where something but the model decides what comes.
    ///
    /// # Panics
    /// When a step has no room for so many.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>, CudaError> {
        self.checked(self.first.logits(rows))
    }

    /// Values of a token's logits.
    pub(super) fn vocabulary(&self) -> usize {
        self.first.vocabulary()
    }

    /// Issues a step up to its logits. The tokens of `feeds` lie on the device, or will when the kernels run.
    pub(super) fn step(&mut self, batch: &mut Batch, feeds: Vec<Feed>) -> Result<(), CudaError> {
        // The batch's room is taken back below.
        let step = Arc::new(Step { batch: mem::take(batch), feeds });
        self.tell(|| Command::Step(Arc::clone(&step)));
        let issued = self.first.step(&step);
        if let Some(step) = Arc::into_inner(step) {
            *batch = step.batch;
        }
        self.checked(issued)
    }

    /// Issues the draws of the last step, which has this turn, from its logits in their order.
    pub(super) fn draw(&mut self, turn: usize, answers: Vec<Answer>) -> Result<(), CudaError> {
        let answers: Arc<[Answer]> = answers.into();
        self.tell(|| Command::Draw(turn, Arc::clone(&answers)));
        let issued = self.first.draw(turn, &answers);
        self.checked(issued)
    }

    /// Waits for the step of this turn, and gives the tokens that it drew.
    pub(super) fn drawn(&self, turn: usize, rows: usize) -> Result<Vec<Drawn>, CudaError> {
        // Each rank waits for its own device: the others would not hear from one that is lost.
        self.tell(|| Command::Wait(turn));
        self.checked(self.first.wait(turn))?;
        Ok(self.first.drawn(turn, rows))
    }

    /// As [`windlass_engine_core::executor::Executor::weights_to_move`].
    pub(super) fn weights_to_move(&self) -> Option<u64> {
        let regions = self.weights.as_ref()?;
        Some(regions.iter().map(|region| region.bytes_to_keep() as u64).sum())
    }

    /// Takes the devices' memory of weights again, or has the host keep them meanwhile.
    pub(super) fn hold_weights(&mut self, held: bool) -> Result<(), CudaError> {
        self.hold(Holding::Weights, held)
    }

    fn hold(&mut self, what: Holding, held: bool) -> Result<(), CudaError> {
        self.on_all(|done| Command::Hold(what, held, done), |first| first.hold(what, held))
    }

    /// The graph that is captured next, ahead of the first step of its size. All ranks have those of the same sizes.
    fn graph_ahead(&self) -> Result<Option<GraphSize>, CudaError> {
        let Some(size) = self.first.missing_graph() else { return Ok(None) };
        let left = self.graph_rooms.iter().map(GraphRoom::is_left).collect::<Result<Vec<bool>, _>>()?;
        Ok(Some(size).filter(|_| !left.contains(&false)))
    }

    /// Has every rank do something, and waits until all have.
    fn on_all(
        &mut self,
        command: impl Fn(Sender<()>) -> Command,
        own: impl FnOnce(&mut Rank) -> Result<(), DriverError>,
    ) -> Result<(), CudaError> {
        let (say_done, heard_done) = channel();
        self.tell(|| command(say_done.clone()));
        drop(say_done);
        let done = own(&mut self.first);
        // Ends with the last word: a rank that failed has left the group, and its sender with it.
        heard_done.iter().for_each(drop);
        self.checked(done)
    }

    fn tell(&self, command: impl Fn() -> Command) {
        self.others.iter().for_each(|other| other.tell(command()));
    }

    /// What came of the first rank's part, unless a rank has left: what is computed then means nothing.
    fn checked<T>(&self, result: Result<T, DriverError>) -> Result<T, CudaError> {
        let Some(peers) = &self.peers else { return Ok(result?) };
        if let Err(error) = &result {
            peers.leave(0, &error.to_string());
        }
        match peers.why_left() {
            Some(why) => Err(CudaError::RankLeft(why)),
            None => Ok(result?),
        }
    }
}

fn weights_of<'a>(ranks: impl IntoIterator<Item = &'a Rank>) -> Option<Vec<Arc<Region>>> {
    ranks.into_iter().map(|rank| rank.weights_region().cloned()).collect()
}

impl Drop for CudaDecoder {
    fn drop(&mut self) {
        let Some(peers) = &self.peers else { return };
        // A rank that waits for another would wait for ever.
        peers.leave(0, "the group has ended");
        // A device that is lost has nothing to wait for.
        let _ = self.first.settle();
        // Ranks read each other's memory: none gives it back before all have ended.
        let ended: Vec<Option<Rank>> = self.others.drain(..).map(Follower::end).collect();
        drop(ended);
    }
}

impl Model for CudaDecoder {
    type Error = CudaError;

    /// Captures a graph on every rank.
    fn prepare(&mut self) -> Result<Prepared, CudaError> {
        let ahead = self.graph_ahead()?;
        if let Some(size) = ahead {
            self.on_all(|done| Command::Capture(size, done), |first| first.capture(size))?;
        }
        let [done, all] = [self.first.graphs(), self.first.most_graphs()].map(|graphs| graphs as u32);
        Ok(Prepared { done, all, went_on: ahead.is_some() })
    }

    fn hold_kv(&mut self, held: bool) -> Result<(), CudaError> {
        self.hold(Holding::Kv, held)
    }

    fn check(row: &PlanRow) -> Result<(), String> {
        support::check_row(row)
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), CudaError> {
        if !self.others.is_empty() {
            let batch = Arc::new(batch.clone());
            self.tell(|| Command::Forward(Arc::clone(&batch)));
        }
        let issued = self.first.issue(batch, &[]);
        self.checked(issued)
    }

    /// By the first rank: all hold the same logits.
    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, CudaError> {
        self.tell(|| Command::Settle);
        let sampled = self.first.sample(tasks);
        self.checked(sampled)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), CudaError> {
        self.tell(|| Command::CopyBlock(from, to));
        let copied = self.first.copy_block(from, to);
        self.checked(copied)
    }

    fn store_block(&mut self, _tier: &mut dyn Tier, _block: BlockId, _slot: SlotId) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn load_block(&mut self, _tier: &mut dyn Tier, _slot: SlotId, _block: BlockId) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), CudaError> {
        if moves.is_empty() {
            return Ok(());
        }
        self.tell(|| Command::MoveTokens(moves.into()));
        let moved = self.first.move_tokens(moves);
        self.checked(moved)
    }
}

/// A step is waited for before the next one is issued: activations go through the host.
impl StageModel for CudaDecoder {
    fn hidden(&self) -> usize {
        self.first.hidden()
    }

    fn embeds(&self) -> bool {
        self.first.embeds()
    }

    fn forward_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), CudaError> {
        if !self.others.is_empty() {
            let (batch, activations) = (Arc::new(batch.clone()), Arc::<[f32]>::from(activations));
            self.tell(|| Command::ForwardFrom(Arc::clone(&batch), Arc::clone(&activations)));
        }
        let issued = self.first.issue_from(batch, activations);
        self.checked(issued)
    }

    /// Those of the first rank: all hold the same.
    fn activations(&self, tokens: usize) -> Result<Vec<f32>, CudaError> {
        self.tell(|| Command::Settle);
        self.checked(self.first.activations(tokens))
    }
}
