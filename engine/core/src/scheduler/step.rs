//! A step while it is put together, within its budgets.

use crate::executor::Geometry;
use crate::plan::{PlanRow, StepPlan};
use crate::sequence::{Running, StayId};
use crate::update::StepStats;

/// A decided step: the plan for the executor, and what the scheduler keeps to understand the results.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) plan: StepPlan,
    pub(crate) rows: Vec<StepRow>,
    pub(crate) stats: StepStats,
}

/// A row of a step, as the scheduler remembers it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRow {
    pub(super) stay: StayId,
    /// Leading tokens of the sequence that are computed once the step is.
    pub(super) end: usize,
    pub(super) samples: bool,
}

pub(super) struct StepBuilder {
    block_tokens: usize,
    tokens_left: usize,
    /// Decodes that found no block and count on those that are on their way back.
    pub(super) sitting_out: usize,
    step: Step,
}

impl StepBuilder {
    pub(super) fn new(geometry: &Geometry) -> StepBuilder {
        StepBuilder {
            block_tokens: geometry.block_tokens as usize,
            tokens_left: geometry.max_step_tokens as usize,
            sitting_out: 0,
            step: Step { plan: StepPlan::default(), rows: Vec::new(), stats: StepStats::default() },
        }
    }

    /// Room for a token at least. Rows are not counted: no more sequences run than a step may have rows.
    pub(super) fn has_room(&self) -> bool {
        self.tokens_left > 0
    }

    /// Adds as many of the sequence's next tokens as the budget allows.
    pub(super) fn push(&mut self, run: &Running) {
        let row = run.row(run.uncomputed().min(self.tokens_left), self.block_tokens);
        self.tokens_left -= row.tokens.len();
        self.count(&row, run.sequence.prompt_tokens);
        let end = row.first_position as usize + row.tokens.len();
        self.step.rows.push(StepRow { stay: run.stay, end, samples: row.sample.is_some() });
        self.step.plan.rows.push(row);
    }

    /// The step, unless it is empty.
    pub(super) fn build(self) -> Option<Step> {
        (!self.step.rows.is_empty()).then_some(self.step)
    }

    fn count(&mut self, row: &PlanRow, prompt_tokens: usize) {
        let stats = &mut self.step.stats;
        stats.rows += 1;
        match row.tokens.len() {
            1 if row.first_position as usize >= prompt_tokens => stats.decode_tokens += 1,
            tokens => stats.prefill_tokens += tokens as u32,
        }
    }
}
