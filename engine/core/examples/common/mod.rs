//! An executor that computes nothing: what is left is the scheduler.

use std::collections::VecDeque;

use windlass_engine_core::executor::{Executor, ExecutorError, Geometry};
use windlass_engine_core::plan::{RowOutput, StepOutput, StepPlan, Ticket};

/// Samples token 7 in every row, at once.
pub struct Nothing {
    geometry: Geometry,
    submitted: u64,
    in_flight: VecDeque<Vec<RowOutput>>,
}

impl Nothing {
    pub fn new(geometry: Geometry) -> Nothing {
        Nothing { geometry, submitted: 0, in_flight: VecDeque::new() }
    }
}

impl Executor for Nothing {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        let output = |sampled| if sampled { RowOutput::Sampled(7) } else { RowOutput::Computed };
        self.in_flight.push_back(plan.rows.iter().map(|row| output(row.sample.is_some())).collect());
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }

    fn collect(&mut self, _: Ticket) -> Result<StepOutput, ExecutorError> {
        let rows = self.in_flight.pop_front().ok_or(ExecutorError("nothing is in flight".into()))?;
        Ok(StepOutput { rows, scores: Vec::new(), busy_seconds: 0.0 })
    }
}
