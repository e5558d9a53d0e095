//! How long a step waits for token masks.
//!
//! Masks are computed while the model computes. A mask that takes longer would delay all sequences of the step, so a
//! step waits for a short time and then defers the sequence.

use std::time::Duration;

use super::Scheduler;
use crate::engine::InterTokenLimit;
use crate::update::StepStats;

/// Without a target: this multiple of the duration of the step. The tokens of the others are delayed by that much at
/// most, which nobody notices, and most masks take far less.
const STEP_SHARE: f64 = 1.5;
/// Minimum.
const MIN_SECONDS: f64 = 0.001;
/// Default, until steps were measured.
const INITIAL_SECONDS: f64 = 0.05;

impl Scheduler {
    /// How long a step waits, from its start: as long as the target between tokens allows.
    pub(super) fn mask_timeout(&self, step: &StepStats) -> Duration {
        let target = if let InterTokenLimit::Seconds(seconds) = self.inter_token_limit { Some(seconds) } else { None };
        let seconds = match self.step_time.predict(step.prefill_tokens, step.decode_tokens) {
            Some(predicted) => target.unwrap_or(MIN_SECONDS).max(STEP_SHARE * predicted),
            None => target.unwrap_or(INITIAL_SECONDS),
        };
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }
}
