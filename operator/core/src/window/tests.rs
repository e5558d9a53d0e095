//! Differences, sums and percentiles of readings.

use super::*;
use crate::testing::{at, stats};
use proptest::collection::vec;
use proptest::prelude::*;

/// A reading `uptime` seconds after the start, with these times to first token so far.
fn reading(uptime: f64, milliseconds: &[f64]) -> Stats {
    let mut stats = stats();
    stats.uptime_seconds = uptime;
    stats.finished = milliseconds.len() as u64;
    milliseconds.iter().for_each(|&value| stats.time_to_first_token.observe(value));
    stats
}

fn ttft(window: &LoadWindow, pod: &str, since: i64) -> LatencyCounts {
    window.activity(pod, at(since)).expect("two readings").latency(LatencyMetric::TimeToFirstToken).clone()
}

#[test]
fn only_what_happened_since_counts() {
    let mut window = LoadWindow::default();
    window.record("a", at(1000), reading(500.0, &[5000.0; 3]));
    window.record("a", at(1060), reading(560.0, &[&[5000.0; 3][..], &[90.0; 4]].concat()));
    let counts = ttft(&window, "a", 1000);
    assert_eq!(counts.total(), 4);
    assert_eq!(counts.within(100.0), 4.0);
}

#[test]
fn a_process_that_began_inside_the_span_counts_whole() {
    let mut window = LoadWindow::default();
    window.record("a", at(1000), reading(30.0, &[90.0; 7]));
    assert_eq!(ttft(&window, "a", 900).total(), 7);
}

#[test]
fn one_reading_of_an_older_process_tells_nothing() {
    let mut window = LoadWindow::default();
    window.record("a", at(1000), reading(500.0, &[90.0; 7]));
    assert_eq!(window.activity("a", at(900)), None);
}

#[test]
fn tokens_arrive_where_they_are_computed_or_queued() {
    let mut window = LoadWindow::default();
    let said = |uptime: f64, prompt_tokens, queued_tokens, generation_tokens| Stats {
        prompt_tokens,
        queued_tokens,
        generation_tokens,
        ..reading(uptime, &[])
    };
    window.record("a", at(1000), said(500.0, 10_000, 300, 50));
    let mut later = said(510.0, 12_000, 800, 150);
    [20.0, 40.0].into_iter().for_each(|milliseconds| later.inter_token.observe(milliseconds));
    window.record("a", at(1010), later);
    let activity = window.activity("a", at(1000)).expect("two readings");
    assert_eq!((activity.arrived_tokens_per_second, activity.prompt_tokens_per_second), (250.0, 200.0));
    assert_eq!((activity.generated_tokens_per_second, activity.inter_token_seconds()), (10.0, Some(0.03)));
}

#[test]
fn a_restart_starts_over() {
    let mut window = LoadWindow::default();
    window.record("a", at(1000), reading(500.0, &[5000.0; 30]));
    window.record("a", at(1030), reading(10.0, &[90.0; 2]));
    assert_eq!(ttft(&window, "a", 1000).total(), 2);
    window.record("a", at(1060), reading(5.0, &[90.0; 1]));
    assert_eq!(ttft(&window, "a", 1000).total(), 1);
}

#[test]
fn the_same_reading_twice_is_no_restart() {
    let mut window = LoadWindow::default();
    for (second, uptime, count) in [(1000, 500.0, 5), (1060, 560.0, 9), (1061, 560.0, 9)] {
        window.record("a", at(second), reading(uptime, &vec![90.0; count]));
    }
    assert_eq!(ttft(&window, "a", 1000).total(), 4);
}

#[test]
fn readings_a_few_seconds_apart_are_told_apart() {
    let mut window = LoadWindow::default();
    for count in 0..3 {
        let (second, uptime) = (1000 + 4 * count, 500.0 + 4.0 * count as f64);
        window.record("a", at(second), reading(uptime, &vec![90.0; count as usize]));
    }
    assert_eq!(ttft(&window, "a", 1004).total(), 1);
}

