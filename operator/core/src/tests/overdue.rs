//! Replicas that do not come are waited for as long as a rollout is given, and not for ever.

use std::sync::Arc;

use jiff::SignedDuration;
use k8s_openapi::api::apps::v1::DeploymentCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;
use windlass_engine_contract::stats::Stats;

use crate::plan::Step;
use crate::testing::cluster::Cluster;
use crate::testing::{ServiceBuilder, service, stats};

/// Why the autoscaler decides as it does with a breached target, so many seconds after a second replica was asked for.
/// `hinder` keeps it from coming.
fn reason_after(spec: ServiceBuilder, seconds: i64, hinder: impl Fn(&mut Cluster)) -> String {
    reason_after_scaling(spec, ("llama", 2), seconds, hinder)
}

/// The same where the second replica was asked of this Deployment, by so many replicas.
fn reason_after_scaling(
    spec: ServiceBuilder,
    (deployment, replicas): (&str, i32),
    seconds: i64,
    hinder: impl Fn(&mut Cluster),
) -> String {
    let mut cluster = Cluster::serving(spec.build());
    let serving = cluster.live()[0].clone();
    cluster.carry_out(&Step::Scale { deployment: deployment.into(), replicas });
    cluster.service.status.as_mut().expect("a status").desired_replicas = 2;
    hinder(&mut cluster);
    let mut said = stats();
    for (wait, late) in [(seconds - 30, 0), (30, 30)] {
        cluster.pass(wait);
        said.uptime_seconds += wait as f64;
        (said.utilization, said.running) = (Some(0.95), 4);
        (0..late).for_each(|_| said.time_to_first_token.observe(900.0));
        cluster.read(&serving, said.clone());
    }
    cluster.reconcile();
    cluster.condition("ScalingActive").1
}

fn condition(cluster: &mut Cluster, kind: &str, reason: &str) {
    let (name, since) = (cluster.live()[1].clone(), Time(cluster.now));
    let condition = json!({"type": kind, "status": "False", "reason": reason, "lastTransitionTime": since});
    let status = serde_json::from_value(json!({"conditions": [condition]})).expect("a pod's status");
    cluster.change_pod(&name, |pod| pod.status = status);
}

fn starts_for_ever(cluster: &mut Cluster) {
    cluster.run_controllers();
}

fn finds_no_node(cluster: &mut Cluster) {
    cluster.run_controllers();
    cluster.pass(100);
    condition(cluster, "PodScheduled", "Unschedulable");
}

fn crashes(cluster: &mut Cluster) {
    cluster.run_controllers();
    cluster.pass(100);
    condition(cluster, "Ready", "ContainersNotReady");
}

fn is_refused(cluster: &mut Cluster) {
    let refusal = DeploymentCondition {
        type_: "ReplicaFailure".into(),
        status: "True".into(),
        last_transition_time: Some(Time(cluster.now)),
        ..DeploymentCondition::default()
    };
    let status = Arc::make_mut(&mut cluster.observed.deployments[0]).status.as_mut().expect("a status");
    status.conditions = Some(vec![refusal]);
}

#[test]
fn a_replica_that_does_not_come_within_the_progress_deadline_is_stuck() {
    let hindrances: [fn(&mut Cluster); 4] = [starts_for_ever, finds_no_node, crashes, is_refused];
    for (index, hinder) in hindrances.into_iter().enumerate() {
        let builtin = || service().builtin(1, 4, 500);
        let reasons = [599, 600].map(|seconds| reason_after(builtin(), seconds, hinder));
        assert_eq!(reasons, ["AwaitingReplicas", "ReplicasStuck"], "{index}");
        let patient = || builtin().with("rollout", json!({"progressDeadlineSeconds": 900}));
        let reasons = [899, 900].map(|seconds| reason_after(patient(), seconds, hinder));
        assert_eq!(reasons, ["AwaitingReplicas", "ReplicasStuck"], "{index}");
    }
}

/// Replicas asked of three that idle, and what keeps one from going, when one of them is not ready for so many seconds.
fn idle_with_one_unready(has_served: bool, seconds: i64) -> (Option<i32>, Vec<String>) {
    let mut cluster = Cluster::serving(service().builtin(1, 4, 500).build());
    cluster.carry_out(&Step::Scale { deployment: "llama".into(), replicas: 3 });
    cluster.run_controllers();
    cluster.start_pods();
    let read = |cluster: &mut Cluster, wait: i64| {
        cluster.pass(wait);
        let idle = Stats { utilization: Some(0.0), uptime_seconds: cluster.now.as_second() as f64, ..stats() };
        cluster.live().iter().for_each(|pod| cluster.read(pod, idle.clone()));
        cluster.reconcile();
    };
    read(&mut cluster, 1);
    let since = cluster.now + SignedDuration::from_secs(1000 - seconds);
    let condition =
        json!({"type": "Ready", "status": "False", "reason": "ContainersNotReady", "lastTransitionTime": Time(since)});
    let engine = json!({"name": "engine", "started": has_served, "state": {"running": {"startedAt": Time(since)}}});
    let status = serde_json::from_value(json!({"conditions": [condition], "containerStatuses": [engine]}));
    let unready = cluster.live().remove(1);
    cluster.change_pod(&unready, |pod| pod.status = status.expect("a pod's status"));
    read(&mut cluster, 1000);
    let status = cluster.service.status.as_ref().and_then(|status| status.autoscaling.clone());
    (cluster.replicas("llama"), status.expect("a decision").blockers)
}

#[test]
fn no_replica_goes_while_one_that_served_is_not_ready() {
    let (replicas, blockers) = idle_with_one_unready(true, 20);
    assert_eq!((replicas, blockers.len()), (Some(3), 1), "{blockers:?}");
    assert!(blockers[0].contains("served is not ready"), "{blockers:?}");
    for (has_served, seconds) in [(false, 20), (true, 600), (false, 600)] {
        let (replicas, blockers) = idle_with_one_unready(has_served, seconds);
        assert_eq!((replicas, blockers), (Some(2), Vec::new()), "{has_served} {seconds}");
    }
    assert_eq!(idle_with_one_unready(true, 599).0, Some(3));
}

/// Those are run on demand instead; of those that have a node, or may have no other, nothing is known but that they are late.
#[test]
fn a_replica_that_waits_for_a_spot_node_is_not_late_where_others_take_its_place() {
    let spot = |fields: serde_json::Value| {
        let mut spot = json!({"mode": "Prefer"});
        fields.as_object().into_iter().flatten().for_each(|(field, value)| spot[field] = value.clone());
        service().builtin(1, 4, 500).with("spot", spot)
    };
    let falling_back = || spot(json!({"onDemandBase": 1, "fallbackAfterSeconds": 3600}));
    let waiting = || spot(json!({"onDemandBase": 1}));
    let on_demand = || spot(json!({"onDemandBase": 2, "fallbackAfterSeconds": 3600}));
    let of_spot = ("llama-spot", 1);
    let reasons = [
        (falling_back(), of_spot, finds_no_node as fn(&mut Cluster)),
        (falling_back(), of_spot, crashes),
        (waiting(), of_spot, finds_no_node),
        (on_demand(), ("llama", 2), finds_no_node),
    ]
    .map(|(spec, second, hinder)| reason_after_scaling(spec, second, 600, hinder));
    assert_eq!(reasons, ["AwaitingReplicas", "ReplicasStuck", "ReplicasStuck", "ReplicasStuck"]);
}
