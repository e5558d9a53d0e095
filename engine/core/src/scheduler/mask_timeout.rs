//! How long a step waits for what constraints allow.
//!
//! Masks are found beside the model's computing, and one that takes longer makes all sequences of the step wait for one
//! of them. So a step waits little, and the sequence misses its turn.

use std::time::Duration;

use super::Scheduler;
use crate::engine::InterTokenLimit;
use crate::update::StepStats;

/// Without a target: of the time that the step takes itself. Tokens of the others come at most that much later, which
/// nobody sees, and most masks take far less.
const STEP_SHARE: f64 = 1.5;
/// Whatever was measured.
const MIN_SECONDS: f64 = 0.001;
/// Before steps were measured.
const INITIAL_SECONDS: f64 = 0.05;

impl Scheduler {
    /// How long a step waits, from its beginning: as long as the target between tokens allows.
    pub(super) fn mask_timeout(&self, step: &StepStats) -> Duration {
        let target = if let InterTokenLimit::Seconds(seconds) = self.inter_token_limit { Some(seconds) } else { None };
        let seconds = match self.step_time.predict(step.prefill_tokens, step.decode_tokens) {
            Some(predicted) => target.unwrap_or(MIN_SECONDS).max(STEP_SHARE * predicted),
            None => target.unwrap_or(INITIAL_SECONDS),
        };
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }
}
