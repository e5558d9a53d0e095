//! The ranks of a tensor-parallel group, driven as one model. Each rank has a thread, its part of the weights and its
//! own device.
//!
//! All ranks get the same calls in the same order, and meet in their collectives. The first rank computes on the
//! calling thread; logits and activations are read from it.

use std::convert::identity;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use windlass_engine_core::executor::Prepared;
use windlass_engine_core::plan::{BlockId, PlanRow, SwapSlotId};

use crate::batch::Batch;
use crate::decoder::{Model, StageModel, TokenMove};
use crate::panic::message;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::tier::Tier;

/// The part of a decoder, or of one stage, that one rank has on its device.
pub trait Rank: StageModel + Send + Sized + 'static {
    /// Whether calls return before the device has computed.
    const ENQUEUES: bool = false;

    /// Makes the other ranks stop waiting for this one.
    fn leave(&self, why: &str);

    /// Why the group cannot compute any more, if a rank has left; `None` while all ranks are there.
    fn why_left(&self) -> Option<Self::Error> {
        None
    }

    /// Waits for all enqueued work.
    fn synchronize(&self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// As [`Model::prepare`], for the whole group.
    fn prepare_group(_group: &mut Ranks<Self>) -> Result<Prepared, Self::Error> {
        Ok(Prepared::default())
    }
}

/// A decoder on one or more ranks.
#[derive(Debug)]
pub struct Ranks<R: Rank> {
    first: R,
    others: Vec<Follower<R>>,
}

/// The thread of a rank other than the first.
#[derive(Debug)]
struct Follower<R: Rank> {
    calls: Sender<Call<R>>,
    thread: JoinHandle<R>,
}

/// Work for a rank.
type Call<R> = Box<dyn Fn(&mut R) -> Result<(), <R as Model>::Error> + Send>;

impl<R: Rank> Ranks<R> {
    /// Starts a group of `first` and `others`, in the order of ranks.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(first: R, others: Vec<R>) -> io::Result<Ranks<R>> {
        let mut ranks = Ranks::alone(first);
        for (index, rank) in others.into_iter().enumerate() {
            ranks.others.push(Follower::start(index + 1, rank)?);
        }
        Ok(ranks)
    }

    /// A single rank with the whole decoder.
    pub(crate) fn alone(rank: R) -> Ranks<R> {
        Ranks { first: rank, others: Vec::new() }
    }

    /// Number of ranks.
    pub fn count(&self) -> usize {
        self.others.len() + 1
    }

    /// The first rank.
    pub(crate) fn first(&self) -> &R {
        &self.first
    }

    /// The first rank, mutable.
    pub(crate) fn first_mut(&mut self) -> &mut R {
        &mut self.first
    }

    /// Enqueues a call on every rank but the first.
    pub(crate) fn tell<C>(&self, call: impl FnOnce() -> C)
    where
        C: Fn(&mut R) -> Result<(), R::Error> + Send + Sync + 'static,
    {
        if self.others.is_empty() {
            return;
        }
        let call = Arc::new(call());
        for other in &self.others {
            let call = Arc::clone(&call);
            // A rank that has ended has left the group; the first rank learns why when it waits.
            let _ = other.calls.send(Box::new(move |rank| call(rank)));
        }
    }

    /// Runs a call on every rank, and returns the result of the first without waiting for the others.
    ///
    /// # Errors
    /// The error of the first rank, or why another rank has left.
    pub(crate) fn each<C>(&mut self, call: C) -> Result<(), R::Error>
    where
        C: Fn(&mut R) -> Result<(), R::Error> + Clone + Send + Sync + 'static,
    {
        self.tell(|| call.clone());
        let done = call(&mut self.first);
        self.checked(done)
    }

    /// As [`Ranks::each`], but waits until all ranks have run the call.
    pub(crate) fn each_to_its_end<C>(&mut self, call: C) -> Result<(), R::Error>
    where
        C: Fn(&mut R) -> Result<(), R::Error> + Clone + Send + Sync + 'static,
    {
        let (say_done, heard_done) = channel::<()>();
        let other = call.clone();
        self.tell(move || {
            // Dropped with the call: a rank that fails has left by then.
            move |rank: &mut R| {
                let _done = &say_done;
                other(rank)
            }
        });
        let done = call(&mut self.first);
        heard_done.iter().for_each(drop);
        self.checked(done)
    }

    /// The answers of all ranks to a question; those that have left do not answer.
    pub(crate) fn ask<T: Send + 'static>(&self, question: impl Fn(&R) -> T + Clone + Send + Sync + 'static) -> Vec<T> {
        let (say, heard) = channel();
        let other = question.clone();
        self.tell(move || {
            move |rank: &mut R| {
                // The asking thread may have failed and dropped the receiver.
                let _ = say.send(other(rank));
                Ok(())
            }
        });
        [question(&self.first)].into_iter().chain(heard).collect()
    }

    /// The result of the first rank, unless a rank has left: then the result is invalid, and the reason is returned.
    pub(crate) fn checked<T>(&self, result: Result<T, R::Error>) -> Result<T, R::Error> {
        if let Err(error) = &result {
            self.first.leave(&error.to_string());
        }
        match self.first.why_left() {
            Some(why) => Err(why),
            None => result,
        }
    }

    /// Makes the other ranks wait for their enqueued work; the caller then waits for the first.
    fn synchronize_others(&self) {
        if R::ENQUEUES {
            self.tell(|| |rank: &mut R| rank.synchronize());
        }
    }

    fn refuse_several(&self) -> io::Result<()> {
        match self.others.is_empty() {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::Unsupported, "blocks of several ranks are not swapped")),
        }
    }
}

