//! One decision at a time.

use std::time::Duration;

use windlass_operator_api::autoscaling::LatencyMetric::{InterToken, TimeToFirstToken};
use windlass_operator_api::status::ScalingDecision::{Hold, ScaleDown, ScaleUp};

use super::situation::{NOW, Pod, Situation, aiming, known, known_speed, pod, read_at, remembered, situation};
use crate::autoscale::cold_start::ColdStarts;
use crate::autoscale::need::Trend;
use crate::autoscale::policy::Policy;
use crate::autoscale::{Memory, Reason};
use crate::testing::at;

#[test]
fn a_breach_while_engines_are_busy_adds_a_replica() {
    situation(vec![pod(0.9).served(18, 100.0).served(2, 900.0)]).gives(ScaleUp, 2, Reason::TargetBreached);
}

#[test]
fn a_percentile_within_the_target_adds_none() {
    let one_in_a_hundred = pod(0.9).served(99, 100.0).served(1, 9000.0);
    situation(vec![one_in_a_hundred]).gives(Hold, 1, Reason::AtMinimum);
}

#[test]
fn percentiles_are_of_all_pods_together_and_not_a_mean_of_theirs() {
    // The worst pod's own percentile is far above, the mean of both too; of all requests 4 % are late.
    let situation = situation(vec![pod(0.9).served(96, 100.0), pod(0.9).served(4, 5000.0)]);
    situation.gives(Hold, 2, Reason::TargetsHeld);
}

#[test]
fn fewer_than_twenty_observations_are_no_signal() {
    situation(vec![pod(0.9).served(19, 9000.0); 1]).gives(Hold, 1, Reason::AtMinimum);
    situation(vec![pod(0.9).served(9, 9000.0), pod(0.9)]).gives(Hold, 2, Reason::NoSignal);
    situation(vec![pod(0.9).served(20, 9000.0)]).gives(ScaleUp, 2, Reason::TargetBreached);
}

#[test]
fn the_99th_percentile_needs_a_hundred_observations() {
    let policy = aiming(&[(TimeToFirstToken, 99, 500)]);
    let with = |served| situation(vec![pod(0.9).served(served, 100.0).served(2, 900.0)]).decide_by(&policy).kind;
    assert_eq!((with(97), with(98)), (Hold, ScaleUp));
}

#[test]
fn a_percentile_is_held_until_more_are_late_than_it_leaves() {
    let with = |percentile, late| {
        let served = pod(0.9).served(20 - late, 100.0).served(late, 900.0);
        situation(vec![served]).decide_by(&aiming(&[(TimeToFirstToken, percentile, 500)])).kind
    };
    assert_eq!((with(95, 1), with(95, 2)), (Hold, ScaleUp));
    assert_eq!((with(90, 2), with(90, 3)), (Hold, ScaleUp));
}

#[test]
fn a_breach_while_requests_wait_adds_a_replica_however_idle_engines_look() {
    situation(vec![pod(0.2).served(20, 900.0).queue(3, 0.1)]).gives(ScaleUp, 2, Reason::TargetBreached);
}

#[test]
fn a_breach_with_idle_engines_and_empty_queues_is_no_matter_of_capacity() {
    situation(vec![pod(0.79).served(20, 900.0)]).gives(Hold, 1, Reason::LatencyNotCapacity);
    situation(vec![pod(0.80).served(20, 900.0)]).gives(ScaleUp, 2, Reason::TargetBreached);
}

#[test]
fn what_was_late_before_the_last_request_went_is_no_breach_any_more() {
    let mut gone = situation(vec![pod(0.1).served(30, 900.0); 2]);
    gone.gives(Hold, 2, Reason::LatencyNotCapacity);
    gone.silence = 40;
    gone.gives(ScaleDown, 1, Reason::LowUtilization);
}

#[test]
fn a_breach_is_never_held_back_by_a_missing_utilization() {
    situation(vec![pod(0.0).blind().served(20, 900.0)]).gives(ScaleUp, 2, Reason::TargetBreached);
}

