//! An engine that gives its memory back for a while.

use super::handle::{Command, Submission};
use super::step_loop::StepLoop;
use crate::failure::Failure;
use tokio::sync::oneshot;
use windlass_engine_core::engine::Engine;
use windlass_engine_core::executor::{Executor, ExecutorError};
use windlass_engine_core::update::EngineStats;

/// How much is given back, by vLLM's levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// 1: keys and values. The weights stay in memory.
    KeepsWeights,
    /// 2: everything. Waking reads the model again.
    DropsWeights,
}

/// Makes an engine of an executor that kept its weights, or from the model's files, and generates a token.
pub type Revive<E> = Box<dyn FnMut(Option<E>) -> Result<Engine<E>, Failure> + Send>;

/// What wakes a sleeping engine, with what came too early.
struct Call {
    woken: oneshot::Sender<Result<(), Failure>>,
    early: Vec<Submission>,
}

impl<E: Executor> StepLoop<E> {
    /// Sleeps until it is woken. Requests are live no more; `None` when nobody is left to wake it.
    pub(super) fn sleep(self, depth: Depth, asleep: oneshot::Sender<()>) -> Result<Option<StepLoop<E>>, ExecutorError> {
        let StepLoop {
            engine, revive, commands, live, monitor, clock, last_arrival_seconds, published_seconds, ..
        } = self;
        let mut executor = engine.into_executor();
        executor.hold_kv(false)?;
        let mut kept = (depth == Depth::KeepsWeights).then_some(executor);
        let (mut commands, mut revive) = (commands, revive);
        monitor.idle();
        // Whoever asked may have gone.
        let _ = asleep.send(());
        let mut early = Vec::new();
        loop {
            let Some(call) = wait(&mut commands.receiver, early) else { return Ok(None) };
            early = call.early;
            match revive(kept.take()) {
                Ok(engine) => {
                    let _ = call.woken.send(Ok(()));
                    let mut awake = StepLoop {
                        engine,
                        revive,
                        commands,
                        live,
                        monitor,
                        clock,
                        last_arrival_seconds,
                        published: EngineStats::default(),
                        published_seconds,
                    };
                    early.into_iter().for_each(|submission| awake.submit(submission));
                    return Ok(Some(awake));
                }
                // It sleeps on, by now without weights.
                Err(failure) => drop(call.woken.send(Err(failure))),
            }
        }
    }
}

/// Waits for the call to wake.
fn wait(receiver: &mut tokio::sync::mpsc::Receiver<Command>, mut early: Vec<Submission>) -> Option<Call> {
    loop {
        match receiver.blocking_recv()? {
            Command::Wake(woken) => return Some(Call { woken, early }),
            Command::Sleep(_, asleep) => drop(asleep.send(())),
            // It was let in before the door was closed.
            Command::Submit(submission) => early.push(*submission),
            Command::EndAll(_) => early.clear(),
        }
    }
}
