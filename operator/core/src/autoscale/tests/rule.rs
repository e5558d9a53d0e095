//! One decision at a time. A situation is described by what differs from a calm one.

use std::time::Duration;

use jiff::Timestamp;
use windlass_operator_api::status::ScalingDecision::{self, Hold, ScaleDown, ScaleUp};

use crate::autoscale::policy::{Policy, Scaling};
use crate::autoscale::speed::{Sample, Speed};
use crate::autoscale::{Cadence, Decision, Memory, Reason, Supply, decide};
use crate::testing::{at, service, stats};
use crate::validate::validate;
use crate::window::LoadWindow;

const NOW: i64 = 100_000;

/// A situation: so many replicas between 1 and 8, a target of 500 ms for 95 % of first tokens.
struct Situation {
    asked: i32,
    pods: Vec<Pod>,
    leaving: i32,
    is_rolling: bool,
    overdue: i32,
    memory: Memory,
    shadow: Option<i32>,
    up_window: Duration,
    max_step: i32,
    /// Seconds since the readings.
    age: i64,
    /// Seconds since the last request, seen by a second reading.
    silence: i64,
    /// Share of each pod's KV cache in use.
    kv_usage: f64,
}

/// One serving pod and its last minute.
#[derive(Clone)]
struct Pod {
    /// Requests that got a first token in the last minute, and after how many milliseconds.
    served: Vec<f64>,
    running: u32,
    waiting: u32,
    oldest_seconds: f64,
    utilization: Option<f64>,
    is_read: bool,
    /// Prompt tokens of the last minute.
    prompt_tokens: u64,
}

fn pod(utilization: f64) -> Pod {
    let utilization = Some(utilization);
    Pod {
        served: Vec::new(),
        running: 0,
        waiting: 0,
        oldest_seconds: 0.0,
        utilization,
        is_read: true,
        prompt_tokens: 0,
    }
}

impl Pod {
    fn served(mut self, count: usize, milliseconds: f64) -> Self {
        self.served.extend(vec![milliseconds; count]);
        self
    }

    fn queue(mut self, waiting: u32, oldest_seconds: f64) -> Self {
        (self.running, self.waiting, self.oldest_seconds) = (8, waiting, oldest_seconds);
        self
    }

    fn prompted(mut self, tokens: u64) -> Self {
        self.prompt_tokens = tokens;
        self
    }

    fn blind(mut self) -> Self {
        self.utilization = None;
        self
    }

    fn silent(mut self) -> Self {
        self.is_read = false;
        self
    }
}

/// Pods that have all served for long; scaling down is not held by a window.
fn situation(pods: Vec<Pod>) -> Situation {
    let memory = Memory { recommendations: [(at(0), 1)].into(), ..Memory::default() };
    Situation {
        asked: i32::try_from(pods.len()).expect("few"),
        pods,
        leaving: 0,
        is_rolling: false,
        overdue: 0,
        memory,
        shadow: None,
        up_window: Duration::ZERO,
        max_step: 4,
        age: 0,
        silence: 0,
        kv_usage: 0.0,
    }
}

impl Situation {
    fn decide(&self) -> Decision {
        let names: Vec<String> = (0..self.pods.len()).map(|index| format!("pod-{index}")).collect();
        let supply = Supply {
            asked: self.asked,
            serving: names.iter().map(|name| (name.as_str(), at(0))).collect(),
            leaving: self.leaving,
            is_rolling: self.is_rolling,
            overdue: self.overdue,
            cold_starts: Vec::new(),
        };
        decide(&self.policy(), &supply, &self.window(&names), &self.memory, cadence(), at(NOW))
    }

    fn policy(&self) -> Policy {
        let valid = validate(&service().builtin(1, 8, 500).build()).expect("valid");
        let Scaling::Builtin(mut policy) = valid.scaling else { panic!("mode Builtin") };
        (policy.shadow, policy.up_window, policy.max_step) = (self.shadow, self.up_window, self.max_step);
        policy
    }

