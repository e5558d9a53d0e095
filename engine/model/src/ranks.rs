//! The ranks of a tensor-parallel group, driven as one: each has a thread, its part of the weights and its own device.
//!
//! All get the same commands in the same order; they meet in their backends' collectives. The first rank computes on
//! the calling thread, and logits are whole on it alone.

use std::convert::Infallible;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use windlass_engine_core::plan::{BlockId, SlotId};
use windlass_kernels::processors;

use crate::backend::{Backend, TokenMove};
use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::decoder::Decoder;
use crate::panic::message;
use crate::pipeline::StageModel;
use crate::sampler::{Drawn, RowTask, SampleError};
use crate::step::Model;
use crate::tier::Tier;
use crate::weights::DecoderWeights;

/// One rank, loaded.
pub struct Rank<B: Backend> {
    /// Its part of the decoder.
    pub decoder: Decoder<B>,
    /// The processors that its thread is confined to; empty for any.
    pub processors: Vec<usize>,
}

/// A decoder on one or more ranks.
pub struct Ranks<B: Backend> {
    first: Rank<B>,
    others: Vec<Follower>,
}

/// The thread of a rank that is not the first.
#[derive(Debug)]
struct Follower {
    /// Absent while it is dropped: the thread ends when it is gone.
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone, Debug)]
enum Command {
    Forward(Arc<Batch>),
    ForwardFrom(Arc<Batch>, Arc<[f32]>),
    CopyBlock(BlockId, BlockId),
    MoveTokens(Arc<[TokenMove]>),
    HoldKv(bool),
}

impl<B> Ranks<B>
where
    B: Backend<Matrix: Send, Vector: Send, Buffer: Send> + Send + 'static,
{
    /// A group of `first` and `others`, which are in the order of ranks.
    pub fn start(first: Rank<B>, others: Vec<Rank<B>>) -> io::Result<Ranks<B>> {
        let mut ranks = Ranks { first, others: Vec::new() };
        for (index, rank) in others.into_iter().enumerate() {
            ranks.others.push(Follower::start(index + 1, rank)?);
        }
        Ok(ranks)
    }
}

impl<B: Backend> Ranks<B> {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.others.len() + 1
    }

    /// The first rank's part of the decoder.
    pub fn config(&self) -> &DecoderConfig {
        self.first.decoder.config()
    }

    /// The first rank's device.
    pub fn backend(&self) -> &B {
        self.first.decoder.backend()
    }

    /// The first rank's weights.
    pub fn weights(&self) -> &DecoderWeights<B> {
        self.first.decoder.weights()
    }

    /// Makes the calling thread the first rank's.
    pub fn settle(&self) {
        settle(&self.first.processors);
    }

    /// As [`Decoder::forward`].
    ///
    /// # Panics
    /// As that, and when another rank has failed.
    pub fn forward(&mut self, batch: &Batch) {
        self.tell(|| Command::Forward(Arc::new(batch.clone())));
        self.first.decoder.forward(batch);
    }

    /// As [`Decoder::forward_from`].
    ///
    /// # Panics
    /// As that, and when another rank has failed.
    pub fn forward_from(&mut self, batch: &Batch, activations: &[f32]) {
        self.tell(|| Command::ForwardFrom(Arc::new(batch.clone()), activations.into()));
        self.first.decoder.forward_from(batch, activations);
    }

    /// As [`Decoder::activations`].
    pub fn activations(&self, tokens: usize) -> Vec<f32> {
        self.first.decoder.activations(tokens)
    }

    /// As [`Decoder::copy_block`].
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        self.tell(|| Command::CopyBlock(from, to));
        self.first.decoder.copy_block(from, to);
    }

    /// As [`Decoder::hold_kv`], on every rank of this process.
    pub fn hold_kv(&mut self, held: bool) {
        self.tell(|| Command::HoldKv(held));
        self.first.decoder.hold_kv(held);
    }

    /// As [`Decoder::move_tokens`].
    pub fn move_tokens(&mut self, moves: &[TokenMove]) {
        if !moves.is_empty() {
            self.tell(|| Command::MoveTokens(moves.into()));
            self.first.decoder.move_tokens(moves);
        }
    }

    /// As [`Decoder::store_block`]; an error with more ranks than one, whose parts a slot has no room for.
    pub fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SlotId) -> io::Result<()> {
        self.refuse_several()?;
        self.first.decoder.store_block(tier, block, slot)
    }

    /// As [`Decoder::load_block`]; an error with more ranks than one.
    pub fn load_block(&mut self, tier: &mut dyn Tier, slot: SlotId, block: BlockId) -> io::Result<()> {
        self.refuse_several()?;
        self.first.decoder.load_block(tier, slot, block)
    }

    fn refuse_several(&self) -> io::Result<()> {
        match self.others.is_empty() {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::Unsupported, "blocks of several ranks are not swapped")),
        }
    }

    /// As [`Decoder::sample`].
    pub fn sample(&mut self, tasks: &[RowTask<'_>]) -> Vec<Result<Drawn, SampleError>> {
        self.first.decoder.sample(tasks)
    }

    /// As [`Decoder::logits`].
    pub fn logits(&self, rows: usize) -> Vec<f32> {
        self.first.decoder.logits(rows)
    }

    fn tell(&self, command: impl FnOnce() -> Command) {
        if self.others.is_empty() {
            return;
        }
        let command = command();
        for commands in self.others.iter().filter_map(|other| other.commands.as_ref()) {
            // A rank that has ended has left the group, and the first rank will hear why when it waits for it.
            let _ = commands.send(command.clone());
        }
    }
}

