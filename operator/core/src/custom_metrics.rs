//! Metrics of a service and of its pods, as `custom.metrics.k8s.io` names them, and their values from readings.

use jiff::Timestamp;
use windlass_engine_contract::stats::Stats;
use windlass_operator_api::autoscaling::LatencyMetric;

use crate::autoscale::signals::MIN_SAMPLES;
use crate::window::{Activity, LoadWindow, WINDOW, minus};

/// A metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// A percentile of a latency, milliseconds.
    Latency {
        /// Which latency.
        metric: LatencyMetric,
        /// 50 to 99.
        percentile: i32,
    },
    /// Mean utilization, percent.
    Utilization,
    /// Share of the KV cache that is used, percent.
    KvUsage,
    /// Requests that wait.
    Waiting,
    /// Requests that are computed.
    Running,
}

const LATENCIES: [(LatencyMetric, &str); 3] = [
    (LatencyMetric::TimeToFirstToken, "time_to_first_token"),
    (LatencyMetric::InterToken, "inter_token"),
    (LatencyMetric::EndToEnd, "end_to_end"),
];
/// Percentiles that are listed; every other from 50 to 99 is answered too.
const LISTED: [i32; 4] = [50, 90, 95, 99];
const OTHERS: [(Metric, &str); 4] = [
    (Metric::Utilization, "windlass_utilization_percent"),
    (Metric::KvUsage, "windlass_kv_usage_percent"),
    (Metric::Waiting, "windlass_waiting_requests"),
    (Metric::Running, "windlass_running_requests"),
];

impl Metric {
    /// Metrics that discovery lists.
    pub fn all() -> impl Iterator<Item = Metric> {
        let latencies = LATENCIES
            .into_iter()
            .flat_map(|(metric, _)| LISTED.into_iter().map(move |percentile| Metric::Latency { metric, percentile }));
        latencies.chain(OTHERS.into_iter().map(|(metric, _)| metric))
    }

    /// Its name.
    pub fn name(&self) -> String {
        match self {
            Metric::Latency { metric, percentile } => {
                let latency = LATENCIES.iter().find(|(known, _)| known == metric).map_or("", |(_, name)| name);
                format!("windlass_{latency}_p{percentile}_milliseconds")
            }
            other => OTHERS.iter().find(|(known, _)| known == other).map_or("", |(_, name)| name).to_owned(),
        }
    }

    /// The metric of this name.
    pub fn named(name: &str) -> Option<Metric> {
        if let Some((metric, _)) = OTHERS.iter().find(|(_, known)| *known == name) {
            return Some(*metric);
        }
        let (latency, percentile) = name.strip_prefix("windlass_")?.strip_suffix("_milliseconds")?.rsplit_once("_p")?;
        let (metric, _) = LATENCIES.iter().find(|(_, known)| *known == latency)?;
        let percentile = percentile.parse().ok().filter(|percentile| (50..=99).contains(percentile))?;
        Some(Metric::Latency { metric: *metric, percentile })
    }

    /// Its value over `pods` together, in thousandths; `None` where it was not measured. A latency that too few requests
    /// tell of has no value: an autoscaler then leaves replicas as they are, and does not take silence for speed.
    pub fn value<'a>(&self, window: &LoadWindow, pods: impl Iterator<Item = &'a str>, now: Timestamp) -> Option<i64> {
        let since = minus(now, WINDOW);
        let fresh: Vec<&str> =
            pods.filter(|pod| window.latest(pod).is_some_and(|reading| reading.at > since)).collect();
        let stats: Vec<&Stats> = fresh.iter().filter_map(|pod| Some(&window.latest(pod)?.stats)).collect();
        if stats.is_empty() {
            return None;
        }
        let mean = |values: Vec<f64>| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        let value = match self {
            Metric::Latency { metric, percentile } => {
                let mut activity = Activity::default();
                fresh.iter().filter_map(|pod| window.activity(pod, since)).for_each(|one| activity.add(&one));
                let counts = activity.latency(*metric);
                let oldest = stats.iter().map(|stats| stats.oldest_queue_age_seconds * 1000.0).fold(0.0, f64::max);
                latency(counts.total(), counts.quantile(f64::from(*percentile) / 100.0), *metric, oldest, &stats)
            }
            Metric::Utilization => mean(stats.iter().filter_map(|stats| stats.utilization).collect()).map(percent),
            Metric::KvUsage => mean(stats.iter().map(|stats| stats.kv_usage).collect()).map(percent),
            Metric::Waiting => Some(stats.iter().map(|stats| f64::from(stats.waiting)).sum()),
            Metric::Running => Some(stats.iter().map(|stats| f64::from(stats.running)).sum()),
        }?;
        Some((value * 1000.0).round() as i64)
    }
}

