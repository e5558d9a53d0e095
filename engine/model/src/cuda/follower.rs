//! The thread of a rank that is not the first: it issues what the first one does, in the same order.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use windlass_engine_core::plan::BlockId;
use windlass_kernels::cuda::DriverError;
use windlass_kernels::cuda::ops::PeerGroup;

use super::graphs::GraphSize;
use super::rank::{Holding, Rank, Step};
use super::sampler::Answer;
use crate::backend::TokenMove;
use crate::batch::Batch;
use crate::panic::message;

/// What a rank is told.
#[derive(Debug)]
pub(super) enum Command {
    /// Issue a step whose tokens devices draw.
    Step(Arc<Step>),
    /// Issue the draws of the step of a turn.
    Draw(usize, Arc<[Answer]>),
    /// Issue a step whose tokens the host draws.
    Forward(Arc<Batch>),
    /// The same from what the stage before gave.
    ForwardFrom(Arc<Batch>, Arc<[f32]>),
    /// Wait for the step of a turn.
    Wait(usize),
    /// Wait for everything.
    Settle,
    CopyBlock(BlockId, BlockId),
    MoveTokens(Arc<[TokenMove]>),
    /// Capture a graph ahead, and say when that is done.
    Capture(GraphSize, Sender<()>),
    /// Take memory, or give it back, and say when that is done.
    Hold(Holding, bool, Sender<()>),
}

/// A rank's thread.
#[derive(Debug)]
pub(super) struct Follower {
    commands: Sender<Command>,
    thread: JoinHandle<Rank>,
}

impl Follower {
    pub fn start(index: usize, rank: Rank, peers: Arc<PeerGroup>) -> io::Result<Follower> {
        let (commands, received) = channel();
        let thread = thread::Builder::new().name(format!("rank-{index}"));
        let thread = thread.spawn(move || follow(index, rank, &peers, &received))?;
        Ok(Follower { commands, thread })
    }

    pub fn tell(&self, command: Command) {
        // A rank that has ended has left the group, and the first one hears why when it waits.
        let _ = self.commands.send(command);
    }

    /// Ends the thread, and gives the rank, whose device has come to rest.
    pub fn end(self) -> Option<Rank> {
        drop(self.commands);
        self.thread.join().ok()
    }
}

/// A rank's life. After an error its state is unknown, so it leaves the group; its memory stays until all have ended.
fn follow(index: usize, mut rank: Rank, peers: &PeerGroup, commands: &Receiver<Command>) -> Rank {
    for command in commands {
        // The command goes last: who waits for it to be done finds a rank that has failed gone.
        if let Err(why) = attempt(&mut rank, &command) {
            peers.leave(index, &why);
            break;
        }
    }
    // A device that is lost has nothing to wait for.
    let _ = rank.settle();
    rank
}

fn attempt(rank: &mut Rank, command: &Command) -> Result<(), String> {
    match catch_unwind(AssertUnwindSafe(|| carry_out(rank, command))) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(panic) => Err(message(panic.as_ref())),
    }
}

fn carry_out(rank: &mut Rank, command: &Command) -> Result<(), DriverError> {
    match command {
        Command::Step(step) => rank.step(step),
        Command::Draw(turn, answers) => rank.draw(*turn, answers),
        Command::Forward(batch) => rank.issue(batch, &[]),
        Command::ForwardFrom(batch, activations) => rank.issue_from(batch, activations),
        Command::Wait(turn) => rank.wait(*turn),
        Command::Settle => rank.settle(),
        Command::CopyBlock(from, to) => rank.copy_block(*from, *to),
        Command::MoveTokens(moves) => rank.move_tokens(moves),
        Command::Capture(size, done) => rank.capture(*size).map(|()| say(done)),
        Command::Hold(what, held, done) => rank.hold(*what, *held).map(|()| say(done)),
    }
}

fn say(done: &Sender<()>) {
    // Whoever asked may have failed and gone.
    let _ = done.send(());
}