impl<R: Rank> Model for Ranks<R> {
    type Error = R::Error;

    fn confine(&self) {
        self.first.confine();
    }

    fn prepare(&mut self) -> Result<Prepared, R::Error> {
        R::prepare_group(self)
    }

    fn hold_kv(&mut self, held: bool) -> Result<(), R::Error> {
        self.each_to_its_end(move |rank| rank.hold_kv(held))
    }

    fn check(row: &PlanRow) -> Result<(), String> {
        R::check(row)
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), R::Error> {
        self.tell(|| {
            let batch = batch.clone();
            move |rank: &mut R| rank.forward(&batch)
        });
        let done = self.first.forward(batch);
        self.checked(done)
    }

    /// The first rank samples: it has the complete logits.
    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, R::Error> {
        self.synchronize_others();
        let sampled = self.first.sample(tasks);
        self.checked(sampled)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), R::Error> {
        self.each(move |rank| rank.copy_block(from, to))
    }

    /// An error with several ranks: a swap slot has no room for the parts of all.
    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SwapSlotId) -> io::Result<()> {
        self.refuse_several()?;
        self.first.store_block(tier, block, slot)
    }

    /// An error with several ranks.
    fn load_block(&mut self, tier: &mut dyn Tier, slot: SwapSlotId, block: BlockId) -> io::Result<()> {
        self.refuse_several()?;
        self.first.load_block(tier, slot, block)
    }

    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), R::Error> {
        if moves.is_empty() {
            return Ok(());
        }
        self.tell(|| {
            let moves = moves.to_vec();
            move |rank: &mut R| rank.move_tokens(&moves)
        });
        let moved = self.first.move_tokens(moves);
        self.checked(moved)
    }
}

/// Each step ends before the next one is issued, because activations go through host memory.
impl<R: Rank> StageModel for Ranks<R> {
    fn hidden(&self) -> usize {
        self.first.hidden()
    }

    fn embeds(&self) -> bool {
        self.first.embeds()
    }

    fn forward_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), R::Error> {
        self.tell(|| {
            let (batch, activations) = (batch.clone(), activations.to_vec());
            move |rank: &mut R| rank.forward_from(&batch, &activations)
        });
        let done = self.first.forward_from(batch, activations);
        self.checked(done)
    }

    /// The activations of the first rank: all ranks have the same.
    fn activations(&mut self, tokens: usize) -> Result<Vec<f32>, R::Error> {
        self.synchronize_others();
        let activations = self.first.activations(tokens);
        self.checked(activations)
    }
}

impl<R: Rank> Drop for Ranks<R> {
    fn drop(&mut self) {
        // A rank in a collective would wait for ever.
        self.first.leave("the group has ended");
        // There is nothing to wait for on a lost device.
        let _ = self.first.synchronize();
        // Ranks may read each other's memory, so none is dropped before all threads have ended.
        let ended: Vec<Option<R>> = self.others.drain(..).map(Follower::end).collect();
        drop(ended);
    }
}

impl<R: Rank> Follower<R> {
    fn start(index: usize, rank: R) -> io::Result<Follower<R>> {
        let (calls, received) = channel();
        let thread = thread::Builder::new().name(format!("rank-{index}"));
        let thread = thread.spawn(move || follow(rank, &received))?;
        Ok(Follower { calls, thread })
    }

    /// Ends the thread and returns the rank, whose device is idle then.
    fn end(self) -> Option<R> {
        drop(self.calls);
        self.thread.join().ok()
    }
}

/// The thread of a rank. After an error or a panic the state of the rank is unknown, so it leaves the group; its memory
/// stays allocated until all ranks have ended.
fn follow<R: Rank>(mut rank: R, calls: &Receiver<Call<R>>) -> R {
    rank.confine();
    for call in calls {
        let attempt = catch_unwind(AssertUnwindSafe(|| call(&mut rank).map_err(|error| error.to_string())));
        // The call is dropped last: whoever waits for its end finds that a failed rank has left.
        if let Err(why) = attempt.map_err(|panic| message(panic.as_ref())).and_then(identity) {
            rank.leave(&why);
            break;
        }
    }
    // There is nothing to wait for on a lost device.
    let _ = rank.synchronize();
    rank
}
