//! Each peer does what its documentation says, at the points where it says a number.

use crate::policy::{Name, Policy};
use crate::protocol::{Gateway, Pod, PodMetrics, PodPhase, Tick};
use crate::world::Scenario;

fn policy(name: Name) -> Box<dyn Policy> {
    name.policy(&Scenario::new("test", 60.0).hello()).expect("valid bounds")
}

fn tick(t: f64, pods: i32, said: PodMetrics) -> Tick {
    let pod = |index: i32| Pod {
        name: format!("pod-{index}"),
        phase: PodPhase::Ready,
        capacity_type: Default::default(),
        age_seconds: t,
        ready_seconds: Some(t),
        reclaim_in_seconds: None,
        metrics: Some(said.clone()),
        prometheus: None,
    };
    Tick { t, gateway: Gateway::default(), pods: (0..pods).map(pod).collect() }
}

/// What the policy wants after so many seconds of the same reading of `pods` pods.
fn after(name: Name, seconds: i32, pods: i32, said: &PodMetrics) -> i32 {
    let mut policy = policy(name);
    let ticks = (0..=seconds / 5).map(|step| f64::from(step) * 5.0);
    ticks.map(|t| policy.decide(&tick(t, pods, said.clone())).desired_replicas).last().expect("a tick")
}

fn busy(gpu_utilization: f64) -> PodMetrics {
    PodMetrics { gpu_utilization, ..PodMetrics::default() }
}

fn queued(waiting: u32) -> PodMetrics {
    PodMetrics { waiting, ..PodMetrics::default() }
}

fn full(kv_usage: f64) -> PodMetrics {
    PodMetrics { kv_usage, ..PodMetrics::default() }
}

#[test]
fn hpa_is_proportional_to_80_percent_with_a_tolerance_and_waits_before_going_down() {
    assert_eq!(after(Name::Hpa, 0, 4, &busy(1.0)), 5);
    assert_eq!(after(Name::Hpa, 0, 4, &busy(0.87)), 4);
    assert_eq!(after(Name::Hpa, 0, 4, &busy(0.2)), 1, "nothing else was ever recommended");
    let mut hpa = policy(Name::Hpa);
    hpa.decide(&tick(0.0, 4, busy(0.8)));
    assert_eq!(hpa.decide(&tick(300.0, 4, busy(0.2))).desired_replicas, 4);
    assert_eq!(hpa.decide(&tick(315.0, 4, busy(0.2))).desired_replicas, 1);
}

#[test]
fn keda_wants_a_pod_for_five_waiting_requests_and_at_most_doubles() {
    assert_eq!(after(Name::Keda, 0, 2, &queued(20)), 6, "8 wanted, 4 more at a time");
    assert_eq!(after(Name::Keda, 0, 5, &queued(20)), 10, "20 wanted, twice as many at a time");
    assert_eq!(after(Name::Keda, 0, 2, &queued(5)), 2);
}

#[test]
fn kpa_wants_a_pod_for_70_requests_and_panics_at_twice() {
    assert_eq!(after(Name::Kpa, 60, 2, &queued(100)), 3);
    let mut kpa = policy(Name::Kpa);
    kpa.decide(&tick(0.0, 2, queued(300)));
    assert_eq!(kpa.decide(&tick(5.0, 2, queued(0))).desired_replicas, 9, "a panic takes nothing back");
    assert_eq!(kpa.decide(&tick(70.0, 8, queued(0))).desired_replicas, 4, "then half at a time");
}

#[test]
fn apa_is_proportional_to_half_of_the_cache_within_a_factor_of_two() {
    assert_eq!(after(Name::Apa, 0, 4, &full(0.75)), 6);
    assert_eq!(after(Name::Apa, 0, 4, &full(0.01)), 2);
    assert_eq!(after(Name::Apa, 0, 4, &full(0.54)), 4);
}

#[test]
fn wva_adds_one_where_little_is_spare_and_waits_for_four_minutes() {
    assert_eq!(after(Name::WvaV1, 0, 4, &full(0.75)), 5);
    assert_eq!(after(Name::WvaV1, 0, 4, &full(0.60)), 4);
    assert_eq!(after(Name::WvaV1, 0, 4, &full(0.30)), 3);
    let mut wva = policy(Name::WvaV1);
    wva.decide(&tick(0.0, 4, full(0.6)));
    assert_eq!(wva.decide(&tick(240.0, 4, full(0.75))).desired_replicas, 4);
    assert_eq!(wva.decide(&tick(300.0, 4, full(0.75))).desired_replicas, 5);
}

#[test]
fn wva_counts_tokens_against_80_percent_of_the_cache_or_what_was_seen_to_be_too_much() {
    assert_eq!(after(Name::WvaV2, 0, 4, &full(0.9)), 6, "4 × 360,000 / 0.85 of 320,000 each");
    assert_eq!(after(Name::WvaV2, 0, 4, &full(0.2)), 2, "4 × 80,000 / 0.7 fit into two");
    let saturated = PodMetrics { waiting: 8, ..full(0.2) };
    assert_eq!(after(Name::WvaV2, 0, 4, &saturated), 5, "80,000 are all that a pod computes");
}

#[test]
fn the_plain_rule_takes_ten_samples_and_one_step() {
    assert_eq!(after(Name::Plain, 40, 4, &busy(0.2)), 4);
    assert_eq!(after(Name::Plain, 45, 4, &busy(0.2)), 3);
    assert_eq!(after(Name::Plain, 45, 4, &busy(0.9)), 4, "no latency is breached");
    let mut late = busy(0.9);
    late.ttft = crate::protocol::Histogram { cumulative: [vec![0; 22], vec![50]].concat(), sum: 5000.0 };
    assert_eq!(after(Name::Plain, 45, 4, &late), 5);
}
