//! The ranks of a tensor-parallel group, driven as one: each has a thread, its part of the weights and its own device.
//!
//! All get the same calls in the same order, and meet in their collectives. The first rank computes on the calling thread; logits
//! and activations are read from it.

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

/// One rank's part of a decoder, or of a stage of one, on its device.
pub trait Rank: StageModel + Send + Sized + 'static {
    /// Whether calls return before the device has computed what they ask for.
    const ENQUEUES: bool = false;

    /// Tells the other ranks not to wait for this one any more.
    fn leave(&self, why: &str);

    /// Why nothing can be computed any more, where a rank of the group has left and this one goes on all the same.
    fn why_left(&self) -> Option<Self::Error> {
        None
    }

    /// Waits for all that was enqueued.
    fn synchronize(&self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// As [`Model::prepare`], of the whole group.
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

/// The thread of a rank that is not the first.
#[derive(Debug)]
struct Follower<R: Rank> {
    calls: Sender<Call<R>>,
    thread: JoinHandle<R>,
}

/// What a rank is to do.
type Call<R> = Box<dyn Fn(&mut R) -> Result<(), <R as Model>::Error> + Send>;

impl<R: Rank> Ranks<R> {
    /// A group of `first` and `others`, which are in the order of ranks.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(first: R, others: Vec<R>) -> io::Result<Ranks<R>> {
        let mut ranks = Ranks::alone(first);
        for (index, rank) in others.into_iter().enumerate() {
            ranks.others.push(Follower::start(index + 1, rank)?);
        }
        Ok(ranks)
    }

    /// One rank that has the whole decoder.
    pub(crate) fn alone(rank: R) -> Ranks<R> {
        Ranks { first: rank, others: Vec::new() }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.others.len() + 1
    }

    /// The first rank.
    pub(crate) fn first(&self) -> &R {
        &self.first
    }

    /// The same, to change.
    pub(crate) fn first_mut(&mut self) -> &mut R {
        &mut self.first
    }

    /// Has every rank but the first do something.
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
            // A rank that has ended has left the group, and the first one hears why when it waits.
            let _ = other.calls.send(Box::new(move |rank| call(rank)));
        }
    }

    /// Has every rank do something, and gives what came of it on the first.
    ///
    /// # Errors
    /// The first rank's, or why another has left.
    pub(crate) fn each<C>(&mut self, call: C) -> Result<(), R::Error>
    where
        C: Fn(&mut R) -> Result<(), R::Error> + Clone + Send + Sync + 'static,
    {
        self.tell(|| call.clone());
        let done = call(&mut self.first);
        self.checked(done)
    }

    /// The same, and waits until all have done it.
    pub(crate) fn each_to_its_end<C>(&mut self, call: C) -> Result<(), R::Error>
    where
        C: Fn(&mut R) -> Result<(), R::Error> + Clone + Send + Sync + 'static,
    {
        let (say_done, heard_done) = channel::<()>();
        let other = call.clone();
        self.tell(move || {
            // Gone with the call: a rank that fails has left by then.
            move |rank: &mut R| {
                let _done = &say_done;
                other(rank)
            }
        });
        let done = call(&mut self.first);
        heard_done.iter().for_each(drop);
        self.checked(done)
    }

    /// What every rank says to a question; nothing of those that have left.
    pub(crate) fn ask<T: Send + 'static>(&self, question: impl Fn(&R) -> T + Clone + Send + Sync + 'static) -> Vec<T> {
        let (say, heard) = channel();
        let other = question.clone();
        self.tell(move || {
            move |rank: &mut R| {
                // Whoever asked may have failed and gone.
                let _ = say.send(other(rank));
                Ok(())
            }
        });
        [question(&self.first)].into_iter().chain(heard).collect()
    }

    /// What came of the first rank's part, unless a rank has left: what is computed then means nothing.
    pub(crate) fn checked<T>(&self, result: Result<T, R::Error>) -> Result<T, R::Error> {
        if let Err(error) = &result {
            self.first.leave(&error.to_string());
        }
        match self.first.why_left() {
            Some(why) => Err(why),
            None => result,
        }
    }

    /// Has the other ranks wait for what they enqueued, as the first one is about to.
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

    /// By the first rank, on which logits are whole.
    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, R::Error> {
        self.synchronize_others();
        let sampled = self.first.sample(tasks);
        self.checked(sampled)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), R::Error> {
        self.each(move |rank| rank.copy_block(from, to))
    }

    /// An error with more ranks than one, whose parts a slot has no room for.
    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SwapSlotId) -> io::Result<()> {
        self.refuse_several()?;
        self.first.store_block(tier, block, slot)
    }

    /// An error with more ranks than one.
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

/// A step is waited for before the next one is issued: activations go through the host.
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

    /// Those of the first rank: all hold the same.
    fn activations(&mut self, tokens: usize) -> Result<Vec<f32>, R::Error> {
        self.synchronize_others();
        let activations = self.first.activations(tokens);
        self.checked(activations)
    }
}

impl<R: Rank> Drop for Ranks<R> {
    fn drop(&mut self) {
        // A rank that waits for another would wait for ever.
        self.first.leave("the group has ended");
        // A device that is lost has nothing to wait for.
        let _ = self.first.synchronize();
        // Ranks may read each other's memory: none gives it back before all have ended.
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

    /// Ends the thread, and gives the rank, whose device has come to rest.
    fn end(self) -> Option<R> {
        drop(self.calls);
        self.thread.join().ok()
    }
}

/// A rank's life. After an error or a panic its state is unknown, so it leaves the group; its memory stays until all have ended.
fn follow<R: Rank>(mut rank: R, calls: &Receiver<Call<R>>) -> R {
    rank.confine();
    for call in calls {
        let attempt = catch_unwind(AssertUnwindSafe(|| call(&mut rank).map_err(|error| error.to_string())));
        // The call goes last: who waits for its end finds a rank that has failed gone.
        if let Err(why) = attempt.map_err(|panic| message(panic.as_ref())).and_then(identity) {
            rank.leave(&why);
            break;
        }
    }
    // A device that is lost has nothing to wait for.
    let _ = rank.synchronize();
    rank
}
