//! How fast the engine works through tokens, for the promise in `Retry-After`.

use windlass_engine_core::update::EngineStats;

/// Seconds after which an old step counts half as much as a new one, roughly.
const MEMORY_SECONDS: f64 = 5.0;
/// What is promised at least and at most, seconds.
const PROMISE_SECONDS: std::ops::RangeInclusive<f64> = 1.0..=60.0;

/// A mean of tokens per second over recent steps, weighted by their length and age.
#[derive(Clone, Copy, Debug, Default)]
pub struct Throughput {
    tokens: f64,
    seconds: f64,
}

impl Throughput {
    /// A step of so many tokens took so long.
    pub fn observe(&mut self, tokens: u32, seconds: f64) {
        let kept = (-seconds / MEMORY_SECONDS).exp();
        self.tokens = self.tokens * kept + f64::from(tokens);
        self.seconds = self.seconds * kept + seconds;
    }

    /// Seconds until what waits has been computed, as a whole number that a client may be told.
    pub fn retry_after_seconds(&self, stats: &EngineStats) -> u32 {
        let rate = if self.seconds > 0.0 { self.tokens / self.seconds } else { 0.0 };
        let wait = if rate > 0.0 { stats.queued_prompt_tokens as f64 / rate } else { *PROMISE_SECONDS.start() };
        wait.clamp(*PROMISE_SECONDS.start(), *PROMISE_SECONDS.end()).ceil() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_promise_follows_backlog_and_speed_within_bounds() {
        let backlog = |tokens| EngineStats { queued_prompt_tokens: tokens, ..EngineStats::default() };
        let mut throughput = Throughput::default();
        assert_eq!(throughput.retry_after_seconds(&backlog(1000)), 1);
        (0..100).for_each(|_| throughput.observe(100, 0.1));
        assert_eq!(throughput.retry_after_seconds(&backlog(7500)), 8);
        assert_eq!(throughput.retry_after_seconds(&backlog(0)), 1);
        assert_eq!(throughput.retry_after_seconds(&backlog(10_000_000)), 60);
    }
}
