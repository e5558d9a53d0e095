//! What is read off Deployments and pods.

use serde_json::{Value, json};

use super::*;
use crate::testing::at;

fn time(second: i64) -> Value {
    json!(at(second).to_string())
}

/// Made at second 100.
fn pod(status: Value) -> Pod {
    let metadata = json!({"name": "llama-1", "creationTimestamp": time(100)});
    serde_json::from_value(json!({"metadata": metadata, "spec": {}, "status": status})).expect("a pod")
}

/// Ready since a second, with containers that were started again so often.
fn ready(since: i64, restarts: &[i32]) -> Pod {
    let containers: Vec<Value> =
        restarts.iter().map(|restarts| json!({"name": "engine", "restartCount": restarts})).collect();
    let condition = json!({"type": "Ready", "status": "True", "lastTransitionTime": time(since)});
    pod(json!({"conditions": [condition], "containerStatuses": containers}))
}

#[test]
fn a_cold_start_is_the_first_of_all_containers_and_took_half_an_hour_at_most() {
    let took = |pod: &Pod| FleetPod::worker(pod).cold_start().map(|(since, took)| (since.as_second(), took.as_secs()));
    for (since, restarts, expected) in [
        (160, &[0, 0][..], Some((160, 60))),
        (160, &[0, 1], None),
        (160, &[1, 0], None),
        (160, &[], None),
        (1900, &[0], Some((1900, 1800))),
        (1901, &[0], None),
        (99, &[0], None),
    ] {
        assert_eq!(took(&ready(since, restarts)), expected, "{since} {restarts:?}");
    }
    assert_eq!(took(&pod(json!({"containerStatuses": [{"name": "engine", "restartCount": 0}]}))), None, "not ready");
}

#[test]
fn when_a_pod_was_placed_and_ran_is_when_kubernetes_says_so() {
    let told = |scheduled: &str, states: &[Value]| {
        let condition = json!({"type": "PodScheduled", "status": scheduled, "lastTransitionTime": time(110)});
        let containers: Vec<Value> = states.iter().map(|state| json!({"name": "one", "state": state})).collect();
        let pod = pod(json!({"conditions": [condition], "containerStatuses": containers}));
        let (placed, running) = FleetPod::worker(&pod).placed_and_running();
        (placed.map(Timestamp::as_second), running.map(Timestamp::as_second))
    };
    let waits = json!({"waiting": {"reason": "ContainerCreating"}});
    let runs = json!({"running": {"startedAt": time(120)}});
    let ended = json!({"terminated": {"exitCode": 0, "startedAt": time(115)}});
    assert_eq!(told("True", &[]), (Some(110), None));
    assert_eq!(told("True", &[waits.clone(), runs.clone()]), (Some(110), Some(120)));
    assert_eq!(told("True", &[ended, runs]), (Some(110), Some(115)));
    assert_eq!(told("False", &[waits]), (None, None));
}

fn deployment(replicas: i32, status: Value) -> Deployment {
    let metadata = json!({"name": "llama", "generation": 2});
    let spec = json!({"replicas": replicas, "selector": {}, "template": {}});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).expect("a Deployment")
}

fn workload<'a>(deployment: &'a Deployment, pods: &[(&'a Pod, bool)]) -> Workload<'a> {
    let pods = pods.iter().map(|&(pod, updated)| FleetPod { updated, ..FleetPod::worker(pod) });
    Workload { kind: WorkloadKind::OnDemand, deployment: Some(deployment), pods: pods.collect() }
}

#[test]
fn a_workload_rolls_until_every_pod_is_of_its_template() {
    let pod = pod(json!({}));
    let (new, old) = ((&pod, true), (&pod, false));
    let seen = |updated: i32| json!({"observedGeneration": 2, "replicas": 1, "updatedReplicas": updated});
    let unseen = json!({"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1});
    for (status, pods, is_rolling) in [
        (seen(1), vec![new], false),
        (seen(1), vec![new, old], true),
        (seen(0), vec![new], true),
        (unseen, vec![new], true),
        (json!({"observedGeneration": 2}), vec![], false),
    ] {
        assert_eq!(workload(&deployment(1, status.clone()), &pods).is_rolling(), is_rolling, "{status} {pods:?}");
    }
    let mut given_up = deployment(1, seen(0));
    given_up.metadata.annotations = Some([(GIVEN_UP.to_owned(), "true".to_owned())].into());
    assert!(!workload(&given_up, &[old]).is_rolling(), "its pods go on as they are");
    assert!(workload(&given_up, &[new, old]).is_rolling(), "those that do not start are on their way out");
}

#[test]
fn pods_that_may_not_be_made_are_those_that_are_missing() {
    let pod = pod(json!({}));
    let condition = json!({"type": "ReplicaFailure", "status": "True", "lastTransitionTime": time(200)});
    let refusing = deployment(3, json!({"conditions": [condition]}));
    let refused = |pods: &[(&Pod, bool)], limit: i64| workload(&refusing, pods).refused(at(limit));
    assert_eq!([refused(&[], 200), refused(&[(&pod, true)], 200), refused(&[(&pod, true); 4], 200)], [3, 2, 0]);
    assert_eq!(refused(&[(&pod, true)], 199), 0, "not for so long");
}

#[test]
fn a_pod_finds_no_node_where_the_scheduler_says_so_and_it_has_none() {
    let since = |reason: &str, node: Option<&str>| {
        let condition =
            json!({"type": "PodScheduled", "status": "False", "reason": reason, "lastTransitionTime": time(110)});
        let mut pod = pod(json!({"conditions": [condition]}));
        pod.spec.node_name = node.map(Into::into);
        FleetPod::worker(&pod).unschedulable_since().map(Timestamp::as_second)
    };
    assert_eq!(since("Unschedulable", None), Some(110));
    assert_eq!(since("SchedulingGated", None), None);
    assert_eq!(since("Unschedulable", Some("a")), None);
}