#[test]
fn the_age_of_the_queue_tells_what_no_latency_has_told_yet() {
    let stalled = situation(vec![pod(1.0).queue(5, 30.0)]);
    stalled.gives(ScaleUp, 2, Reason::TargetBreached);
    assert!(stalled.decide().message.contains("30000 ms"), "{}", stalled.decide().message);
    // Old observations look healthy; the five that wait are more than 5 % of all.
    situation(vec![pod(1.0).served(40, 100.0).queue(5, 30.0)]).gives(ScaleUp, 2, Reason::TargetBreached);
    // One straggler among a hundred is not.
    situation(vec![pod(1.0).served(100, 100.0).queue(1, 30.0)]).gives(Hold, 1, Reason::AtMinimum);
    // A queue no older than the target tells nothing.
    situation(vec![pod(1.0).served(40, 100.0).queue(5, 0.4)]).gives(Hold, 1, Reason::AtMinimum);
    situation(vec![pod(1.0).queue(5, 0.5)]).gives(Hold, 1, Reason::AtMinimum);
}

#[test]
fn those_that_wait_are_taken_to_have_come_evenly_since_the_oldest() {
    // For twice the target: half of them wait for longer than it.
    let waiting = |waiting| situation(vec![pod(1.0).served(100, 100.0).queue(waiting, 1.0)]);
    waiting(10).gives(Hold, 1, Reason::AtMinimum);
    waiting(11).gives(ScaleUp, 2, Reason::TargetBreached);
}

#[test]
fn of_several_breaches_the_worst_is_told_and_how_busy_engines_are() {
    let policy = aiming(&[(TimeToFirstToken, 95, 400), (TimeToFirstToken, 95, 500)]);
    for (pod, told) in [
        (pod(0.9).served(30, 900.0), "p95 is 988 ms, above 400 ms; engines are 90 % busy"),
        (pod(0.9).blind().served(30, 900.0), "p95 is 988 ms, above 400 ms; engines are an unknown share busy"),
        (pod(0.9).queue(5, 30.0), "waits for 30000 ms, above the time to first token target of 400 ms"),
    ] {
        let message = situation(vec![pod]).decide_by(&policy).message;
        assert!(message.contains(told), "{message}");
    }
}

#[test]
fn a_target_on_the_time_between_tokens_is_blind_to_queues() {
    let decision = situation(vec![pod(1.0).queue(50, 30.0)]).decide_by(&aiming(&[(InterToken, 95, 500)]));
    assert_eq!(decision.kind, Hold, "{decision:?}");
}

#[test]
fn what_is_missing_or_stale_holds() {
    situation(vec![pod(0.0).silent(), pod(0.0).silent()]).gives(Hold, 2, Reason::StaleMetrics);
    let mut none = situation(Vec::new());
    none.asked = 3;
    none.gives(Hold, 3, Reason::NoReadyReplicas);
    situation(vec![pod(0.0), pod(0.0).silent()]).is_blocked_by("recent reading");
}

#[test]
fn a_reading_is_stale_after_three_were_due() {
    let busy = |age| Situation { age, ..situation(vec![pod(0.1).queue(0, 0.0), pod(0.1).queue(0, 0.0)]) };
    assert_ne!(busy(20).decide().reason, Reason::StaleMetrics);
    busy(21).gives(Hold, 2, Reason::StaleMetrics);
    let idle = |age| Situation { age, ..situation(vec![pod(0.0), pod(0.0)]) };
    assert_ne!(idle(95).decide().reason, Reason::StaleMetrics);
    idle(96).gives(Hold, 2, Reason::StaleMetrics);
}

#[test]
fn some_silent_pods_do_not_hide_a_breach_of_the_others() {
    let situation = situation(vec![pod(0.9).served(30, 900.0), pod(0.0).silent()]);
    situation.gives(ScaleUp, 3, Reason::TargetBreached);
}

#[test]
fn low_utilization_removes_one_replica() {
    situation(vec![pod(0.29).served(30, 100.0); 3]).gives(ScaleDown, 2, Reason::LowUtilization);
    situation(vec![pod(0.31).served(30, 100.0); 3]).gives(Hold, 3, Reason::TargetsHeld);
    situation(vec![pod(0.30).served(30, 100.0); 2]).gives(Hold, 2, Reason::TargetsHeld);
}

