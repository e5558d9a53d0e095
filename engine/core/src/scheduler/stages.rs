//! Steps that are computed at the same time, by stages one after the other: each step has sequences of its own.
//!
//! With one stage the next step feeds on what the step in flight draws. With several the first stage would have to wait until
//! the last one has drawn. So a sequence sits out until its token is known, and those that decode are divided among the
//! steps in flight: a share each. Chunks of a prompt, whose tokens are known, follow each other through the stages; one that
//! would fit a step is cut, too, as the last stage would wait for the first otherwise.

use super::Scheduler;
use crate::executor::MAX_IN_FLIGHT;
use crate::sequence::Running;

/// Steps for each stage into which the prompts at hand are cut: of all these each stage is idle during as many as there are
/// other stages.
const STEPS_PER_STAGE: u64 = 2;
/// How long a step should take at least to be worth it, of what it takes without prompts.
const WORTHWHILE: f64 = 4.0;

impl Scheduler {
    /// For an executor of so many stages.
    pub(crate) fn with_stages(self, stages: usize) -> Scheduler {
        Scheduler { stages, ..self }
    }

    /// Whether the executor takes another step before one is collected.
    pub(crate) fn may_submit(&self) -> bool {
        self.in_flight.len() < self.stages.max(MAX_IN_FLIGHT)
    }

    /// Whether stages compute steps of different sequences at the same time.
    pub(super) fn is_pipelined(&self) -> bool {
        self.stages > 1
    }

    /// Rows of each step that decode: what decodes is divided among the stages.
    pub(super) fn decode_rows_per_step(&self) -> u32 {
        let decoding = self.running.iter().filter(|run| run.uncomputed() <= 1).count();
        decoding.div_ceil(self.stages) as u32
    }

    /// Most rows of the next step that decode.
    pub(super) fn decode_row_limit(&self) -> usize {
        if self.is_pipelined() { self.decode_rows_per_step() as usize } else { usize::MAX }
    }

    /// Whether sequences decode that steps in flight may hold.
    pub(super) fn decodes_in_flight(&self) -> bool {
        self.is_pipelined() && self.running.iter().any(|run| run.uncomputed() <= 1)
    }

    /// Most prompt tokens of a step beside so many rows that decode.
    pub(super) fn prompt_chunk_limit(&self, decode_rows: u32) -> u64 {
        let worthwhile = self.step_time.prefill_for(WORTHWHILE, decode_rows);
        match worthwhile.filter(|_| self.is_pipelined()) {
            None => u64::MAX,
            Some(worthwhile) => {
                self.pending_prompt_tokens().div_ceil(STEPS_PER_STAGE * self.stages as u64).max(worthwhile.into())
            }
        }
    }

    /// Tokens of the prompts that wait or are computed, all of each, so that its parts are alike.
    fn pending_prompt_tokens(&self) -> u64 {
        let prefilling = self.running.iter().filter(|run| run.uncomputed() > 1);
        prefilling.map(|run| run.sequence.tokens.len() as u64).sum::<u64>() + self.waiting.prompt_tokens()
    }

    /// Whether one token of a sequence is left to compute, which this step may name.
    pub(super) fn decodes_next(&self, run: &Running) -> bool {
        run.uncomputed() == 1 && !(self.is_pipelined() && run.is_sampling())
    }
}
