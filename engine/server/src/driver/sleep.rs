//! An engine that gives its memory back for a while.

use super::handle::{Command, Submission};
use super::step_loop::StepLoop;
use crate::failure::Failure;
use crate::machine;
use tokio::sync::oneshot;
use tracing::{info, warn};
use windlass_engine_core::engine::Engine;
use windlass_engine_core::executor::{Executor, ExecutorError};
use windlass_engine_core::update::EngineStats;

/// How much is given back, by vLLM's levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// 1: keys and values, and memory of devices. The weights stay in memory, or go to the host's where that has room.
    KeepsWeights,
    /// 2: everything. Waking reads the model again.
    DropsWeights,
}

/// Share of the host's free memory that weights may take: what is pinned is given back to nobody who needs it.
const PINNED_SHARE: f64 = 0.9;

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
        let kept = Some(executor).filter(|_| depth == Depth::KeepsWeights);
        let mut kept = kept.and_then(|executor| move_weights(executor, machine::free_memory_bytes()));
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
                        prepares: false,
                        told_of_loss: false,
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

/// Has an executor's weights leave their devices for the host's memory, of which so many bytes are free. Without room there
/// the executor goes, and the weights are read again.
fn move_weights<E: Executor>(mut executor: E, free_bytes: Option<u64>) -> Option<E> {
    let Some(bytes) = executor.weights_to_move() else {
        info!("this device's memory comes back with its executor alone: weights will be read from the model's files");
        return None;
    };
    let room = free_bytes.map_or(u64::MAX, |free| (free as f64 * PINNED_SHARE) as u64);
    if bytes > room {
        warn!(bytes, room, "the host has no room for the weights: they will be read from the model's files");
        return None;
    }
    match executor.hold_weights(false) {
        Ok(()) => Some(executor),
        Err(error) => {
            warn!(%error, "the host did not take the weights: they will be read from the model's files");
            None
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

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_engine_core::executor::Geometry;
    use windlass_engine_core::plan::{StepOutput, StepPlan, Ticket};

    /// What is asked of an executor that falls asleep.
    struct Sleeper {
        weights: Option<u64>,
        moves: bool,
    }

    impl Executor for Sleeper {
        fn geometry(&self) -> Geometry {
            unreachable!("it sleeps")
        }

        fn submit(&mut self, _: StepPlan) -> Result<Ticket, ExecutorError> {
            unreachable!("it sleeps")
        }

        fn collect(&mut self, _: Ticket) -> Result<StepOutput, ExecutorError> {
            unreachable!("it sleeps")
        }

        fn weights_to_move(&self) -> Option<u64> {
            self.weights
        }

        fn hold_weights(&mut self, held: bool) -> Result<(), ExecutorError> {
            if self.moves && !held { Ok(()) } else { Err(ExecutorError("it cannot be pinned".into())) }
        }
    }

    #[test]
    fn an_executor_is_kept_while_it_sleeps_where_the_host_has_room_for_its_weights() {
        for (weights, free, moves, kept) in [
            (Some(0), Some(0), true, true),
            (Some(90), Some(100), true, true),
            (Some(91), Some(100), true, false),
            (Some(91), None, true, true),
            (Some(90), Some(100), false, false),
            (None, Some(100), true, false),
        ] {
            let found = move_weights(Sleeper { weights, moves }, free).is_some();
            assert_eq!(found, kept, "{weights:?} of {free:?}, {moves}");
        }
    }
}
