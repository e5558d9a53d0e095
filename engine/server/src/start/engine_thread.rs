//! The engine's thread: warmed up before it starts, missed when it ends.

use crate::clock::Clock;
use crate::config::Batching;
use crate::driver::{EngineHandle, Revive, StepLoop, channel};
use crate::failure::Failure;
use crate::monitor::Monitor;
use std::sync::Arc;
use tokio::sync::oneshot;
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::draft::Proposer;
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::{Executor, ExecutorError};
use windlass_engine_core::request::{FinishReason, Request, RequestId};
use windlass_engine_core::update::RequestUpdate;

/// A running engine.
pub struct EngineThread {
    /// Submits requests.
    pub handle: EngineHandle,
    /// Tells how it ends.
    pub end: EngineEnd,
}

/// Resolves when the engine's thread ends.
pub struct EngineEnd(oneshot::Receiver<Result<(), ExecutorError>>);

impl EngineEnd {
    /// Of a thread that sends how it ended.
    pub(super) fn of(end: oneshot::Receiver<Result<(), ExecutorError>>) -> EngineEnd {
        EngineEnd(end)
    }

    /// Why it ended, which it never does while there are handles unless something failed.
    pub async fn failure(&mut self) -> Failure {
        match (&mut self.0).await {
            Ok(Err(error)) => Failure::new(Reason::DeviceFailed, error),
            Ok(Ok(())) => Failure::internal("the engine's thread ended while requests could still come"),
            Err(_) => Failure::internal("the engine's thread panicked; the log has its message"),
        }
    }
}

/// Generates a token on `executor`, then hands the engine to a thread of its own. Gives the seconds of the first.
/// `reload` makes the executor again after it was dropped; `guess` gives what guesses so many tokens a step.
pub fn launch<E: Executor + 'static>(
    executor: E,
    mut reload: impl FnMut() -> Result<E, Failure> + Send + 'static,
    mut guess: impl FnMut() -> Result<Option<(Box<dyn Proposer>, u32)>, Failure> + Send + 'static,
    batching: &Batching,
    monitor: &Arc<Monitor>,
    clock: Clock,
) -> Result<(EngineThread, f64), Failure> {
    let config = EngineConfig {
        queue: batching.queue,
        enable_prefix_cache: batching.prefix_cache,
        prefix_cache_key: rand::random(),
        prefix_cache_ttl_seconds: batching.prefix_cache_ttl_seconds,
        policy: batching.policy,
        inter_token_limit: batching.gap,
    };
    let mut awaken = move |executor: E| {
        let engine = Engine::new(executor, config);
        let mut engine = match guess()? {
            Some((proposer, tokens)) => engine.with_proposer(proposer, tokens),
            None => engine,
        };
        warm_up(&mut engine, clock)?;
        Ok::<_, Failure>(engine)
    };
    let began = clock.seconds();
    let engine = awaken(executor)?;
    let warm_seconds = clock.seconds() - began;
    let (handle, commands) = channel(clock);
    let (ended, end) = oneshot::channel();
    let revive: Revive<E> = Box::new(move |kept| {
        let mut executor = match kept {
            Some(executor) => executor,
            None => reload()?,
        };
        let held = executor.hold_weights(true).and_then(|()| executor.hold_kv(true));
        held.map_err(|error| Failure::new(Reason::DeviceFailed, error))?;
        awaken(executor)
    });
    let step_loop = StepLoop::new(engine, revive, commands, monitor.clone(), clock);
    let run = move || {
        // Nobody waits for the end of a server that is gone.
        let _ = ended.send(step_loop.run());
    };
    std::thread::Builder::new().name("engine".to_owned()).spawn(run).map_err(Failure::internal)?;
    Ok((EngineThread { handle, end: EngineEnd::of(end) }, warm_seconds))
}

/// The first request: readiness means that a token was generated, and this is the token.
fn warm_up<E: Executor>(engine: &mut Engine<E>, clock: Clock) -> Result<(), Failure> {
    let request = Request::greedy(RequestId(u64::MAX), vec![0], 1);
    engine.add(request, clock.seconds()).map_err(|reason| Failure::internal(format!("the first request: {reason}")))?;
    while !engine.is_idle() {
        let turn = engine.step(clock.seconds()).map_err(|error| Failure::new(Reason::DeviceFailed, error))?;
        if let Some(update) = turn.updates.into_iter().find(|update| update.finish.is_some()) {
            return check_first_token(&update);
        }
    }
    Err(Failure::internal("the first request ended without a token"))
}

fn check_first_token(update: &RequestUpdate) -> Result<(), Failure> {
    match (update.finish, &update.failure) {
        (Some(FinishReason::Length | FinishReason::Stop), _) => Ok(()),
        (_, Some(failure)) => Err(Failure::new(Reason::ModelInvalid, format!("the first token: {failure}"))),
        (finish, None) => Err(Failure::internal(format!("the first request ended with {finish:?}"))),
    }
}
