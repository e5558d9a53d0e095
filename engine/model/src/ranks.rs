//! The ranks of a tensor-parallel group, driven as one: each has a thread, its part of the weights and its own device.
//!
//! All get the same commands in the same order; they meet in their backends' collectives. The first rank computes on
//! the calling thread, and logits are whole on it alone.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use windlass_engine_core::plan::BlockCopy;
use windlass_kernels::processors;

use crate::backend::Backend;
use crate::batch::Batch;
use crate::config::DecoderConfig;
use crate::decoder::Decoder;
use crate::panic::message;
use crate::sampler::{Drawn, RowTask, SampleError};
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
    CopyBlocks(Arc<[BlockCopy]>),
}

impl<B> Ranks<B>
where
    B: Backend + Send + 'static,
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

    /// The first rank's part of the decoder, to drive it step by step.
    pub(crate) fn first_mut(&mut self) -> &mut Decoder<B> {
        &mut self.first.decoder
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

    /// As [`Decoder::copy_blocks`].
    pub fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        if !copies.is_empty() {
            self.tell(|| Command::CopyBlocks(copies.into()));
            self.first.decoder.copy_blocks(copies);
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

impl<B: Backend> Drop for Ranks<B> {
    fn drop(&mut self) {
        // One that waits for the first rank would wait for ever.
        self.first.decoder.backend().leave("the group has ended");
    }
}

impl Follower {
    fn start<B>(index: usize, rank: Rank<B>) -> io::Result<Follower>
    where
        B: Backend + Send + 'static,
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
                Command::CopyBlocks(copies) => decoder.copy_blocks(&copies),
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
