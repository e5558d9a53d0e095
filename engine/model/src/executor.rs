//! The executor on the CPU: a thread that owns the decoder and runs its steps. In a pipeline, the threads of the
//! earlier stages come before it.

mod chain;

use std::collections::VecDeque;
use std::fmt::Display;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use windlass_engine_core::executor::{Executor, ExecutorError, Geometry, MAX_IN_FLIGHT, Prepared};
use windlass_engine_core::plan::{StepOutput, StepPlan, Ticket};

use crate::decoder::{Model, StageModel};
use crate::panic::guarded;
use crate::pipeline::{Peer, PipelineError};
use crate::step::StepRunner;
use chain::{Chain, StageMessage, chain};

/// The output of a step, or why there are no more steps.
type StepResult = Result<StepOutput, String>;

/// Computes steps on its own thread. Dropping it finishes the steps in flight and ends the thread.
#[derive(Debug)]
pub struct CpuExecutor {
    geometry: Geometry,
    /// Pipeline stages: so many steps are computed at a time.
    stages: usize,
    next_ticket: u64,
    in_flight: VecDeque<Ticket>,
    /// `None` while the executor is dropped, so that its threads end.
    commands: Option<Sender<Command>>,
    outputs: Receiver<StepResult>,
    /// Why the worker ended, if a step failed. A later step may find the thread gone before the failed one is
    /// collected.
    failure: Arc<OnceLock<String>>,
    threads: Vec<JoinHandle<()>>,
}

/// A command to the thread. Commands are run in order.
pub(crate) enum Command {
    /// Compute a step.
    Step(Ticket, StepPlan),
    /// Prepare one thing that later steps need ([`Executor::prepare`]), and reply.
    Prepare(Reply<Prepared>),
    /// Allocate the memory of K and V if true, else free it, and reply.
    HoldKv(bool, Reply<()>),
}

/// Where the result of a command is sent.
pub(crate) type Reply<T> = Sender<Result<T, String>>;

/// Sends a result. If it is an error, no more steps can run, and it is returned too.
pub(crate) fn reply<T: Clone, E: Display>(came: Result<T, E>, to: &Reply<T>) -> Result<(), String> {
    let came = came.map_err(|error| error.to_string());
    // The asking thread may have dropped the receiver.
    let _ = to.send(came.clone());
    came.map(drop)
}

/// Sends a result, and returns the failure as the output of the thread; `None` without failure.
fn reply_failure<T: Clone, E: Display>(came: Result<T, E>, to: &Reply<T>) -> Option<StepResult> {
    reply(came, to).err().map(Err)
}

