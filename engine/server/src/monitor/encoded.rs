//! The life of one text that an encoder read.

use super::metrics::Metrics;
use windlass_engine_core::request::FinishReason;

/// When a text came, was computed and done, seconds. Its vector is its first and last token.
#[derive(Clone, Copy, Debug)]
pub struct Encoded {
    /// Tokens read.
    pub tokens: u32,
    /// When it came.
    pub arrival: f64,
    /// When its batch began.
    pub began: f64,
    /// When its batch was done.
    pub ended: f64,
    /// Computing failed.
    pub failed: bool,
}

impl Encoded {
    /// Counts it into the metrics.
    pub(super) fn observe(&self, metrics: &Metrics) {
        let Encoded { tokens, arrival, began, ended, failed } = *self;
        metrics.prompt_tokens.inc_by(tokens.into());
        metrics.finished(if failed { FinishReason::Error } else { FinishReason::Stop });
        metrics.request_prompt_tokens.observe(tokens.into());
        metrics.queue_time.observe(began - arrival);
        metrics.prefill_time.observe(ended - began);
        metrics.inference_time.observe(ended - began);
        metrics.time_to_first_token.observe(ended - arrival);
        metrics.end_to_end.observe(ended - arrival);
    }
}
