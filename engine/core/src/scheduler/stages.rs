//! Pipeline parallelism: several steps are computed at the same time, each by one stage, and each with sequences of
//! its own.
//!
//! With one stage, the next step takes as input what the step in flight samples. With several, the first stage would
//! have to wait for the last one. So a sequence skips steps until its token is known, and the decoding sequences are
//! divided evenly among the steps in flight. Prefill chunks, whose tokens are known, follow each other through the
//! stages. A prompt that would fit one step is cut, too, or the later stages would idle.

use super::Scheduler;
use crate::executor::MAX_IN_FLIGHT;
use crate::sequence::Running;

/// Chunks for each stage into which the pending prompts are cut. Of all these steps each stage idles for as many as
/// there are other stages.
const STEPS_PER_STAGE: u64 = 2;
/// Shortest worthwhile duration of a step, as a multiple of that without prefill.
const WORTHWHILE: f64 = 4.0;

impl Scheduler {
    /// For an executor with this many pipeline stages.
    pub(crate) fn with_stages(self, stages: usize) -> Scheduler {
        Scheduler { stages, ..self }
    }

    /// Whether the executor takes another step before one is collected.
    pub(crate) fn may_submit(&self) -> bool {
        self.in_flight.len() < self.stages.max(MAX_IN_FLIGHT)
    }

    /// Whether there are several pipeline stages.
    pub(super) fn is_pipelined(&self) -> bool {
        self.stages > 1
    }

    /// Decode rows of each step: the decoding sequences are divided among the stages.
    pub(super) fn decode_rows_per_step(&self) -> u32 {
        let decoding = self.running.iter().filter(|run| run.uncomputed() <= 1).count();
        decoding.div_ceil(self.stages) as u32
    }

    /// Most decode rows of the next step.
    pub(super) fn decode_row_limit(&self) -> usize {
        if self.is_pipelined() { self.decode_rows_per_step() as usize } else { usize::MAX }
    }

    /// Whether sequences decode that may be in other steps in flight.
    pub(super) fn decodes_in_flight(&self) -> bool {
        self.is_pipelined() && self.running.iter().any(|run| run.uncomputed() <= 1)
    }

    /// Most prompt tokens of a step with this many decode rows.
    pub(super) fn prompt_chunk_limit(&self, decode_rows: u32) -> u64 {
        let worthwhile = self.step_time.prefill_for(WORTHWHILE, decode_rows);
        match worthwhile.filter(|_| self.is_pipelined()) {
            None => u64::MAX,
            Some(worthwhile) => {
                self.pending_prompt_tokens().div_ceil(STEPS_PER_STAGE * self.stages as u64).max(worthwhile.into())
            }
        }
    }

    /// Tokens of all prompts that wait or are being computed; each counts whole, so that its chunks have one size.
    fn pending_prompt_tokens(&self) -> u64 {
        let prefilling = self.running.iter().filter(|run| run.uncomputed() > 1);
        prefilling.map(|run| run.sequence.tokens.len() as u64).sum::<u64>() + self.waiting.prompt_tokens()
    }

    /// Whether the sequence has one token to compute that this step may name.
    pub(super) fn decodes_next(&self, run: &Running) -> bool {
        run.uncomputed() == 1 && !(self.is_pipelined() && run.is_sampling())
    }
}