#[test]
fn low_utilization_removes_none_where_the_rest_would_be_too_busy() {
    let idle_below = |scale_down_below| Policy { scale_down_below, ..situation(Vec::new()).policy() };
    let replicas =
        |utilization| situation(vec![pod(utilization).served(30, 100.0); 2]).decide_by(&idle_below(0.5)).replicas;
    assert_eq!((replicas(0.39), replicas(0.40)), (1, 2));
}

#[test]
fn no_traffic_at_all_scales_down_to_the_minimum_and_not_below() {
    situation(vec![pod(0.0), pod(0.0)]).gives(ScaleDown, 1, Reason::LowUtilization);
    situation(vec![pod(0.0)]).gives(Hold, 1, Reason::AtMinimum);
    // Nothing is known of utilization, but that nothing runs, waits or comes is.
    situation(vec![pod(0.0).blind(), pod(0.0).blind()]).gives(ScaleDown, 1, Reason::RemainderHolds);
}

#[test]
fn a_remainder_that_was_seen_to_hold_the_targets_removes_one_replica() {
    let mut situation = situation(vec![pod(0.5).served(30, 100.0); 4]);
    situation.gives(Hold, 4, Reason::TargetsHeld);
    // Half a request a second each; two thirds with three; this morning one replica managed a whole one.
    situation.memory.held = Some(1.0);
    situation.gives(ScaleDown, 3, Reason::RemainderHolds);
    // A tenth is left for what differs from this morning.
    situation.memory.held = Some(0.75);
    situation.gives(ScaleDown, 3, Reason::RemainderHolds);
    situation.memory.held = Some(0.7);
    situation.gives(Hold, 4, Reason::TargetsHeld);
}

#[test]
fn a_remainder_that_would_be_too_busy_is_not_left_whatever_was_seen() {
    for (utilization, count) in [(0.65, 4), (0.40, 2)] {
        let mut situation = situation(vec![pod(utilization).served(30, 100.0); count]);
        situation.memory.held = Some(2.0);
        assert_eq!(situation.decide().reason, Reason::TargetsHeld, "{utilization}");
    }
}

#[test]
fn a_request_that_waits_for_more_than_a_step_keeps_every_replica() {
    let waited = |seconds: f64| move |pod: Pod| vec![pod.clone().queue(1, seconds), pod];
    let (step, longer) = (waited(1.0), waited(1.1));
    let slow = aiming(&[(TimeToFirstToken, 95, 5000)]);
    let idle = |pods| situation(pods).decide_by(&slow).reason;
    assert_eq!((idle(step(pod(0.1))), idle(longer(pod(0.1)))), (Reason::LowUtilization, Reason::NoSignal));
    let by_rate = |pods| {
        let mut held = situation(pods);
        held.memory.held = Some(2.0);
        held.decide().reason
    };
    let calm = pod(0.35).served(30, 100.0);
    assert_eq!((by_rate(step(calm.clone())), by_rate(longer(calm))), (Reason::RemainderHolds, Reason::TargetsHeld));
    let by_tokens = |pods| known(pods).decide().reason;
    let busy = pod(1.0).served(30, 100.0).prompted(4_000 * 30);
    assert_eq!((by_tokens(step(busy.clone())), by_tokens(longer(busy))), (Reason::RemainderHolds, Reason::TargetsHeld));
}

#[test]
fn a_replica_goes_only_when_nothing_else_moves() {
    let calm = || situation(vec![pod(0.0); 3]);
    calm().gives(ScaleDown, 2, Reason::LowUtilization);
    // Of four, the one that does not serve is the one to go: it may never find a node.
    Situation { asked: 4, ..calm() }.gives(ScaleDown, 3, Reason::LowUtilization);
    Situation { leaving: 1, ..calm() }.is_blocked_by("drains");
    Situation { asked: 4, faltering: 1, ..calm() }.is_blocked_by("a replica that served is not ready now");
    Situation { is_rolling: true, ..calm() }.is_blocked_by("rollout");
    let just_changed = Memory { last_change: Some(at(NOW - 30)), ..calm().memory };
    Situation { memory: just_changed, ..calm() }.is_blocked_by("less than 60 seconds ago");
}

