//! Take commands, end what was cancelled, turn the engine once, pass on what it produced; again.

use super::handle::{Command, Commands, Event, Submission};
use super::live::Live;
use super::promise::retry_after_seconds;
use crate::clock::Clock;
use crate::monitor::{Monitor, QUEUE_FULL, RequestTimes, TOO_SLOW};
use std::collections::HashMap;
use std::sync::Arc;
use windlass_engine_core::engine::Engine;
use windlass_engine_core::executor::{Executor, ExecutorError};
use windlass_engine_core::request::{FinishReason, RejectReason, RequestId};
use windlass_engine_core::update::{RequestUpdate, Turn};

/// Between two publications of the engine's state, which costs a walk over its blocks, seconds.
const PUBLISH_EVERY_SECONDS: f64 = 0.02;

/// The engine with everything that its thread owns.
pub struct StepLoop<E> {
    engine: Engine<E>,
    commands: Commands,
    live: HashMap<RequestId, Live>,
    monitor: Arc<Monitor>,
    clock: Clock,
    last_arrival_seconds: f64,
    published_seconds: f64,
}

impl<E: Executor> StepLoop<E> {
    /// An engine that has nothing to do yet.
    pub fn new(engine: Engine<E>, commands: Commands, monitor: Arc<Monitor>, clock: Clock) -> StepLoop<E> {
        StepLoop {
            engine,
            commands,
            live: HashMap::new(),
            monitor,
            clock,
            last_arrival_seconds: 0.0,
            published_seconds: 0.0,
        }
    }

    /// Runs until every handle is gone and the last request has ended, or the executor fails. Blocks without work.
    pub fn run(mut self) -> Result<(), ExecutorError> {
        while self.take_commands() {
            self.end_cancelled();
            if let Err(error) = self.turn() {
                self.end_all(&error.to_string());
                return Err(error);
            }
        }
        Ok(())
    }

    /// False when there will never be work again.
    fn take_commands(&mut self) -> bool {
        if self.engine.is_idle() {
            self.publish();
            self.monitor.idle();
            let Some(command) = self.commands.receiver.blocking_recv() else { return false };
            self.monitor.woke();
            self.obey(command);
        }
        while let Ok(command) = self.commands.receiver.try_recv() {
            self.obey(command);
        }
        true
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(submission) => self.submit(*submission),
            Command::EndAll(message) => self.end_all(&message),
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission { request, arrival_seconds, events, cancel } = submission;
        let (id, prompt_tokens) = (request.id, request.prompt.len() as u32);
        // Senders race between reading the clock and sending; the queue's order is the truth.
        self.last_arrival_seconds = self.last_arrival_seconds.max(arrival_seconds);
        let event = match self.engine.add(request, self.last_arrival_seconds) {
            Ok(()) => {
                let times = RequestTimes::new(prompt_tokens);
                self.live.insert(id, Live { events: events.clone(), cancel, times });
                Event::Admitted
            }
            Err(reason) => self.rejected(reason),
        };
        // Nobody reading means that the request was cancelled, which the next step notices.
        let _ = events.try_send(event);
    }

    fn rejected(&self, reason: RejectReason) -> Event {
        match reason {
            RejectReason::QueueFull { .. } => self.monitor.rejected(QUEUE_FULL),
            RejectReason::TooSlow { .. } => self.monitor.rejected(TOO_SLOW),
            _ => (),
        }
        let retry_after_seconds = retry_after_seconds(&reason, &self.engine.stats());
        Event::Rejected { reason, retry_after_seconds }
    }

    fn end_cancelled(&mut self) {
        if !self.commands.cancels.take() {
            return;
        }
        let reasons = self.live.iter().filter_map(|(id, live)| Some((*id, live.cancel.reason()?)));
        for (id, reason) in reasons.collect::<Vec<_>>() {
            if let Some(update) = self.engine.finish(id, reason) {
                self.deliver(update, self.clock.seconds());
            }
        }
    }

    fn end_all(&mut self, message: &str) {
        for id in self.live.keys().copied().collect::<Vec<_>>() {
            if let Some(update) = self.engine.finish(id, FinishReason::Abort) {
                let update = RequestUpdate { error: Some(message.to_owned()), ..update };
                self.deliver(update, self.clock.seconds());
            }
        }
    }

    fn turn(&mut self) -> Result<(), ExecutorError> {
        let began = self.clock.seconds();
        self.monitor.turn_began(began);
        let Turn { updates, step } = self.engine.turn(began)?;
        let ended = self.clock.seconds();
        self.monitor.turn_ended(began, ended);
        if let Some(step) = step {
            self.monitor.step(&step, ended);
        }
        updates.into_iter().for_each(|update| self.deliver(update, ended));
        if ended - self.published_seconds > PUBLISH_EVERY_SECONDS {
            self.publish();
        }
        Ok(())
    }

    fn deliver(&mut self, update: RequestUpdate, now: f64) {
        let id = update.request;
        let Some(live) = self.live.get_mut(&id) else { return };
        self.monitor.update(&mut live.times, &update, now);
        let ended = update.finish.is_some();
        live.send(update);
        if ended {
            self.live.remove(&id);
        }
    }

    fn publish(&mut self) {
        self.published_seconds = self.clock.seconds();
        self.monitor.publish(&self.engine.stats());
    }
}
