//! Steps that are computed at the same time, by stages one after the other: each step has sequences of its own.
//!
//! With one stage the next step feeds on what the step in flight draws. With several the first stage would have to wait until
//! the last one has drawn. So a sequence sits out until its token is known, and those that decode are divided among the
//! steps in flight: a share each. Chunks of a prompt, whose tokens are known, follow each other through the stages.

use super::Scheduler;
use crate::executor::MAX_IN_FLIGHT;
use crate::sequence::Running;

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
    pub(super) fn is_staged(&self) -> bool {
        self.stages > 1
    }

    /// Most rows of the next step that decode.
    pub(super) fn decode_share(&self) -> usize {
        match self.is_staged() {
            false => usize::MAX,
            true => self.running.iter().filter(|run| run.uncomputed() <= 1).count().div_ceil(self.stages),
        }
    }

    /// Whether one token of a sequence is left to compute, which this step may name.
    pub(super) fn decodes_next(&self, run: &Running) -> bool {
        run.uncomputed() == 1 && !(self.is_staged() && run.is_sampling())
    }
}