#[test]
fn the_largest_recommendation_of_the_window_counts_for_removing() {
    let with = |entries| Situation { memory: remembered(entries), ..situation(vec![pod(0.0); 3]) };
    with(&[(400, 1)]).gives(ScaleDown, 2, Reason::LowUtilization);
    with(&[(400, 3), (300, 1)]).gives(ScaleDown, 2, Reason::LowUtilization);
    with(&[(400, 3), (299, 1)]).is_blocked_by("stabilizationWindowSeconds");
    // Just after a restart of the operator nothing is remembered.
    with(&[]).is_blocked_by("stabilizationWindowSeconds");
}

#[test]
fn the_smallest_recommendation_of_the_window_counts_for_adding() {
    let breached = || situation(vec![pod(0.9).served(30, 900.0); 2]);
    let with = |entries: &[(i64, i32)]| Situation {
        up_window: Duration::from_secs(60),
        memory: remembered(entries),
        ..breached()
    };
    with(&[(90, 3)]).gives(ScaleUp, 3, Reason::TargetBreached);
    with(&[(90, 2), (30, 3)]).is_blocked_by("scaleUp.stabilizationWindowSeconds");
    with(&[]).is_blocked_by("scaleUp.stabilizationWindowSeconds");
    // So many requests wait that six replicas would be needed.
    let flooded = |entries| Situation { pods: vec![pod(1.0).served(30, 900.0).queue(60, 30.0); 2], ..with(entries) };
    flooded(&[(90, 4), (30, 3)]).gives(ScaleUp, 3, Reason::TargetBreached);
    flooded(&[(200, 3), (90, 4)]).gives(ScaleUp, 4, Reason::TargetBreached);
}

#[test]
fn a_number_that_is_right_waits_for_nothing() {
    let right = situation(vec![pod(0.5).served(30, 100.0); 2]);
    let decision = Situation { up_window: Duration::from_secs(60), ..right }.decide();
    assert_eq!((decision.kind, decision.reason), (Hold, Reason::TargetsHeld));
    assert_eq!((decision.blockers, decision.next_change), (vec![], None));
}

#[test]
fn replicas_on_their_way_count_as_supply() {
    let breached = || situation(vec![pod(0.9).served(30, 900.0); 2]);
    breached().gives(ScaleUp, 3, Reason::TargetBreached);
    Situation { asked: 3, ..breached() }.gives(Hold, 3, Reason::AwaitingReplicas);
}

#[test]
fn what_has_just_come_gets_time_to_take_the_load_and_more_where_it_is_known_to_be_enough() {
    for (pod, seconds) in [(pod(1.0).queue(5, 30.0), 30), (pod(0.9).served(30, 900.0), 60)] {
        let reason = |age| Situation { came: Some(age), ..situation(vec![pod.clone(); 2]) }.decide().reason;
        assert_eq!(reason(seconds - 1), Reason::AwaitingReplicas, "{seconds}");
        assert_eq!(reason(seconds), Reason::TargetBreached, "{seconds}");
    }
}

#[test]
fn what_does_not_come_is_not_waited_for_and_no_more_is_asked_for() {
    let breached = || situation(vec![pod(0.9).served(30, 900.0); 2]);
    Situation { asked: 4, overdue: 1, ..breached() }.gives(Hold, 4, Reason::AwaitingReplicas);
    let stuck = Situation { asked: 4, overdue: 2, ..breached() };
    stuck.gives(Hold, 4, Reason::ReplicasStuck);
    assert!(stuck.decide().message.contains("2 of 4 replicas did not come"), "{}", stuck.decide().message);
    // A new pod of a rollout that does not start is none that was asked for.
    Situation { overdue: 1, ..breached() }.gives(ScaleUp, 3, Reason::TargetBreached);
    // Nor is more asked for ahead of a load.
    let mut foreseen = situation(vec![pod(1.0).served(30, 100.0).prompted(20_000 * 30); 2]);
    foreseen.memory.speed = known_speed();
    Situation { asked: 3, overdue: 1, ..foreseen }.gives(Hold, 3, Reason::ReplicasStuck);
}