impl<B: Backend> Model for Ranks<B> {
    type Error = Infallible;

    fn settle(&self) {
        self.settle();
    }

    fn hold_kv(&mut self, held: bool) -> Result<(), Infallible> {
        self.hold_kv(held);
        Ok(())
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), Infallible> {
        self.forward(batch);
        Ok(())
    }

    fn sample(&mut self, tasks: &[RowTask<'_>]) -> Result<Vec<Result<Drawn, SampleError>>, Infallible> {
        Ok(self.sample(tasks))
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), Infallible> {
        self.copy_block(from, to);
        Ok(())
    }

    fn store_block(&mut self, tier: &mut dyn Tier, block: BlockId, slot: SlotId) -> io::Result<()> {
        self.store_block(tier, block, slot)
    }

    fn load_block(&mut self, tier: &mut dyn Tier, slot: SlotId, block: BlockId) -> io::Result<()> {
        self.load_block(tier, slot, block)
    }

    fn move_tokens(&mut self, moves: &[TokenMove]) -> Result<(), Infallible> {
        self.move_tokens(moves);
        Ok(())
    }
}

impl<B: Backend> StageModel for Ranks<B> {
    fn hidden(&self) -> usize {
        self.config().hidden
    }

    fn embeds(&self) -> bool {
        self.weights().embeds()
    }

    fn forward_from(&mut self, batch: &Batch, activations: &[f32]) -> Result<(), Infallible> {
        self.forward_from(batch, activations);
        Ok(())
    }

    fn activations(&self, tokens: usize) -> Result<Vec<f32>, Infallible> {
        Ok(self.activations(tokens))
    }
}

impl<B: Backend> Drop for Ranks<B> {
    fn drop(&mut self) {
        // One that waits for the first rank would wait for ever.
        self.first.decoder.backend().leave("the group has ended");
    }
}

impl Follower {
    fn start<B>(index: usize, rank: Rank<B>) -> io::Result<Follower>
    where
        B: Backend<Matrix: Send, Vector: Send, Buffer: Send> + Send + 'static,
    {
        let (commands, received) = channel();
        let thread = thread::Builder::new().name(format!("rank-{index}"));
        let thread = thread.spawn(move || follow(rank, &received))?;
        Ok(Follower { commands: Some(commands), thread: Some(thread) })
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // It catches its panics; there is nothing in its result.
            let _ = thread.join();
        }
    }
}

/// A rank's life. After a panic its state is unknown, so it leaves the group.
fn follow<B: Backend>(mut rank: Rank<B>, commands: &Receiver<Command>) {
    settle(&rank.processors);
    let decoder = &mut rank.decoder;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        for command in commands {
            match command {
                Command::Forward(batch) => decoder.forward(&batch),
                Command::ForwardFrom(batch, activations) => decoder.forward_from(&batch, &activations),
                Command::CopyBlock(from, to) => decoder.copy_block(from, to),
                Command::MoveTokens(moves) => decoder.move_tokens(&moves),
                Command::HoldKv(held) => decoder.hold_kv(held),
            }
        }
    }));
    if let Err(panic) = outcome {
        rank.decoder.backend().leave(&message(panic.as_ref()));
    }
}

fn settle(processors: &[usize]) {
    if !processors.is_empty() {
        processors::confine(processors);
    }
}