impl CpuExecutor {
    pub(crate) fn start<M: Model + Send + 'static>(mut runner: StepRunner<M>) -> io::Result<CpuExecutor> {
        let geometry = *runner.batch_builder().geometry();
        let (commands, received) = channel();
        CpuExecutor::spawn(geometry, commands, received, move || {
            runner.confine();
            move |command| match command {
                Command::Step(ticket, plan) => Some(runner.run(ticket, &plan).map_err(|error| error.to_string())),
                Command::Prepare(to) => reply_failure(runner.model_mut().prepare(), &to),
                Command::HoldKv(held, to) => reply_failure(runner.hold_kv(held), &to),
            }
        })
    }

    /// Starts the executor of a pipeline. `runner` computes the last stage; commands go through the earlier stages
    /// first.
    pub(crate) fn start_last<M: StageModel + Send + 'static>(
        mut runner: StepRunner<M>,
        earlier: Vec<Peer>,
    ) -> io::Result<CpuExecutor> {
        let (geometry, stages) = (*runner.batch_builder().geometry(), earlier.len() + 1);
        let (commands, received) = channel();
        let Chain { messages, threads } = chain(geometry, M::check, received, earlier)?;
        let mut executor = CpuExecutor::spawn(geometry, commands, messages, move || {
            runner.confine();
            move |message| match message {
                StageMessage::Step(passed) => Some(runner.run_passed(*passed).map_err(failed_here)),
                StageMessage::Prepare(to, earlier) => {
                    let own = runner.model_mut().prepare().map_err(failed_here);
                    reply_failure(earlier.join(own, together), &to)
                }
                StageMessage::HoldKv(held, to, earlier) => {
                    let own = runner.hold_kv(held).map_err(failed_here);
                    reply_failure(earlier.join(own, |(), ()| ()), &to)
                }
                StageMessage::Lost(why) => Some(Err(why)),
            }
        })?;
        executor.stages = stages;
        executor.threads.extend(threads);
        Ok(executor)
    }

    /// Starts a thread. `prepare` is called on it, and returns the function that runs what is received.
    fn spawn<T: Send + 'static, R: FnMut(T) -> Option<StepResult>>(
        geometry: Geometry,
        commands: Sender<Command>,
        coming: Receiver<T>,
        prepare: impl FnOnce() -> R + Send + 'static,
    ) -> io::Result<CpuExecutor> {
        let (outputs_out, outputs) = channel();
        let failure = Arc::new(OnceLock::new());
        let why = failure.clone();
        let work = move || work(prepare(), &coming, &outputs_out, &why);
        let threads = vec![thread::Builder::new().name("executor".into()).spawn(work)?];
        let (in_flight, commands) = (VecDeque::new(), Some(commands));
        Ok(CpuExecutor { geometry, stages: 1, next_ticket: 0, in_flight, commands, outputs, failure, threads })
    }

    fn command(&self, command: Command) -> Result<(), ExecutorError> {
        match self.commands.as_ref().map(|commands| commands.send(command)) {
            Some(Ok(())) => Ok(()),
            _ => Err(self.gone()),
        }
    }

    /// Sends a command and waits for the reply.
    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, ExecutorError> {
        let (to, heard) = channel();
        self.command(command(to))?;
        heard.recv().map_err(|_| self.gone())?.map_err(ExecutorError)
    }

    fn gone(&self) -> ExecutorError {
        ExecutorError(self.failure.get().map_or("its thread has ended", String::as_str).to_owned())
    }
}

/// Progress of preparation of two stages together: as far as the slower one.
fn together(one: Prepared, other: Prepared) -> Prepared {
    Prepared { done: one.done.min(other.done), all: one.all.max(other.all), advanced: one.advanced || other.advanced }
}

fn failed_here(error: impl Display) -> String {
    PipelineError::Step(error.to_string()).to_string()
}

/// Checks that a step is within the bounds and that fewer than `most` steps are in flight.
pub(crate) fn check(geometry: &Geometry, plan: &StepPlan, in_flight: usize, most: usize) -> Result<(), ExecutorError> {
    let (rows, tokens, logits) = (plan.rows.len(), plan.token_count(), plan.logit_count());
    let Geometry { max_step_rows, max_step_tokens, max_step_logits, .. } = *geometry;
    if in_flight == most {
        return Err(ExecutorError(format!("{most} steps are in flight; collect one first")));
    }
    let most = [max_step_rows, max_step_tokens, max_step_logits].map(|most| most as usize);
    if [rows, tokens, logits].iter().zip(&most).any(|(size, most)| size > most) {
        return Err(ExecutorError(format!(
            "a step of {rows} rows, {tokens} tokens and {logits} rows of logits; {most:?} are the most"
        )));
    }
    Ok(())
}

/// Checks that a ticket is that of the oldest step in flight.
pub(crate) fn check_oldest(ticket: Ticket, oldest: Option<Ticket>) -> Result<(), ExecutorError> {
    match oldest == Some(ticket) {
        true => Ok(()),
        false => Err(ExecutorError(format!("{ticket:?} was collected; the oldest is {oldest:?}"))),
    }
}

impl Executor for CpuExecutor {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn stages(&self) -> usize {
        self.stages
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        check(&self.geometry, &plan, self.in_flight.len(), self.stages.max(MAX_IN_FLIGHT))?;
        let ticket = Ticket(self.next_ticket);
        self.command(Command::Step(ticket, plan))?;
        self.next_ticket += 1;
        self.in_flight.push_back(ticket);
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError> {
        check_oldest(ticket, self.in_flight.pop_front())?;
        match self.outputs.recv() {
            Ok(Ok(output)) => Ok(output),
            Ok(Err(why)) => Err(ExecutorError(why)),
            Err(_) => Err(self.gone()),
        }
    }