#[test]
fn the_headroom_is_learned_beside_what_is_stuck_where_the_others_are_enough() {
    let headroom = |tokens: u64, kv_usage: f64| {
        let mut breached = situation(vec![pod(0.9).served(30, 900.0).prompted(tokens * 30); 2]);
        breached.memory.speed = known_speed();
        breached.memory.learned_at = Some(at(NOW - 5));
        Situation { asked: 3, overdue: 1, kv_usage, ..breached }.decide().memory.headroom
    };
    let first = Memory::default().headroom;
    assert!(headroom(9_000, 0.0).0 < first.0, "two replicas are as many as the tokens ask for");
    assert_eq!(headroom(12_000, 0.0), first, "they lack the third");
    assert!(headroom(0, 0.85).0 < first.0, "two are as many as the KV cache asks for");
    assert_eq!(headroom(0, 0.86), first, "they lack a third");
}

#[test]
fn however_often_it_is_looked_no_more_than_a_step_is_added_in_a_period() {
    let flooded = || situation(vec![pod(1.0).served(30, 900.0).queue(60, 30.0); 2]);
    let added = |age: i64, replicas: i32| Memory { added: [(at(NOW - age), replicas)].into(), ..flooded().memory };
    let after = |age, replicas| Situation { asked: 2 + replicas, memory: added(age, replicas), ..flooded() };
    after(1, 3).gives(ScaleUp, 6, Reason::TargetBreached);
    after(1, 4).is_blocked_by("scaleUp.maxStep: 4 in 5 seconds");
    assert_eq!(after(1, 4).decide().next_change, Some(at(NOW + 4)));
    after(5, 4).gives(ScaleUp, 8, Reason::TargetBreached);
    let remembered = flooded().decide().memory;
    assert_eq!(remembered.added, [(at(NOW), 4)]);
}

#[test]
fn what_was_added_is_remembered_for_a_period() {
    let flooded = |age, replicas| {
        let memory = Memory { added: [(at(NOW - age), replicas)].into(), ..Memory::default() };
        let pods = vec![pod(1.0).served(30, 900.0).queue(60, 30.0); 2];
        Situation { asked: 2 + replicas, memory, ..situation(pods) }.decide().memory.added
    };
    assert_eq!(flooded(4, 3), [(at(NOW - 4), 3), (at(NOW), 1)]);
    assert_eq!(flooded(5, 3), [(at(NOW), 3)]);
    assert_eq!(flooded(6, 3), [(at(NOW), 3)]);
}

#[test]
fn the_next_change_is_told_where_only_time_is_waited_for() {
    let remembered = |entries: &[(i64, i32)], last_change: Option<i64>| Memory {
        last_change: last_change.map(|age| at(NOW - age)),
        ..remembered(entries)
    };
    let idle = |memory| Situation { memory, ..situation(vec![pod(0.0); 3]) };
    for (memory, expected) in [
        (remembered(&[(400, 1)], None), None),
        (remembered(&[(400, 3), (299, 1)], None), Some(1)),
        (remembered(&[(400, 3), (200, 1), (100, 3), (50, 1)], None), Some(250)),
        (remembered(&[], None), Some(300)),
        (remembered(&[(400, 1)], Some(20)), Some(40)),
        (remembered(&[(400, 3), (290, 1)], Some(20)), Some(40)),
    ] {
        assert_eq!(idle(memory.clone()).decide().next_change, expected.map(|wait| at(NOW + wait)), "{memory:?}");
    }
    let drains = Situation { leaving: 1, ..idle(remembered(&[(400, 3), (299, 1)], None)) };
    assert_eq!(drains.decide().next_change, None, "nobody knows when");
    let breached = Situation {
        up_window: Duration::from_secs(60),
        memory: remembered(&[(90, 2), (30, 3)], None),
        ..situation(vec![pod(0.9).served(30, 900.0); 2])
    };
    assert_eq!(breached.decide().next_change, Some(at(NOW + 30)));
}

