//! What one request felt like, and what a run of them did.

use serde::Serialize;
use std::time::Duration;

/// One request that was answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// To the first event with text.
    pub first: Duration,
    /// To the last one.
    pub last: Duration,
    /// Events with text.
    pub events: u32,
    /// Tokens of the prompt, as the server counts.
    pub prompt_tokens: u32,
    /// Tokens of the answer, as the server counts.
    pub tokens: u32,
}

/// Everything that a run did.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Requests that were answered.
    pub samples: Vec<Sample>,
    /// Requests that were not, by reason.
    pub failures: Vec<String>,
    /// From the first request to the last answer.
    pub elapsed: Duration,
}

/// When a request is good.
#[derive(Clone, Copy, Debug)]
pub struct Targets {
    /// Longest time to the first token.
    pub ttft_ms: f64,
    /// Longest mean time between tokens.
    pub tpot_ms: f64,
}

/// Milliseconds by percentile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half are shorter.
    pub p50: f64,
    /// 95 of 100 are shorter.
    pub p95: f64,
    /// 99 of 100 are shorter.
    pub p99: f64,
}

impl Sample {
    /// Milliseconds to the first token.
    pub fn ttft_ms(&self) -> f64 {
        self.first.as_secs_f64() * 1000.0
    }

    /// Mean milliseconds between tokens after the first.
    pub fn tpot_ms(&self) -> f64 {
        let later = self.tokens.saturating_sub(1).max(1);
        (self.last - self.first).as_secs_f64() * 1000.0 / f64::from(later)
    }

    /// Whether it met both targets.
    pub fn is_good(&self, targets: Targets) -> bool {
        self.ttft_ms() <= targets.ttft_ms && self.tpot_ms() <= targets.tpot_ms
    }
}

impl Percentiles {
    /// Of these values, by nearest rank; zeros of none.
    pub fn of(mut values: Vec<f64>) -> Percentiles {
        values.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| match values.len() {
            0 => 0.0,
            count => values[((share * count as f64).ceil() as usize).clamp(1, count) - 1],
        };
        Percentiles { p50: at(0.50), p95: at(0.95), p99: at(0.99) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let percentiles = Percentiles::of((1..=100).rev().map(f64::from).collect());
        assert_eq!(percentiles, Percentiles { p50: 50.0, p95: 95.0, p99: 99.0 });
        assert_eq!(Percentiles::of(vec![7.0]), Percentiles { p50: 7.0, p95: 7.0, p99: 7.0 });
        assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
    }

    #[test]
    fn a_request_is_good_only_by_both_targets() {
        let ms = Duration::from_millis;
        let sample = Sample { first: ms(100), last: ms(300), events: 5, prompt_tokens: 1, tokens: 5 };
        assert!((sample.tpot_ms() - 50.0).abs() < 1e-9);
        assert!(sample.is_good(Targets { ttft_ms: 100.0, tpot_ms: 50.0 }));
        assert!(!sample.is_good(Targets { ttft_ms: 99.0, tpot_ms: 50.0 }));
        assert!(!sample.is_good(Targets { ttft_ms: 100.0, tpot_ms: 49.0 }));
    }
}
