//! The promise in `Retry-After`: when a request that is refused now is likely to be admitted.

use windlass_engine_core::request::RejectReason;
use windlass_engine_core::update::EngineStats;

/// What is promised at least and at most, seconds.
const PROMISE_SECONDS: std::ops::RangeInclusive<f64> = 1.0..=60.0;

/// A whole number of seconds that a client may be told: until what is before it, running and waiting, has had its
/// turn, or as much of it as is too much.
pub fn retry_after_seconds(reason: &RejectReason, stats: &EngineStats) -> u32 {
    let allowed = match reason {
        RejectReason::TooSlow { limit_milliseconds, .. } => *limit_milliseconds as f64 / 1e3,
        _ => 0.0,
    };
    let wait = stats.predicted_ttft_seconds.unwrap_or_default() - allowed;
    wait.clamp(*PROMISE_SECONDS.start(), *PROMISE_SECONDS.end()).ceil() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_promise_follows_the_forecast_within_bounds() {
        let full = RejectReason::QueueFull { waiting: 1, queued_tokens: 1 };
        let slow = RejectReason::TooSlow { predicted_milliseconds: 9000, limit_milliseconds: 5000 };
        let after = |reason, predicted_ttft_seconds| {
            retry_after_seconds(reason, &EngineStats { predicted_ttft_seconds, ..EngineStats::default() })
        };
        assert_eq!([after(&full, None), after(&full, Some(0.2)), after(&full, Some(7.5))], [1, 1, 8]);
        assert_eq!([after(&full, Some(1e6)), after(&slow, Some(9.0)), after(&slow, Some(0.0))], [60, 4, 1]);
    }
}