#[test]
fn more_is_asked_for_while_waiting_only_when_the_known_rate_says_so() {
    // Both finish half a request a second and 60 wait: three more a second than two replicas manage.
    let flooded = || situation(vec![pod(1.0).served(30, 900.0).queue(60, 30.0); 2]);
    let decision = flooded().decide();
    assert_eq!(decision.reason, Reason::TargetBreached);
    assert_eq!(decision.replicas, 6, "bounded by maxStep: {decision:?}");
    Situation { asked: 5, ..flooded() }.gives(ScaleUp, 8, Reason::TargetBreached);
    Situation { asked: 8, ..flooded() }.gives(Hold, 8, Reason::AtMaximum);
    Situation { max_step: 1, ..flooded() }.gives(ScaleUp, 3, Reason::TargetBreached);
}

#[test]
fn tokens_that_arrive_are_met_before_a_target_is_breached() {
    // Two replicas at half of 10,000 tokens a second are 10,000.
    let arriving = |tokens: u64| {
        let mut situation = situation(vec![pod(1.0).served(30, 100.0).prompted(tokens * 30); 2]);
        situation.memory.speed = known_speed();
        situation
    };
    arriving(9_500).gives(Hold, 2, Reason::TargetsHeld);
    arriving(10_500).gives(ScaleUp, 3, Reason::DemandForeseen);
    arriving(40_000).gives(ScaleUp, 6, Reason::DemandForeseen);
    Situation { max_step: 1, ..arriving(40_000) }.gives(ScaleUp, 3, Reason::DemandForeseen);
    Situation { asked: 3, ..arriving(10_500) }.gives(Hold, 3, Reason::TargetsHeld);
    let message = arriving(10_500).decide().message;
    assert!(message.contains("10500 prompt") && message.contains("1.05 replicas"), "{message}");
    // Enough is what would be filled to 0.85 of that at most.
    arriving(4_500).gives(Hold, 2, Reason::TargetsHeld);
    arriving(4_000).gives(ScaleDown, 1, Reason::RemainderHolds);
}

#[test]
fn a_breach_by_a_load_that_has_passed_adds_nothing() {
    let mut passed = situation(vec![pod(0.9).served(30, 900.0).prompted(1000); 2]);
    passed.gives(ScaleUp, 3, Reason::TargetBreached);
    passed.memory.speed = known_speed();
    passed.gives(Hold, 2, Reason::LoadHasPassed);
    passed.pods[0] = passed.pods[0].clone().queue(1, 1.0);
    passed.gives(Hold, 2, Reason::LoadHasPassed);
    passed.pods[0] = passed.pods[0].clone().queue(1, 1.1);
    passed.gives(ScaleUp, 3, Reason::TargetBreached);
}

#[test]
fn a_breach_with_enough_replicas_lowers_the_headroom_and_one_with_some_on_their_way_does_not() {
    let breached = || {
        let mut situation = situation(vec![pod(0.9).served(30, 900.0); 2]);
        situation.memory.speed = known_speed();
        situation.memory.learned_at = Some(at(NOW - 5));
        situation
    };
    let first = breached().memory.headroom;
    assert!(breached().decide().memory.headroom.0 < first.0);
    let awaiting = Situation { asked: 3, ..breached() };
    assert_eq!(awaiting.decide().memory.headroom, first);
    let idle = Situation { pods: vec![pod(0.5).served(30, 900.0); 2], ..breached() };
    assert_eq!(idle.decide().memory.headroom, first, "no matter of capacity");
    let held = Situation { pods: vec![pod(0.9).served(30, 100.0).prompted(60_000); 2], ..breached() };
    assert!(held.decide().memory.headroom.0 > first.0);
}

#[test]
fn the_kv_cache_is_a_need_of_its_own() {
    let mut full = situation(vec![pod(0.9).served(30, 100.0); 2]);
    full.memory.speed = known_speed();
    full.kv_usage = 0.9;
    full.gives(ScaleUp, 3, Reason::DemandForeseen);
    // Just full, it has not passed.
    full.kv_usage = 0.85;
    full.pods = vec![pod(0.9).served(30, 900.0); 2];
    full.gives(ScaleUp, 3, Reason::TargetBreached);
}

#[test]
fn a_target_on_the_time_between_tokens_leaves_less_of_a_replica_to_fill() {
    let fill = |metric, milliseconds| {
        let decision = known(vec![pod(0.5)]).decide_by(&aiming(&[(metric, 95, milliseconds)]));
        decision.need.expect("costs are known").fill / decision.memory.headroom.0
    };
    assert_eq!(fill(TimeToFirstToken, 25), 1.0);
    // A mean of 20 ms is planned for, twice an empty step.
    assert!((fill(InterToken, 25) - 0.5).abs() < 1e-6, "{}", fill(InterToken, 25));
}