    fn window(&self, names: &[String]) -> LoadWindow {
        let mut window = LoadWindow::default();
        for (name, pod) in names.iter().zip(&self.pods).filter(|(_, pod)| pod.is_read) {
            let mut said = stats();
            window.record(name, read_at(self.age + self.silence + 60), said.clone());
            said.uptime_seconds += 60.0;
            pod.served.iter().for_each(|&milliseconds| said.time_to_first_token.observe(milliseconds));
            said.finished += pod.served.len() as u64;
            (said.prompt_tokens, said.kv_usage) = (said.prompt_tokens + pod.prompt_tokens, self.kv_usage);
            (said.running, said.waiting) = (pod.running, pod.waiting);
            said.oldest_queue_age_seconds = pod.oldest_seconds;
            said.utilization = pod.utilization;
            window.record(name, read_at(self.age + self.silence), said.clone());
            if self.silence > 0 {
                said.uptime_seconds += self.silence as f64;
                window.record(name, read_at(self.age), said);
            }
        }
        window
    }

    fn gives(&self, kind: ScalingDecision, replicas: i32, reason: Reason) {
        let decision = self.decide();
        assert_eq!((decision.kind, decision.replicas, decision.reason), (kind, replicas, reason), "{decision:?}");
    }

    fn is_blocked_by(&self, word: &str) {
        let decision = self.decide();
        assert_eq!(decision.kind, Hold, "{decision:?}");
        assert!(decision.blockers.iter().any(|blocker| blocker.contains(word)), "{word}: {decision:?}");
    }
}

/// One replica that has served for long.
fn alone() -> Supply<'static> {
    let serving = vec![("pod-0", at(0))];
    Supply { asked: 1, serving, leaving: 0, is_rolling: false, overdue: 0, cold_starts: Vec::new() }
}

fn read_at(age: i64) -> Timestamp {
    at(NOW - age)
}

fn cadence() -> Cadence {
    Cadence { active: Duration::from_secs(5), idle: Duration::from_secs(30) }
}

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
    let with = |served: usize| {
        let situation = situation(vec![pod(0.9).served(served, 100.0).served(2, 900.0)]);
        let mut policy = situation.policy();
        policy.targets[0].percentile = 99;
        let names = ["pod-0".to_owned()];
        let supply = alone();
        decide(&policy, &supply, &situation.window(&names), &situation.memory, cadence(), at(NOW)).kind
    };
    assert_eq!((with(97), with(98)), (Hold, ScaleUp));
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
    // A queue younger than the target tells nothing.
    situation(vec![pod(1.0).served(40, 100.0).queue(5, 0.4)]).gives(Hold, 1, Reason::AtMinimum);
}

#[test]
fn a_target_on_the_time_between_tokens_is_blind_to_queues() {
    let mut valid = situation(vec![pod(1.0).queue(50, 30.0)]).policy();
    valid.targets[0].metric = windlass_operator_api::autoscaling::LatencyMetric::InterToken;
    let situation = situation(vec![pod(1.0).queue(50, 30.0)]);
    let names = ["pod-0".to_owned()];
    let supply = alone();
    let decision = decide(&valid, &supply, &situation.window(&names), &situation.memory, cadence(), at(NOW));
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
    // What would make the rest too busy is not done, whatever was seen.
    situation.pods = vec![pod(0.65).served(30, 100.0); 4];
    situation.gives(Hold, 4, Reason::TargetsHeld);
}

#[test]
fn a_waiting_request_keeps_every_replica() {
    situation(vec![pod(0.1).queue(1, 0.1), pod(0.1)]).gives(Hold, 2, Reason::NoSignal);
}

#[test]
fn a_replica_goes_only_when_nothing_else_moves() {
    let calm = || situation(vec![pod(0.0); 3]);
    calm().gives(ScaleDown, 2, Reason::LowUtilization);
    // Of four, the one that does not serve is the one to go: it may never find a node.
    Situation { asked: 4, ..calm() }.gives(ScaleDown, 3, Reason::LowUtilization);
    Situation { leaving: 1, ..calm() }.is_blocked_by("drains");
    Situation { is_rolling: true, ..calm() }.is_blocked_by("rollout");
    let just_changed = Memory { last_change: Some(at(NOW - 30)), ..calm().memory };
    Situation { memory: just_changed, ..calm() }.is_blocked_by("less than 60 seconds ago");
}