#[test]
fn the_time_between_tokens_is_the_mean_of_what_happened_since_in_all_engines() {
    let mut window = LoadWindow::default();
    let mut tell = |pod: &str, second: i64, milliseconds: &[f64]| {
        let mut said = reading(500.0 + (second - 1000) as f64, &[]);
        milliseconds.iter().for_each(|&value| said.inter_token.observe(value));
        window.record(pod, at(second), said);
    };
    tell("a", 1000, &[500.0]);
    tell("a", 1010, &[500.0, 20.0, 40.0]);
    tell("b", 1000, &[]);
    tell("b", 1010, &[60.0]);
    let [mut both, other] = ["a", "b"].map(|pod| window.activity(pod, at(1000)).expect("two readings"));
    assert_eq!(both.inter_token_seconds(), Some(0.03));
    both.add(&other);
    assert_eq!(both.inter_token_seconds(), Some(0.04));
}

#[test]
fn percentiles_are_taken_of_the_sum() {
    let mut window = LoadWindow::default();
    for (pod, values) in [("a", [90.0; 95].as_slice()), ("b", [900.0; 5].as_slice())] {
        window.record(pod, at(1000), reading(30.0, values));
    }
    let mut sum = Activity::default();
    ["a", "b"].iter().filter_map(|pod| window.activity(pod, at(900))).for_each(|activity| sum.add(&activity));
    let counts = sum.latency(LatencyMetric::TimeToFirstToken);
    assert_eq!(counts.total(), 100);
    assert!(counts.quantile(0.95).is_some_and(|value| value <= 100.0), "{:?}", counts.quantile(0.95));
    assert!(counts.quantile(0.96).is_some_and(|value| value > 750.0), "{:?}", counts.quantile(0.96));
}

#[test]
fn quantiles_agree_with_the_share_within() {
    let mut window = LoadWindow::default();
    window.record("a", at(1000), reading(30.0, &[12.0, 45.0, 45.0, 160.0, 161.0, 350.0, 800.0, 3500.0]));
    let counts = ttft(&window, "a", 900);
    for percent in 1..100 {
        let share = f64::from(percent) / 100.0;
        let value = counts.quantile(share).expect("observations");
        let back = counts.within(value) / counts.total() as f64;
        assert!((back - share).abs() < 1e-9, "{percent} {value} {back}");
    }
}

#[test]
fn what_is_above_the_last_edge_is_above_everything() {
    let mut window = LoadWindow::default();
    window.record("a", at(1000), reading(30.0, &[70_000.0; 5]));
    let counts = ttft(&window, "a", 900);
    assert_eq!(counts.within(60_000.0), 0.0);
    assert_eq!(counts.quantile(0.95), Some(60_000.0));
    assert_eq!(LatencyCounts::default().quantile(0.95), None);
}

#[test]
fn a_pod_takes_a_bounded_place_and_keeps_a_baseline() {
    let mut window = LoadWindow::default();
    for second in 0..600 {
        window.record("a", at(1000 + second), reading(100.0 + second as f64, &[]));
    }
    let history = &window.pods["a"].history;
    assert!(history.len() <= 32, "{}", history.len());
    assert!(history[0].at <= minus(at(1599), WINDOW));
    assert!(history.iter().all(|sample| sample.gained.is_empty()), "nothing was observed");
}

#[test]
fn a_histogram_of_another_length_counts_as_empty() {
    let mut window = LoadWindow::default();
    let mut odd = reading(30.0, &[90.0]);
    odd.time_to_first_token.counts = vec![1; 3];
    window.record("a", at(1000), odd);
    assert_eq!(ttft(&window, "a", 900).total(), 0);
}