#[test]
fn prompts_that_wait_are_to_be_computed_within_a_minute_beside_those_that_arrive() {
    // 1,000 tokens a second arrived, and none was computed.
    let need = known(vec![pod(0.5).behind(60_000)]).decide().need.expect("costs are known");
    assert!((need.load - 0.2).abs() < 1e-6, "{need:?}");
}

#[test]
fn of_requests_that_arrive_answers_are_expected_as_long_as_of_those_that_ended() {
    let told = |served: usize, waiting: u32| {
        let pod = pod(1.0).served(served, 100.0).queue(waiting, 0.1).prompted(20_000 * 60).generated(600);
        known(vec![pod]).decide().message
    };
    // Thirty got twenty tokens each, and ninety more have come: two a second.
    assert!(told(30, 82).contains("20000 prompt and 40 answer tokens"), "{}", told(30, 82));
    assert!(told(10, 82).contains("20000 prompt and 10 answer tokens"), "of too few: {}", told(10, 82));
}

#[test]
fn a_load_that_grows_is_met_as_it_will_be_once_a_replica_serves() {
    let growing = |each_second: f64| {
        let mut growing = known(vec![pod(1.0).served(30, 100.0).prompted(9_500 * 30); 2]);
        let before = |seconds: i64| 0.95 - each_second * seconds as f64;
        growing.memory.trend = (0..600).rev().fold(Trend::default(), |trend, s| trend.with(before(s), read_at(s)));
        growing.memory.cold_starts = ColdStarts::of_parts([Duration::from_secs(180)], None);
        growing
    };
    growing(0.0).gives(Hold, 2, Reason::TargetsHeld);
    growing(0.001).gives(ScaleUp, 3, Reason::DemandForeseen);
}

#[test]
fn low_utilization_removes_none_that_the_tokens_would_ask_back() {
    let mut idle = known(vec![pod(0.1).served(30, 100.0); 3]);
    idle.gives(ScaleDown, 2, Reason::LowUtilization);
    idle.kv_usage = 0.6;
    idle.gives(Hold, 3, Reason::TargetsHeld);
}

#[test]
fn a_target_that_an_empty_engine_misses_leaves_the_others_to_be_planned_for() {
    // An empty step takes 10 ms, more than the mean that is planned for 12 ms.
    let busy = known(vec![pod(1.0).served(30, 900.0).prompted(9_000 * 30); 2]);
    let decision = busy.decide_by(&aiming(&[(InterToken, 95, 12), (TimeToFirstToken, 95, 500)]));
    assert_eq!((decision.replicas, decision.reason), (3, Reason::TargetBreached), "{decision:?}");
    assert!(decision.need.is_some_and(|need| need.fill > 0.4), "{decision:?}");
}

#[test]
fn bounds_come_first() {
    let calm = || situation(vec![pod(0.5).served(30, 100.0); 2]);
    Situation { asked: 9, ..calm() }.gives(ScaleDown, 8, Reason::AboveMaximum);
    let mut none = situation(Vec::new());
    none.asked = 0;
    none.gives(ScaleUp, 1, Reason::BelowMinimum);
}

#[test]
fn in_shadow_the_decision_is_made_and_nothing_is_remembered_as_done() {
    let shadow = Situation { shadow: Some(1), ..situation(vec![pod(0.9).served(30, 900.0)]) };
    shadow.gives(ScaleUp, 2, Reason::TargetBreached);
    assert_eq!(shadow.decide().memory.last_change, None);
}

#[test]
fn inputs_say_what_was_measured() {
    let inputs = situation(vec![pod(0.9).served(30, 900.0)]).decide().inputs;
    assert_eq!((inputs[0].samples, inputs[0].breached), (20, true));
    assert!(inputs[0].measured_milliseconds.is_some_and(|value| value > 500));
    assert_eq!(situation(vec![pod(0.9)]).decide().inputs[0].measured_milliseconds, None);
}
