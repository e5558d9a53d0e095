//! `/stats` from the same numbers as `/metrics`.

use super::metrics::Metrics;
use super::{Built, Moment};
use prometheus::Histogram as Recorded;
use prometheus::core::Metric;
use windlass_engine_contract::stats::{Histogram, LATENCY_EDGES_MS, Phase, Stats};

/// One reading. `unseen` requests were sent to the engine and wait to be seen by it.
pub(super) fn read(metrics: &Metrics, built: Option<&Built>, moment: &Moment, phase: Phase, unseen: u32) -> Stats {
    Stats {
        uptime_seconds: round(moment.uptime_seconds),
        phase,
        simulated: built.is_some_and(|built| built.simulated),
        running: metrics.running.get() as u32,
        waiting: metrics.waiting.get() as u32 + unseen,
        oldest_queue_age_seconds: round(moment.oldest_age_seconds),
        queued_tokens: metrics.queued_prompt_tokens.get() as u64,
        remaining_tokens: metrics.remaining_tokens.get() as u64,
        kv_usage: round(metrics.kv_usage.get()),
        cached_blocks: metrics.cached_blocks.get() as u32,
        utilization: moment.utilization.map(round),
        finished: metrics.ended(),
        rejected: metrics.refused(),
        prompt_tokens: metrics.prompt_tokens.get(),
        generation_tokens: metrics.generation_tokens.get(),
        time_to_first_token: histogram(&metrics.time_to_first_token),
        inter_token: histogram(&metrics.inter_token),
        end_to_end: histogram(&metrics.end_to_end),
        effective: built.map(|built| built.effective.clone()),
        start: built.map(|built| built.start),
        fingerprint: built.map(|built| built.fingerprint.clone()),
        gpus: moment.gpus,
    }
}

/// The recorded buckets, whose edges are those of the contract, with the count of all as the last one.
fn histogram(recorded: &Recorded) -> Histogram {
    let metric = recorded.metric();
    let histogram = metric.get_histogram();
    let total = histogram.get_sample_count();
    if total == 0 {
        return Histogram::default();
    }
    let buckets = histogram.get_bucket().iter().take(LATENCY_EDGES_MS.len());
    let counts = buckets.map(|bucket| bucket.cumulative_count()).chain([total]).collect();
    Histogram { counts, sum_ms: round(histogram.get_sample_sum() * 1000.0) }
}

/// Microseconds and millionths are enough, and keep the document small.
fn round(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_views_agree_on_a_histogram() {
        let metrics = Metrics::new("m").unwrap();
        assert_eq!(histogram(&metrics.end_to_end), Histogram::default());
        let mut expected = Histogram::default();
        for milliseconds in [1.0, 5.0, 6.0, 75.0, 70_000.0] {
            metrics.end_to_end.observe(milliseconds / 1000.0);
            expected.observe(milliseconds);
        }
        assert_eq!(histogram(&metrics.end_to_end).counts, expected.counts);
        assert!((histogram(&metrics.end_to_end).sum_ms - expected.sum_ms).abs() < 1e-3);
    }
}
