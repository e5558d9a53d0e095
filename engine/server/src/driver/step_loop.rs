//! Take commands, end what was cancelled, turn the engine once, pass on what it produced; again.

use super::handle::{Command, Commands, Event, Submission};
use super::live::Live;
use super::promise::retry_after_seconds;
use super::sleep::{Depth, Revive};
use crate::clock::Clock;
use crate::monitor::{Monitor, QUEUE_FULL, RequestTimes, TOO_SLOW};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::oneshot;
use windlass_engine_core::engine::Engine;
use windlass_engine_core::executor::{Executor, ExecutorError};
use windlass_engine_core::request::{FinishReason, RejectReason, RequestId};
use windlass_engine_core::update::{EngineStats, RequestUpdate, Turn};

/// Between two publications of the engine's state, which costs a walk over its blocks, seconds.
const PUBLISH_EVERY_SECONDS: f64 = 0.02;

/// The engine with everything that its thread owns.
pub struct StepLoop<E> {
    pub(super) engine: Engine<E>,
    /// Makes an engine again after sleep.
    pub(super) revive: Revive<E>,
    pub(super) commands: Commands,
    pub(super) live: HashMap<RequestId, Live>,
    pub(super) monitor: Arc<Monitor>,
    pub(super) clock: Clock,
    pub(super) last_arrival_seconds: f64,
    /// What was published of this engine, whose counters begin at zero.
    pub(super) published: EngineStats,
    pub(super) published_seconds: f64,
}

/// What comes after taking commands.
enum Next {
    /// A turn.
    Turn,
    /// Sleep.
    Sleep(Depth, oneshot::Sender<()>),
    /// Nothing, ever: every handle is gone.
    End,
}

impl<E: Executor> StepLoop<E> {
    /// An engine that has nothing to do yet.
    pub fn new(
        engine: Engine<E>,
        revive: Revive<E>,
        commands: Commands,
        monitor: Arc<Monitor>,
        clock: Clock,
    ) -> StepLoop<E> {
        StepLoop {
            engine,
            revive,
            commands,
            live: HashMap::new(),
            monitor,
            clock,
            last_arrival_seconds: 0.0,
            published: EngineStats::default(),
            published_seconds: 0.0,
        }
    }

    /// Runs until every handle is gone and the last request has ended, or the executor fails. Blocks without work.
    pub fn run(mut self) -> Result<(), ExecutorError> {
        loop {
            match self.take_commands() {
                Next::End => return Ok(()),
                Next::Turn => {
                    self.end_cancelled();
                    self.turn_or_end()?;
                }
                Next::Sleep(depth, asleep) => {
                    self.finish_all()?;
                    match self.sleep(depth, asleep)? {
                        Some(awake) => self = awake,
                        None => return Ok(()),
                    }
                }
            }
        }
    }

    fn take_commands(&mut self) -> Next {
        if self.engine.is_idle() {
            self.publish();
            self.monitor.idle();
            let Some(command) = self.commands.receiver.blocking_recv() else { return Next::End };
            self.monitor.woke();
            if let sleep @ Next::Sleep(..) = self.obey(command) {
                return sleep;
            }
        }
        while let Ok(command) = self.commands.receiver.try_recv() {
            if let sleep @ Next::Sleep(..) = self.obey(command) {
                return sleep;
            }
        }
        Next::Turn
    }

    fn obey(&mut self, command: Command) -> Next {
        match command {
            Command::Submit(submission) => self.submit(*submission),
            Command::EndAll(message) => self.end_all(&message),
            Command::Sleep(depth, asleep) => return Next::Sleep(depth, asleep),
            // It is awake.
            Command::Wake(woken) => drop(woken.send(Ok(()))),
        }
        Next::Turn
    }

    /// Ends what is live and lets the executor come to rest.
    fn finish_all(&mut self) -> Result<(), ExecutorError> {
        self.end_all("the server went to sleep before this answer was complete");
        while !self.engine.is_idle() {
            self.turn_or_end()?;
        }
        self.publish();
        Ok(())
    }

    fn turn_or_end(&mut self) -> Result<(), ExecutorError> {
        self.turn().inspect_err(|error| self.end_all(&error.to_string()))
    }

    pub(super) fn submit(&mut self, submission: Submission) {
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
            let Some(update) = self.engine.finish(id, FinishReason::Abort) else { continue };
            let Some(mut live) = self.live.remove(&id) else { continue };
            self.monitor.update(&mut live.times, &update, self.clock.seconds());
            live.send(Event::GivenUp(message.to_owned()));
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
        live.send(Event::Update(update));
        if ended {
            self.live.remove(&id);
        }
    }

    fn publish(&mut self) {
        self.published_seconds = self.clock.seconds();
        let before = std::mem::replace(&mut self.published, self.engine.stats());
        self.monitor.publish(&self.published, &before);
    }
}