#[test]
fn the_largest_recommendation_of_the_window_counts_for_removing() {
    let remembered = |entries: &[(i64, i32)]| Memory {
        recommendations: entries.iter().map(|(age, replicas)| (at(NOW - age), *replicas)).collect(),
        ..Memory::default()
    };
    let with = |entries| Situation { memory: remembered(entries), ..situation(vec![pod(0.0); 3]) };
    with(&[(400, 1)]).gives(ScaleDown, 2, Reason::LowUtilization);
    with(&[(400, 3), (301, 1)]).gives(ScaleDown, 2, Reason::LowUtilization);
    with(&[(400, 3), (299, 1)]).is_blocked_by("stabilizationWindowSeconds");
    // Just after a restart of the operator nothing is remembered.
    with(&[]).is_blocked_by("stabilizationWindowSeconds");
}

#[test]
fn the_smallest_recommendation_of_the_window_counts_for_adding() {
    let breached = || situation(vec![pod(0.9).served(30, 900.0); 2]);
    let with = |entries: &[(i64, i32)]| Situation {
        up_window: Duration::from_secs(60),
        memory: Memory {
            recommendations: entries.iter().map(|(age, replicas)| (at(NOW - age), *replicas)).collect(),
            ..Memory::default()
        },
        ..breached()
    };
    with(&[(90, 3)]).gives(ScaleUp, 3, Reason::TargetBreached);
    with(&[(90, 2), (30, 3)]).is_blocked_by("scaleUp.stabilizationWindowSeconds");
    with(&[]).is_blocked_by("scaleUp.stabilizationWindowSeconds");
}

#[test]
fn replicas_on_their_way_count_as_supply() {
    let breached = || situation(vec![pod(0.9).served(30, 900.0); 2]);
    breached().gives(ScaleUp, 3, Reason::TargetBreached);
    Situation { asked: 3, ..breached() }.gives(Hold, 3, Reason::AwaitingReplicas);
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
    let headroom = |tokens: u64| {
        let mut breached = situation(vec![pod(0.9).served(30, 900.0).prompted(tokens * 30); 2]);
        breached.memory.speed = known_speed();
        breached.memory.learned_at = Some(at(NOW - 5));
        Situation { asked: 3, overdue: 1, ..breached }.decide().memory.headroom
    };
    let first = Memory::default().headroom;
    assert!(headroom(9_000).0 < first.0, "two replicas are as many as the tokens ask for");
    assert_eq!(headroom(12_000), first, "they lack the third");
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
fn the_next_change_is_told_where_only_time_is_waited_for() {
    let remembered = |entries: &[(i64, i32)], last_change: Option<i64>| Memory {
        recommendations: entries.iter().map(|(age, replicas)| (at(NOW - age), *replicas)).collect(),
        last_change: last_change.map(|age| at(NOW - age)),
        ..Memory::default()
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

/// A replica of the situation's engine is filled by 10,000 prompt tokens a second and takes 10 ms for an empty step.
fn known_speed() -> Speed {
    let mut speed = Speed::default();
    let sample = |load: u32| {
        let prompt = f64::from(load) * 1000.0;
        Sample { observations: 50, inter_token_seconds: 0.01 / (1.0 - 1e-4 * prompt), prompt, generated: 0.0 }
    };
    speed.learn((0..90).map(|i| sample(i % 9)), at(NOW - 5));
    speed
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
    passed.pods[0] = passed.pods[0].clone().queue(1, 0.1);
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
    let held = Situation { pods: vec![pod(0.9).served(30, 100.0); 2], ..breached() };
    assert!(held.decide().memory.headroom.0 > first.0);
}

#[test]
fn the_kv_cache_is_a_need_of_its_own() {
    let mut full = situation(vec![pod(0.9).served(30, 100.0); 2]);
    full.memory.speed = known_speed();
    full.kv_usage = 0.9;
    full.gives(ScaleUp, 3, Reason::DemandForeseen);
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
