//! The last minute: what counters and histograms grew by, and the percentiles of that.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use windlass_engine_api::native::{Latency, ServerMetrics};
use windlass_engine_contract::stats::{Histogram, LATENCY_EDGES_MS, Stats};

/// Between two samples.
pub const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// Samples kept: a minute.
const SAMPLES: usize = 12;

/// Earlier readings, oldest first.
#[derive(Debug, Default)]
pub struct Recent(Mutex<VecDeque<Stats>>);

impl Recent {
    /// Keeps a reading.
    pub fn record(&self, stats: Stats) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() == SAMPLES {
            samples.pop_front();
        }
        samples.push_back(stats);
    }

    /// What happened between the oldest reading kept and `now`; since the start where there is none.
    pub fn until(&self, now: &Stats, batch_fill: f64) -> ServerMetrics {
        let oldest = self.0.lock().unwrap_or_else(PoisonError::into_inner).front().cloned();
        match oldest {
            Some(then) => since(&then, now, batch_fill),
            None => since(&Stats { uptime_seconds: 0.0, ..nothing(now) }, now, batch_fill),
        }
    }
}

/// The reading of an engine that has done nothing yet.
fn nothing(now: &Stats) -> Stats {
    let none = Histogram::default;
    Stats {
        finished: 0,
        prompt_tokens: 0,
        generation_tokens: 0,
        time_to_first_token: none(),
        inter_token: none(),
        end_to_end: none(),
        ..now.clone()
    }
}

fn since(then: &Stats, now: &Stats, batch_fill: f64) -> ServerMetrics {
    let window_seconds = now.uptime_seconds - then.uptime_seconds;
    let rate = |now: u64, then: u64| if window_seconds > 0.0 { (now - then) as f64 / window_seconds } else { 0.0 };
    ServerMetrics {
        window_seconds,
        requests_running: now.running,
        requests_waiting: now.waiting,
        requests_per_second: rate(now.finished, then.finished),
        prompt_tokens_per_second: rate(now.prompt_tokens, then.prompt_tokens),
        generation_tokens_per_second: rate(now.generation_tokens, then.generation_tokens),
        time_to_first_token_ms: latency(&now.time_to_first_token, &then.time_to_first_token),
        inter_token_ms: latency(&now.inter_token, &then.inter_token),
        end_to_end_ms: latency(&now.end_to_end, &then.end_to_end),
        utilization: now.utilization,
        batch_fill,
        kv_cache_usage: now.kv_usage,
    }
}

fn latency(now: &Histogram, then: &Histogram) -> Option<Latency> {
    let grown = |bucket: usize| now.counts.get(bucket).copied().unwrap_or(0) - then.counts.get(bucket).unwrap_or(&0);
    let counts: Vec<u64> = (0..=LATENCY_EDGES_MS.len()).map(grown).collect();
    let measured = counts.last().is_some_and(|total| *total > 0);
    let at = |share| percentile(&counts, share);
    measured.then(|| Latency { p50: at(0.50), p95: at(0.95), p99: at(0.99) })
}

/// The milliseconds below which `share` of all observations are. What is beyond the last edge counts as at it.
fn percentile(cumulative: &[u64], share: f64) -> f64 {
    let total = cumulative.last().copied().unwrap_or(0);
    let rank = share * total as f64;
    let bucket = cumulative.partition_point(|count| (*count as f64) < rank);
    let edge =
        |bucket: usize| LATENCY_EDGES_MS.get(bucket).or(LATENCY_EDGES_MS.last()).map_or(0.0, |ms| f64::from(*ms));
    let (low, below) = match bucket.checked_sub(1) {
        Some(previous) => (edge(previous), cumulative[previous]),
        None => (0.0, 0),
    };
    let inside = cumulative.get(bucket).map_or(0, |count| count - below);
    let part = if inside == 0 { 0.0 } else { (rank - below as f64) / inside as f64 };
    low + part * (edge(bucket) - low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_within_their_buckets_and_count_only_what_is_new() {
        let mut then = Histogram::default();
        (0..1000).for_each(|_| then.observe(60_000.0));
        let mut now = then.clone();
        (0..90).for_each(|_| now.observe(15.0));
        (0..10).for_each(|_| now.observe(450.0));
        let latency = latency(&now, &then).unwrap();
        assert!((10.0..=20.0).contains(&latency.p50), "{latency:?}");
        assert!((400.0..=500.0).contains(&latency.p95), "{latency:?}");
        assert!(latency.p95 < latency.p99 && latency.p99 <= 500.0, "{latency:?}");
        assert_eq!(super::latency(&then, &then), None);
    }

    #[test]
    fn what_is_beyond_the_last_edge_counts_as_at_it() {
        let mut histogram = Histogram::default();
        histogram.observe(1e9);
        assert_eq!(latency(&histogram, &Histogram::default()).unwrap().p50, 60_000.0);
    }
}
