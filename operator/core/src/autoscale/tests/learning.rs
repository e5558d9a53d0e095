//! What is learned of replicas while they are watched.

use super::situation::{Pod, Situation, known, pod, read_at, situation};
use crate::autoscale::Memory;
use crate::autoscale::need::Trend;

/// Half a request a second, in time or late.
fn on_time(utilization: f64) -> Pod {
    pod(utilization).served(30, 100.0)
}

fn late(utilization: f64) -> Pod {
    pod(utilization).served(30, 900.0)
}

/// After readings of replicas at loads from nothing to 8,000 prompt tokens a second, of 10,000 that fill one.
fn after_all_loads(is_rolling: bool) -> Memory {
    let pod = |i: u32| {
        let load = f64::from(i % 9) / 10.0;
        pod(0.5).prompted((load * 600_000.0) as u64).between(50, 10.0 / (1.0 - load))
    };
    Situation { is_rolling, ..situation((0..20).map(pod).collect()) }.decide().memory
}

#[test]
fn what_tokens_cost_is_read_off_replicas_and_not_while_they_are_replaced() {
    let costs = after_all_loads(false).speed.costs().expect("a line");
    assert!((costs.prompt / 1e-4 - 1.0).abs() < 0.01 && (costs.step_seconds / 0.01 - 1.0).abs() < 0.01, "{costs:?}");
    assert_eq!(after_all_loads(true).speed.costs(), None);
}

#[test]
fn looks_without_a_new_reading_teach_nothing_of_costs() {
    let mut looked = situation(vec![pod(0.5).prompted(1000).between(50, 10.0)]);
    let mut weight = || {
        looked.memory = looked.decide().memory;
        looked.memory.speed.to_parts().0[0]
    };
    assert_eq!((weight(), weight(), weight()), (50.0, 50.0, 50.0));
}

#[test]
fn a_rate_is_learned_where_it_is_held_and_where_a_busy_replica_does_not_hold_it() {
    for (pod, held, saturated, expected) in [
        (on_time(0.9), None, None, (Some(0.5), None)),
        (on_time(0.9), Some(0.25), None, (Some(0.5), None)),
        // What is held is no limit.
        (on_time(0.9), None, Some(0.5), (Some(0.5), None)),
        (on_time(0.9), None, Some(0.6), (Some(0.5), Some(0.6))),
        // Without a queue, a little more could be done.
        (late(0.8), None, None, (None, Some(0.625))),
        (late(0.8).queue(1, 0.1), None, None, (None, Some(0.5))),
        (late(0.8), Some(1.0), None, (Some(0.625), Some(0.625))),
        (late(0.8), Some(0.25), None, (Some(0.25), Some(0.625))),
        (late(0.79), None, None, (None, None)),
    ] {
        let memory = Memory { held, saturated, ..Memory::default() };
        let learned = Situation { memory, ..situation(vec![pod]) }.decide().memory;
        assert_eq!((learned.held, learned.saturated), expected, "{held:?} {saturated:?}");
    }
}

#[test]
fn a_rate_is_learned_where_every_replica_was_read_and_none_is_replaced() {
    let held = |pods, is_rolling| Situation { is_rolling, ..situation(pods) }.decide().memory.held;
    assert_eq!(held(vec![on_time(0.9); 2], false), Some(0.5));
    assert_eq!(held(vec![on_time(0.9), on_time(0.9).silent()], false), None);
    assert_eq!(held(vec![on_time(0.9); 2], true), None);
}

#[test]
fn a_rate_is_of_all_that_was_read_where_too_little_ended_of_late() {
    let quiet = Situation { silence: 15, ..situation(vec![on_time(0.9)]) };
    assert_eq!(quiet.decide().memory.held, Some(30.0 / 75.0));
}

#[test]
fn a_rate_that_is_no_longer_asked_for_is_half_forgotten_in_two_hours() {
    let first = Memory { held: Some(1.0), ..Memory::default() };
    let later =
        (0..1440).fold(first, |memory, _| Situation { memory, ..situation(vec![on_time(0.9)]) }.decide().memory);
    assert!(later.held.is_some_and(|held| (held - 0.75).abs() < 0.02), "{:?}", later.held);
}

#[test]
fn breaches_that_the_tokens_tell_of_beforehand_say_nothing_of_the_headroom() {
    let headroom = |tokens: u64| {
        let mut most = known(vec![late(1.0).prompted(tokens * 60); 8]);
        most.memory.learned_at = Some(read_at(5));
        most.decide().memory.headroom.0
    };
    let first = Memory::default().headroom.0;
    assert!(headroom(4_900) < first, "eight replicas should have been enough");
    assert_eq!(headroom(5_100), first, "a ninth was not allowed");
}

#[test]
fn held_targets_raise_the_headroom_as_far_as_replicas_are_filled() {
    let raised = |tokens: u64, kv_usage: f64| {
        let mut held = Situation { kv_usage, ..known(vec![on_time(0.5).prompted(tokens * 60); 2]) };
        held.memory.learned_at = Some(read_at(5));
        (held.decide().memory.headroom.0 / held.memory.headroom.0).ln()
    };
    // Each is to be filled to 5,000 prompt tokens a second.
    let most = raised(5_000, 0.0);
    assert!(most > 0.0);
    for (tokens, kv_usage, share) in
        [(0, 0.0, 0.0), (1_000, 0.0, 0.2), (2_500, 0.0, 0.5), (9_000, 0.0, 1.0), (1_000, 0.425, 0.5), (0, 0.85, 1.0)]
    {
        let found = raised(tokens, kv_usage) / most;
        assert!((found - share).abs() < 0.01, "{tokens} {kv_usage}: {found}");
    }
}

#[test]
fn a_load_that_was_not_read_is_no_load_of_nothing() {
    let mut dark = known(vec![on_time(0.9), on_time(0.9).silent()]);
    dark.memory.trend = Trend::default().with(0.9, read_at(300));
    assert_eq!(dark.decide().memory.trend, dark.memory.trend);
    dark.pods[1] = on_time(0.9);
    assert_ne!(dark.decide().memory.trend, dark.memory.trend);
}
