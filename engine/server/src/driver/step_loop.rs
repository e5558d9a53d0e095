//! Take commands, end what was cancelled, turn the engine once, pass on what it produced; again.

use super::handle::{Command, Commands, Event, Submission};
use super::live::Live;
use super::sleep::{Depth, Revive};
use crate::clock::Clock;
use crate::monitor::{Monitor, QUEUE_FULL, RequestTimes, TOO_SLOW};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::oneshot;
use tracing::{info, warn};
use windlass_engine_core::engine::Engine;
use windlass_engine_core::executor::{Executor, ExecutorError, Prepared};
use windlass_engine_core::request::{FinishReason, RejectReason, RequestDemand, RequestId};
use windlass_engine_core::update::{EngineOutputs, EngineStats, RequestUpdate};

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
    /// Whether the executor prepared something when it was asked last.
    pub(super) prepares: bool,
    /// Whether the log says that blocks were lost.
    pub(super) told_of_loss: bool,
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
            prepares: false,
            told_of_loss: false,
        }
    }

    /// Runs until every handle is gone and the last request has ended, or the executor fails. Without work it has the
    /// executor prepare for what comes, and then blocks.
    pub fn run(mut self) -> Result<(), ExecutorError> {
        loop {
            match self.take_commands()? {
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

    fn take_commands(&mut self) -> Result<Next, ExecutorError> {
        if self.engine.is_idle() {
            self.publish();
            self.monitor.idle();
            let Some(command) = self.await_command()? else { return Ok(Next::End) };
            self.monitor.woke();
            if let sleep @ Next::Sleep(..) = self.obey(command) {
                return Ok(sleep);
            }
        }
        while let Ok(command) = self.commands.receiver.try_recv() {
            if let sleep @ Next::Sleep(..) = self.obey(command) {
                return Ok(sleep);
            }
        }
        Ok(Next::Turn)
    }

    /// The next command, or none when every handle is gone. Until it comes the executor prepares, a piece at a time, which is
    /// all that the command waits for.
    fn await_command(&mut self) -> Result<Option<Command>, ExecutorError> {
        loop {
            match self.commands.receiver.try_recv() {
                Ok(command) => return Ok(Some(command)),
                Err(TryRecvError::Disconnected) => return Ok(None),
                Err(TryRecvError::Empty) => {
                    if !self.prepare()? {
                        return Ok(self.commands.receiver.blocking_recv());
                    }
                }
            }
        }
    }

    /// Whether there was anything to prepare.
    fn prepare(&mut self) -> Result<bool, ExecutorError> {
        // It is work: whoever asks after the engine sees where it does not end.
        self.monitor.woke();
        let prepared = self.engine.prepare()?;
        self.monitor.idle();
        self.monitor.prepared(&prepared);
        let Prepared { done, all, advanced } = prepared;
        if self.prepares && !advanced {
            info!(graphs = done, of = all, "graphs were captured ahead of the steps that they are for");
        }
        self.prepares = advanced;
        Ok(advanced)
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
        let (id, claim) = (request.id, RequestDemand::of(&request));
        let prompt_tokens = if request.fork_of.is_some() { 0 } else { request.prompt.len() as u32 };
        // Senders race between reading the clock and sending; the queue's order is the truth.
        self.last_arrival_seconds = self.last_arrival_seconds.max(arrival_seconds);
        let event = match self.engine.add(request, self.last_arrival_seconds) {
            Ok(()) => {
                let times = RequestTimes::new(prompt_tokens);
                self.live.insert(id, Live { events: events.clone(), cancel, times });
                Event::Admitted
            }
            Err(reason) => self.rejected(reason, claim),
        };
        // Nobody reading means that the request was cancelled, which the next step notices.
        let _ = events.try_send(event);
    }

    fn rejected(&mut self, reason: RejectReason, claim: RequestDemand) -> Event {
        match reason {
            RejectReason::QueueFull { .. } => self.monitor.rejected(QUEUE_FULL),
            RejectReason::TooSlow { .. } => self.monitor.rejected(TOO_SLOW),
            _ => (),
        }
        let retry_after_seconds = self.engine.retry_after_seconds(claim, self.last_arrival_seconds);
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
        let EngineOutputs { updates, step, lost_kv: lost } = self.engine.step(began)?;
        let ended = self.clock.seconds();
        self.monitor.turn_ended(began, ended);
        if let Some(step) = step {
            self.monitor.step(&step, ended);
        }
        updates.into_iter().for_each(|update| self.deliver(update, ended));
        if let Some(why) = lost.filter(|_| !std::mem::replace(&mut self.told_of_loss, true)) {
            warn!(
                why,
                "blocks outside the KV cache cannot be relied on: prompts are computed again, which is said only once"
            );
        }
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel as unbounded};
    use std::thread;

    use super::super::handle::channel;
    use super::*;
    use crate::failure::Failure;
    use windlass_engine_core::engine::EngineConfig;
    use windlass_engine_core::executor::{Geometry, KvGroups};
    use windlass_engine_core::plan::{RowOutput, StepOutput, StepPlan, Ticket};
    use windlass_engine_core::request::Request;

    const PIECES: u32 = 3;
    const GEOMETRY: Geometry = Geometry {
        block_tokens: 16,
        blocks: 4,
        swap_slots: 0,
        max_sequence_tokens: 16,
        max_step_rows: 1,
        max_step_tokens: 16,
        max_step_logits: 1,
        vocabulary: 9,
        groups: KvGroups::ONE,
    };

    /// Prepares a piece when it is let, and says what it does.
    struct Preparing {
        done: u32,
        lets: Receiver<()>,
        says: Sender<&'static str>,
    }

    impl Executor for Preparing {
        fn geometry(&self) -> Geometry {
            GEOMETRY
        }

        fn submit(&mut self, _: StepPlan) -> Result<Ticket, ExecutorError> {
            self.says.send("step").unwrap();
            Ok(Ticket(0))
        }

        fn collect(&mut self, _: Ticket) -> Result<StepOutput, ExecutorError> {
            Ok(StepOutput { rows: vec![RowOutput::Sampled(1)], scores: Vec::new(), busy_seconds: 0.0 })
        }

        fn prepare(&mut self) -> Result<Prepared, ExecutorError> {
            if self.done == PIECES {
                return Ok(Prepared { done: PIECES, all: PIECES, advanced: false });
            }
            self.says.send("prepare").unwrap();
            self.lets.recv().map_err(|_| ExecutorError("a capture failed".into()))?;
            self.done += 1;
            Ok(Prepared { done: self.done, all: PIECES, advanced: true })
        }
    }

    #[test]
    fn without_work_pieces_are_prepared_until_a_request_comes_and_after_it() {
        let (let_it, lets) = unbounded();
        let (says, said) = unbounded();
        let clock = Clock::start();
        let monitor = Arc::new(Monitor::new(clock, "m").unwrap());
        let (handle, commands) = channel(clock);
        let engine = Engine::new(Preparing { done: 0, lets, says }, EngineConfig::PLAIN);
        let revive: Revive<Preparing> = Box::new(|_| Err(Failure::internal("it does not sleep")));
        let step_loop = StepLoop::new(engine, revive, commands, Arc::clone(&monitor), clock);
        let thread = thread::spawn(move || step_loop.run());
        assert_eq!(said.recv(), Ok("prepare"));
        assert!(monitor.stalled_seconds() > 0.0, "a piece that does not end is seen");
        let stream = handle.submit(|id| Request::greedy(id, vec![1], 1)).unwrap();
        let_it.send(()).unwrap();
        assert_eq!(said.recv(), Ok("step"), "the request waits for one piece");
        for _ in 1..PIECES {
            assert_eq!(said.recv(), Ok("prepare"));
            let_it.send(()).unwrap();
        }
        drop((stream, handle));
        thread.join().unwrap().unwrap();
        let metrics = monitor.exposition().unwrap();
        for name in ["windlass:graphs_captured", "windlass:graphs_of_all_steps"] {
            let line = metrics.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            assert!(line.ends_with(" 3"), "{line}");
        }
    }

    #[test]
    fn a_piece_that_fails_ends_the_engine() {
        let (let_it, lets) = unbounded();
        let (says, _said) = unbounded();
        let clock = Clock::start();
        let (_handle, commands) = channel(clock);
        let engine = Engine::new(Preparing { done: 0, lets, says }, EngineConfig::PLAIN);
        let revive: Revive<Preparing> = Box::new(|_| Err(Failure::internal("it does not sleep")));
        let monitor = Arc::new(Monitor::new(clock, "m").unwrap());
        drop(let_it);
        let ended = StepLoop::new(engine, revive, commands, monitor, clock).run();
        assert_eq!(ended.unwrap_err().to_string(), "the executor failed: a capture failed");
    }
}
