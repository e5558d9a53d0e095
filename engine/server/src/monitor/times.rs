//! The life of one request in moments, and the latencies between them. Tokens of answers, and how answers end, are counted where
//! clients are told of them: what is behind a stop string is generated and told to nobody.

use super::metrics::Metrics;
use windlass_engine_core::plan::SequenceFailure;
use windlass_engine_core::request::FinishReason;
use windlass_engine_core::update::RequestUpdate;

/// When one request's tokens came.
#[derive(Clone, Debug)]
pub struct RequestTimes {
    prompt_tokens: u32,
    generated: u32,
    first_token_seconds: Option<f64>,
    last_token_seconds: f64,
}

impl RequestTimes {
    /// A request of which nothing came yet. Of several with one prompt, that counts for the first: others have none.
    pub fn new(prompt_tokens: u32) -> RequestTimes {
        RequestTimes { prompt_tokens, generated: 0, first_token_seconds: None, last_token_seconds: 0.0 }
    }

    /// Counts an update into the metrics.
    pub(super) fn observe(&mut self, update: &RequestUpdate, now: f64, metrics: &Metrics) {
        let complete = matches!(update.finish, Some(FinishReason::Stop | FinishReason::Length));
        if self.first_token_seconds.is_none() && (complete || !update.tokens.is_empty()) {
            self.observe_prompt(update, metrics);
        }
        if let Some(SequenceFailure::Corrupted(_)) = update.failure {
            metrics.corrupted();
        }
        if !update.tokens.is_empty() {
            self.observe_tokens(update, now, metrics);
        }
        if let Some(reason) = update.finish {
            self.observe_finish(update, reason, now, metrics);
        }
    }

    /// The prompt is computed: a token follows it, or none was asked for.
    fn observe_prompt(&self, update: &RequestUpdate, metrics: &Metrics) {
        let cached = update.cached_tokens.min(self.prompt_tokens);
        let computed = self.prompt_tokens - cached;
        metrics.prompt_tokens.inc_by(u64::from(self.prompt_tokens));
        metrics.prompt_tokens_cached.inc_by(cached.into());
        metrics.prompt_tokens_by_source.with_label_values(&["local_cache_hit"]).inc_by(cached.into());
        metrics.prompt_tokens_by_source.with_label_values(&["local_compute"]).inc_by(computed.into());
        if self.prompt_tokens > 0 {
            metrics.prefill_computed.observe(computed.into());
        }
        if let Some(scheduled) = update.first_scheduled_seconds {
            metrics.queue_time.observe(scheduled - update.arrival_seconds);
        }
    }

    fn observe_tokens(&mut self, update: &RequestUpdate, now: f64, metrics: &Metrics) {
        match self.first_token_seconds {
            Some(_) => metrics.inter_token.observe(now - self.last_token_seconds),
            None => {
                self.first_token_seconds = Some(now);
                metrics.time_to_first_token.observe(now - update.arrival_seconds);
                if let Some(scheduled) = update.first_scheduled_seconds {
                    metrics.prefill_time.observe(now - scheduled);
                }
            }
        }
        self.last_token_seconds = now;
        self.generated += update.tokens.len() as u32;
    }

    /// Latencies of an aborted request, cut short, count nowhere.
    fn observe_finish(&self, update: &RequestUpdate, reason: FinishReason, now: f64, metrics: &Metrics) {
        let complete = matches!(reason, FinishReason::Stop | FinishReason::Length);
        let (true, Some(scheduled)) = (complete, update.first_scheduled_seconds) else { return };
        metrics.end_to_end.observe(now - update.arrival_seconds);
        metrics.inference_time.observe(now - scheduled);
        let first = match self.first_token_seconds {
            Some(first) => first,
            None => {
                metrics.prefill_time.observe(now - scheduled);
                now
            }
        };
        metrics.decode_time.observe(now - first);
        if self.prompt_tokens > 0 {
            metrics.request_prompt_tokens.observe(f64::from(self.prompt_tokens));
        }
        if self.generated > 1 {
            metrics.time_per_output_token.observe((now - first) / f64::from(self.generated - 1));
        }
    }
}