    fn prepare(&mut self) -> Result<Prepared, ExecutorError> {
        self.ask(Command::Prepare)
    }

    fn hold_kv(&mut self, held: bool) -> Result<(), ExecutorError> {
        self.ask(|to| Command::HoldKv(held, to))
    }
}

impl Drop for CpuExecutor {
    fn drop(&mut self) {
        self.commands = None;
        for thread in self.threads.drain(..) {
            // The threads catch the panics of steps, so their results carry nothing.
            let _ = thread.join();
        }
    }
}

/// Runs what is received until the executor is dropped or a step fails or panics; after that the state of the decoder
/// is unknown.
fn work<T>(
    mut run: impl FnMut(T) -> Option<StepResult>,
    coming: &Receiver<T>,
    outputs: &Sender<StepResult>,
    failure: &OnceLock<String>,
) {
    for what in coming {
        let output = guarded(|| run(what)).unwrap_or_else(|why| Some(Err(why)));
        let Some(output) = output else { continue };
        if let Err(why) = &output {
            failure.get_or_init(|| why.clone());
        }
        if outputs.send(output).is_err() || failure.get().is_some() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_engine_core::executor::KvGroups;
    use windlass_engine_core::plan::RowOutput;

    const GEOMETRY: Geometry = Geometry {
        block_tokens: 16,
        blocks: 1,
        swap_slots: 0,
        max_sequence_tokens: 16,
        max_step_rows: 1,
        max_step_tokens: 1,
        max_step_logits: 1,
        vocabulary: 1,
        groups: KvGroups::ONE,
    };

    fn spawn<R: FnMut(Command) -> Option<StepResult>>(prepare: impl FnOnce() -> R + Send + 'static) -> CpuExecutor {
        let (commands, received) = channel();
        CpuExecutor::spawn(GEOMETRY, commands, received, prepare).unwrap()
    }

    fn numbered(command: Command) -> Option<StepResult> {
        let Command::Step(ticket, _) = command else { return None };
        Some(Ok(StepOutput { rows: vec![RowOutput::Sampled(ticket.0 as u32)], scores: Vec::new(), busy_seconds: 0.0 }))
    }

    #[test]
    fn two_steps_are_in_flight_and_come_back_in_order() {
        let mut executor = spawn(|| numbered);
        let [first, second] = [(); 2].map(|()| executor.submit(StepPlan::default()).unwrap());
        let refused = executor.submit(StepPlan::default()).unwrap_err().to_string();
        assert!(refused.contains("2 steps are in flight"), "{refused}");
        assert_eq!(executor.collect(first).unwrap().rows, [RowOutput::Sampled(0)]);
        let third = executor.submit(StepPlan::default()).unwrap();
        assert_eq!(executor.collect(second).unwrap().rows, [RowOutput::Sampled(1)]);
        assert_eq!(executor.collect(third).unwrap().rows, [RowOutput::Sampled(2)]);
    }

    #[test]
    fn a_panic_is_an_error_for_every_step_and_never_a_hang() {
        const WORDS: &str = "the executor failed: a step panicked: block 7 is not there";
        let mut executor = spawn(|| |_: Command| panic!("block {} is not there", 7));
        let first = executor.submit(StepPlan::default()).unwrap();
        assert_eq!(executor.collect(first).unwrap_err().to_string(), WORDS);
        // Steps are queued after the panic until one finds the thread gone.
        let mut is_gone = false;
        while !is_gone {
            let submitted = executor.submit(StepPlan::default());
            is_gone = submitted.is_err();
            let error = submitted.and_then(|ticket| executor.collect(ticket)).unwrap_err();
            assert_eq!(error.to_string(), WORDS);
        }
    }

    #[test]
    fn tickets_out_of_order_are_refused() {
        let mut executor = spawn(|| numbered);
        assert!(executor.collect(Ticket(0)).is_err());
        executor.submit(StepPlan::default()).unwrap();
        let second = executor.submit(StepPlan::default()).unwrap();
        assert!(executor.collect(second).is_err());
    }

    #[test]
    fn dropping_it_ends_its_thread_with_steps_in_flight() {
        let mut executor = spawn(|| numbered);
        executor.submit(StepPlan::default()).unwrap();
        drop(executor);
    }
}