#[test]
fn what_the_engine_built_outlives_a_failed_scrape() {
    let mut window = LoadWindow::default();
    let mut first = reading(30.0, &[]);
    first.effective = Some(crate::testing::effective());
    window.record("a", at(1000), first);
    window.record_failure("a", at(1005), "refused".into());
    assert!(window.effective("a").is_some() && window.failure("a").is_some());
    window.retain(|pod| pod != "a");
    assert!(window.effective("a").is_none());
}

proptest! {
    /// Samples hold what came with them; sums of it are what whole readings would have told.
    #[test]
    fn what_happened_is_the_difference_of_two_readings(
        pauses in vec(1_i64..40, 2..60),
        latencies in vec((0.0_f64..90_000.0, 0_usize..4), 60),
        back in 0_i64..200,
    ) {
        let (mut window, mut told, mut now) = (LoadWindow::default(), stats(), 1_000);
        let mut readings = BTreeMap::new();
        for (pause, (milliseconds, count)) in pauses.into_iter().zip(latencies) {
            now += pause;
            told.uptime_seconds = 1_000_000.0 + now as f64;
            (0..count).for_each(|_| told.time_to_first_token.observe(milliseconds));
            window.record("a", at(now), told.clone());
            readings.insert(at(now), buckets(&told.time_to_first_token));
        }
        let since = at(now - back);
        let kept: Vec<Timestamp> = window.pods["a"].history.iter().map(|sample| sample.at).collect();
        let before = kept.iter().rfind(|kept| **kept <= since).unwrap_or(&kept[0]);
        let expected = (*before < at(now)).then(|| {
            LatencyCounts(std::array::from_fn(|i| readings[&at(now)][i] - readings[before][i]))
        });
        let activity = window.activity("a", since);
        prop_assert_eq!(activity.map(|found| found.latency(LatencyMetric::TimeToFirstToken).clone()), expected);
    }
}

#[test]
fn the_reference_names_every_edge() {
    let edges = LATENCY_EDGES_MS.map(|edge| edge.to_string()).join(", ");
    assert!(include_str!("../../../../crds/README.md").contains(&edges), "{edges}");
}

#[test]
fn requests_arrive_where_they_end_or_are_refused_or_stay_and_engines_add_up() {
    let mut window = LoadWindow::default();
    let mut tell = |pod: &str, second: i64, [finished, rejected, in_flight, computed, queued, generated]: [u32; 6]| {
        let mut said = reading(500.0 + (second - 1000) as f64, &[]);
        (said.finished, said.rejected) = (finished.into(), rejected.into());
        (said.running, said.waiting) = (in_flight / 2, in_flight - in_flight / 2);
        (said.prompt_tokens, said.queued_tokens) = (computed.into(), queued.into());
        said.generation_tokens = generated.into();
        window.record(pod, at(second), said);
    };
    tell("a", 1000, [10, 4, 2, 1000, 50, 10]);
    tell("a", 1010, [15, 7, 4, 1100, 100, 40]);
    tell("b", 1000, [0, 0, 6, 0, 0, 0]);
    tell("b", 1010, [20, 0, 1, 200, 0, 70]);
    let told = |activity: &Activity| {
        [
            activity.seconds,
            activity.finished as f64,
            activity.finished_per_second,
            activity.arrived_per_second,
            activity.arrived_tokens_per_second,
            activity.prompt_tokens_per_second,
            activity.generated_tokens_per_second,
        ]
    };
    let [mut both, other] = ["a", "b"].map(|pod| window.activity(pod, at(1000)).expect("two readings"));
    assert_eq!(told(&both), [10.0, 5.0, 0.5, 1.0, 15.0, 10.0, 3.0]);
    assert_eq!(told(&other), [10.0, 20.0, 2.0, 1.5, 20.0, 20.0, 7.0]);
    both.add(&other);
    assert_eq!(told(&both), [10.0, 25.0, 2.5, 2.5, 35.0, 30.0, 10.0]);
    assert_eq!(Activity::default().inter_token_seconds(), None);
}
