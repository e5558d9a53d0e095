//! The executor on the CPU: a thread that owns the decoder and its pool, behind the asynchronous seam.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use windlass_engine_core::executor::{Executor, ExecutorError, Geometry, MAX_IN_FLIGHT};
use windlass_engine_core::plan::{StepOutput, StepPlan, Ticket};

use crate::backend::Backend;
use crate::panic::message;
use crate::step::StepRunner;

/// What came of a step, or why there will be no more.
type Outcome = Result<StepOutput, String>;

/// Computes steps on its own thread. Dropping it finishes the steps in flight and ends the thread.
#[derive(Debug)]
pub struct CpuExecutor {
    geometry: Geometry,
    next_ticket: u64,
    in_flight: VecDeque<Ticket>,
    /// Absent while the executor is dropped: the worker ends when it is gone.
    plans: Option<Sender<(Ticket, StepPlan)>>,
    outputs: Receiver<Outcome>,
    worker: Option<JoinHandle<()>>,
}

impl CpuExecutor {
    pub(crate) fn start<B>(geometry: Geometry, mut runner: StepRunner<B>) -> io::Result<CpuExecutor>
    where
        B: Backend + Send + 'static,
    {
        CpuExecutor::spawn(geometry, move || {
            runner.settle();
            move |ticket, plan: &StepPlan| runner.run(ticket, plan).map_err(|error| error.to_string())
        })
    }

    /// `prepare` is called on the new thread and gives what runs steps there.
    fn spawn<R: FnMut(Ticket, &StepPlan) -> Outcome>(
        geometry: Geometry,
        prepare: impl FnOnce() -> R + Send + 'static,
    ) -> io::Result<CpuExecutor> {
        let (plans, plans_in) = channel();
        let (outputs_out, outputs) = channel();
        let worker =
            thread::Builder::new().name("executor".into()).spawn(move || work(prepare(), &plans_in, &outputs_out))?;
        let (plans, worker) = (Some(plans), Some(worker));
        Ok(CpuExecutor { geometry, next_ticket: 0, in_flight: VecDeque::new(), plans, outputs, worker })
    }

}

/// Refuses a plan that is larger than what was built, or one step too many.
pub(crate) fn check_size(geometry: &Geometry, plan: &StepPlan, in_flight: usize) -> Result<(), ExecutorError> {
    let (rows, tokens, logits) = (plan.rows.len(), plan.token_count(), plan.logit_count());
    let Geometry { max_step_rows, max_step_tokens, max_step_logits, .. } = *geometry;
    if in_flight == MAX_IN_FLIGHT {
        return Err(ExecutorError(format!("{MAX_IN_FLIGHT} steps are in flight; collect one first")));
    }
    let most = [max_step_rows, max_step_tokens, max_step_logits].map(|most| most as usize);
    if [rows, tokens, logits].iter().zip(&most).any(|(size, most)| size > most) {
        return Err(ExecutorError(format!(
            "a step of {rows} rows, {tokens} tokens and {logits} rows of logits; {most:?} are the most"
        )));
    }
    Ok(())
}

impl Executor for CpuExecutor {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        check_size(&self.geometry, &plan, self.in_flight.len())?;
        let ticket = Ticket(self.next_ticket);
        let sent = self.plans.as_ref().is_some_and(|plans| plans.send((ticket, plan)).is_ok());
        if !sent {
            return Err(gone());
        }
        self.next_ticket += 1;
        self.in_flight.push_back(ticket);
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError> {
        match self.in_flight.pop_front() {
            Some(oldest) if oldest == ticket => {}
            oldest => return Err(ExecutorError(format!("{ticket:?} was collected; the oldest is {oldest:?}"))),
        }
        match self.outputs.recv() {
            Ok(Ok(output)) => Ok(output),
            Ok(Err(why)) => Err(ExecutorError(why)),
            Err(_) => Err(gone()),
        }
    }
}

impl Drop for CpuExecutor {
    fn drop(&mut self) {
        self.plans = None;
        if let Some(worker) = self.worker.take() {
            // The worker catches its panics; there is nothing in its result.
            let _ = worker.join();
        }
    }
}

fn gone() -> ExecutorError {
    ExecutorError("its thread has ended".into())
}

/// Runs plans until the executor is dropped or a step fails or panics: after that the decoder's state is unknown.
fn work(
    mut run: impl FnMut(Ticket, &StepPlan) -> Outcome,
    plans: &Receiver<(Ticket, StepPlan)>,
    outputs: &Sender<Outcome>,
) {
    for (ticket, plan) in plans {
        let output = catch_unwind(AssertUnwindSafe(|| run(ticket, &plan)))
            .unwrap_or_else(|panic| Err(format!("a step panicked: {}", message(panic.as_ref()))));
        let ended = output.is_err();
        if outputs.send(output).is_err() || ended {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_engine_core::plan::RowOutput;

    const GEOMETRY: Geometry = Geometry {
        block_tokens: 16,
        blocks: 1,
        max_sequence_tokens: 16,
        max_step_rows: 1,
        max_step_tokens: 1,
        max_step_logits: 1,
        vocabulary: 1,
    };

    fn numbered(ticket: Ticket, _: &StepPlan) -> Outcome {
        Ok(StepOutput { rows: vec![RowOutput::Sampled(ticket.0 as u32)], scores: Vec::new(), busy_seconds: 0.0 })
    }

    #[test]
    fn two_steps_are_in_flight_and_come_back_in_order() {
        let mut executor = CpuExecutor::spawn(GEOMETRY, || numbered).unwrap();
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
        let mut executor =
            CpuExecutor::spawn(GEOMETRY, || |_, _: &StepPlan| panic!("block {} is not there", 7)).unwrap();
        let [first, second] = [(); 2].map(|()| executor.submit(StepPlan::default()));
        let error = executor.collect(first.unwrap()).unwrap_err().to_string();
        assert_eq!(error, "the executor failed: a step panicked: block 7 is not there");
        // The second was either queued behind the panic or found the thread gone.
        if let Ok(second) = second {
            assert!(executor.collect(second).is_err());
        }
        assert!(executor.submit(StepPlan::default()).is_err());
    }

    #[test]
    fn tickets_out_of_order_are_refused() {
        let mut executor = CpuExecutor::spawn(GEOMETRY, || numbered).unwrap();
        assert!(executor.collect(Ticket(0)).is_err());
        executor.submit(StepPlan::default()).unwrap();
        let second = executor.submit(StepPlan::default()).unwrap();
        assert!(executor.collect(second).is_err());
    }

    #[test]
    fn dropping_it_ends_its_thread_with_steps_in_flight() {
        let mut executor = CpuExecutor::spawn(GEOMETRY, || numbered).unwrap();
        executor.submit(StepPlan::default()).unwrap();
        drop(executor);
    }
}