/// The percentile, or the age of the oldest request that waits, which no histogram knows yet; 0 where nothing is there
/// to be slow, so that a service at rest can shrink.
fn latency(
    samples: u64,
    measured: Option<f64>,
    metric: LatencyMetric,
    oldest_ms: f64,
    stats: &[&Stats],
) -> Option<f64> {
    let waited = if metric == LatencyMetric::InterToken { 0.0 } else { oldest_ms };
    let is_idle = stats.iter().all(|stats| stats.running + stats.waiting == 0);
    match measured.filter(|_| samples >= MIN_SAMPLES) {
        Some(measured) => Some(measured.max(waited)),
        None if samples == 0 && is_idle => Some(0.0),
        None if waited > 0.0 => Some(waited),
        None => None,
    }
}

fn percent(share: f64) -> f64 {
    share * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, stats};

    fn window(readings: &[(&str, i64, Stats)]) -> LoadWindow {
        let mut window = LoadWindow::default();
        readings.iter().for_each(|(pod, second, stats)| window.record(pod, at(*second), stats.clone()));
        window
    }

    fn ttft_p95() -> Metric {
        Metric::Latency { metric: LatencyMetric::TimeToFirstToken, percentile: 95 }
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for metric in Metric::all() {
            assert_eq!(Metric::named(&metric.name()), Some(metric), "{}", metric.name());
        }
        assert_eq!(
            Metric::named("windlass_inter_token_p97_milliseconds").map(|one| one.name()).as_deref(),
            Some("windlass_inter_token_p97_milliseconds")
        );
        for unknown in ["windlass_inter_token_p100_milliseconds", "windlass_inter_token_p5_milliseconds", "cpu", ""] {
            assert_eq!(Metric::named(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn percentiles_are_of_all_pods_together_and_never_averaged() {
        let mut slow = stats();
        (0..30).for_each(|_| slow.time_to_first_token.observe(900.0));
        let mut fast = stats();
        (0..300).for_each(|_| fast.time_to_first_token.observe(8.0));
        let later = |stats: Stats| Stats { uptime_seconds: 1005.0, ..stats };
        let window = window(&[("a", 0, stats()), ("b", 0, stats()), ("a", 5, later(slow)), ("b", 5, later(fast))]);
        let value = |pods: &[&str]| ttft_p95().value(&window, pods.iter().copied(), at(5)).expect("measured") / 1000;
        assert!((750..=1000).contains(&value(&["a"])) && value(&["b"]) <= 10);
        assert!(value(&["a", "b"]) > 400, "30 of 330 are slow: {}", value(&["a", "b"]));
    }

    #[test]
    fn silence_is_no_value_and_rest_is_no_latency() {
        let idle = window(&[("a", 0, stats()), ("a", 5, Stats { uptime_seconds: 1005.0, ..stats() })]);
        assert_eq!(ttft_p95().value(&idle, ["a"].into_iter(), at(5)), Some(0));
        assert_eq!(ttft_p95().value(&idle, ["a"].into_iter(), at(124)), Some(0));
        assert_eq!(ttft_p95().value(&idle, ["a"].into_iter(), at(125)), None, "the reading is two minutes old");
        assert_eq!(ttft_p95().value(&idle, std::iter::empty(), at(5)), None);
        let stalled = Stats { waiting: 3, oldest_queue_age_seconds: 7.5, ..stats() };
        assert_eq!(ttft_p95().value(&window(&[("a", 0, stalled)]), ["a"].into_iter(), at(1)), Some(7_500_000));
    }

    #[test]
    fn of_too_few_requests_a_latency_has_no_value() {
        for (requests, is_measured) in [(1, false), (19, false), (20, true)] {
            let mut told = Stats { uptime_seconds: 1005.0, ..stats() };
            (0..requests).for_each(|_| told.time_to_first_token.observe(900.0));
            let window = window(&[("a", 0, stats()), ("a", 5, told)]);
            let value = ttft_p95().value(&window, ["a"].into_iter(), at(5));
            assert_eq!(value.is_some(), is_measured, "{requests}: {value:?}");
        }
    }

    #[test]
    fn gauges_are_means_and_sums() {
        let one = Stats { utilization: Some(0.5), kv_usage: 0.2, waiting: 3, running: 4, ..stats() };
        let other = Stats { utilization: None, kv_usage: 0.4, waiting: 1, running: 0, ..stats() };
        let window = window(&[("a", 0, one), ("b", 0, other)]);
        let value = |metric: Metric| metric.value(&window, ["a", "b"].into_iter(), at(1));
        assert_eq!(value(Metric::Utilization), Some(50_000), "one that was not measured is no zero");
        assert_eq!(
            (value(Metric::KvUsage), value(Metric::Waiting), value(Metric::Running)),
            (Some(30_000), Some(4000), Some(4000))
        );
    }
}
