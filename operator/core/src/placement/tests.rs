//! The split between workloads, and what happens where spot does not come.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;
use serde_json::json;
use windlass_operator_api::spot::SpotMode;
use windlass_operator_api::status::condition;

use super::*;
use crate::testing::cluster::Cluster;
use crate::testing::{ServiceBuilder, at, service};

fn policy(mode: Option<SpotMode>, base: i32, percent: i32) -> SpotPolicy {
    SpotPolicy {
        mode,
        on_demand_base: base,
        max_percent_above_base: percent,
        fallback_after: None,
        node_selector: Default::default(),
        tolerations: Vec::new(),
    }
}

fn parts(policy: &SpotPolicy, total: i32) -> (i32, i32) {
    let Placement { on_demand, spot, .. } = Placement::by_policy(policy, total);
    (on_demand, spot)
}

#[test]
fn the_base_comes_first_and_the_share_is_rounded_down() {
    let prefer = Some(SpotMode::Prefer);
    for (policy, total, expected) in [
        (policy(None, 0, 100), 5, (5, 0)),
        (policy(Some(SpotMode::Never), 0, 100), 5, (5, 0)),
        (policy(prefer, 0, 100), 5, (0, 5)),
        (policy(prefer, 1, 100), 5, (1, 4)),
        (policy(prefer, 1, 80), 6, (2, 4)),
        (policy(prefer, 1, 80), 5, (2, 3)),
        (policy(prefer, 9, 100), 5, (5, 0)),
        (policy(Some(SpotMode::Require), 1, 0), 5, (5, 0)),
    ] {
        assert_eq!(parts(&policy, total), expected, "{policy:?} {total}");
    }
}

#[test]
fn spot_is_given_up_after_the_wait_and_taken_back_once_all_that_was_asked_for_is_there() {
    let after = Some(Duration::from_secs(60));
    let policy = SpotPolicy { fallback_after: after, ..policy(Some(SpotMode::Prefer), 1, 100) };
    let standing = |asked: i32, placed: i32, waited: Option<i64>| {
        Some(Standing { asked, placed, waiting_since: waited.map(|seconds| at(1000 - seconds)) })
    };
    for (standing, was_given_up, (on_demand, spot, fallback, look_again)) in [
        (None, false, (1, 3, 0, None)),
        (standing(3, 3, None), false, (1, 3, 0, None)),
        (standing(3, 0, Some(0)), false, (1, 3, 0, Some(60))),
        (standing(3, 0, Some(59)), false, (1, 3, 0, Some(1))),
        (standing(3, 0, Some(60)), false, (4, 1, 3, None)),
        (standing(3, 1, Some(61)), false, (3, 2, 2, None)),
        (standing(1, 0, None), true, (4, 1, 3, None)),
        (standing(2, 1, None), true, (3, 2, 2, None)),
        (standing(1, 1, None), true, (1, 3, 0, None)),
        (standing(0, 0, None), true, (4, 1, 3, None)),
        (standing(4, 4, Some(70)), false, (1, 3, 0, None)),
    ] {
        let look_again = look_again.map(Duration::from_secs);
        let placement = Placement::of(&policy, standing, 4, was_given_up, at(1000));
        assert_eq!(placement, Placement { on_demand, spot, fallback, look_again }, "{standing:?} {was_given_up}");
        let given_up = WorkloadKind::ALL.map(|kind| placement.is_given_up(kind));
        assert_eq!(given_up, [false, fallback > 0], "{standing:?} {was_given_up}");
    }
}

/// Replicas for spot that status tells to be on no spot node: pods of the spot workload are on these nodes in turn, and find
/// none after the last; nodes by number, of which 0 and 1 are spot.
fn missing(spot: serde_json::Value, nodes: &[usize], are_read: bool) -> Option<i32> {
    let mut cluster = Cluster::serving(service().with("replicas", json!(3)).with("spot", spot).build());
    let pods: Vec<String> = cluster.live().into_iter().filter(|name| name.starts_with("llama-spot")).collect();
    for (index, pod) in pods.iter().enumerate() {
        match nodes.get(index) {
            Some(node) => cluster.change_pod(pod, |pod| pod.spec.node_name = Some(format!("node-{node}").into())),
            None => cluster.strand(pod),
        }
    }
    let labels =
        [json!({"karpenter.sh/capacity-type": "spot"}), json!({"pool": "cheap"}), json!({}), json!({"pool": "x"})];
    let node = |(number, labels)| json!({"metadata": {"name": format!("node-{number}"), "labels": labels}});
    let nodes = labels.iter().enumerate().map(node).map(|node| serde_json::from_value(node).expect("a node"));
    cluster.observed.nodes = are_read.then(|| nodes.map(Arc::new).collect());
    cluster.reconcile();
    cluster.service.status.expect("a status").spot_missing_replicas
}

#[test]
fn replicas_for_spot_that_wait_or_are_elsewhere_are_told() {
    let prefer = || json!({"mode": "Prefer", "onDemandBase": 1});
    let own = || json!({"mode": "Require", "onDemandBase": 1, "nodeSelector": {"pool": "cheap"}});
    let falling_back = || json!({"mode": "Prefer", "onDemandBase": 1, "fallbackAfterSeconds": 60});
    for (spot, nodes, are_read, told) in [
        (prefer(), &[0, 0][..], true, None),
        (prefer(), &[0, 1], true, Some(1)),
        (prefer(), &[2, 3], true, Some(2)),
        (prefer(), &[2, 3], false, None),
        (prefer(), &[0], true, Some(1)),
        (prefer(), &[], false, Some(2)),
        (prefer(), &[0, 9], true, None),
        (own(), &[1, 1], true, None),
        (own(), &[0, 3], true, Some(2)),
        (own(), &[1], true, Some(1)),
        (falling_back(), &[0], true, Some(1)),
    ] {
        assert_eq!(missing(spot.clone(), nodes, are_read), told, "{spot} {nodes:?} {are_read}");
    }
    let mut cluster = Cluster::serving(service().with("replicas", json!(3)).with("spot", falling_back()).build());
    let pods: Vec<String> = cluster.live().into_iter().filter(|name| name.starts_with("llama-spot")).collect();
    pods.iter().for_each(|pod| cluster.strand(pod));
    cluster.pass(60);
    cluster.reconcile();
    let status = cluster.service.status.expect("a status");
    assert_eq!((status.spot_fallback_replicas, status.spot_missing_replicas), (Some(2), None), "each is told once");
}

proptest! {
    /// One replica more or fewer moves one workload by one: a victim is never moved between workloads.
    #[test]
    fn a_step_of_one_moves_one_workload_by_one(base in 0..20_i32, percent in 0..=100_i32, total in 0..50_i32) {
        let policy = policy(Some(SpotMode::Prefer), base, percent);
        let (before, after) = (parts(&policy, total), parts(&policy, total + 1));
        prop_assert_eq!(before.0 + before.1, total);
        prop_assert_eq!((after.0 - before.0).abs() + (after.1 - before.1).abs(), 1);
    }
}

/// Four replicas of which three are to be on spot nodes, given up after a minute.
fn with_fallback() -> ServiceBuilder {
    let spot = json!({"mode": "Prefer", "onDemandBase": 1, "fallbackAfterSeconds": 60});
    service().with("replicas", json!(4)).with("spot", spot)
}

fn replicas(cluster: &Cluster) -> (i32, i32) {
    let of = |name: &str| cluster.replicas(name).unwrap_or(0);
    (of("llama"), of("llama-spot"))
}

fn spot_pods(cluster: &Cluster) -> Vec<String> {
    cluster.live().into_iter().filter(|name| name.starts_with("llama-spot")).collect()
}

/// The scheduler finds no node for these pods.
fn strand(cluster: &mut Cluster, pods: &[String]) {
    pods.iter().for_each(|name| cluster.strand(name));
}

/// One look; pods on demand start at once, those on spot stay as they are.
fn look(cluster: &mut Cluster) {
    cluster.reconcile();
    cluster.run_controllers();
    cluster.end_pods();
    for name in cluster.live().into_iter().filter(|name| !name.starts_with("llama-spot")) {
        if !is_serving(cluster, &name) {
            cluster.start_pod(&name);
        }
    }
    cluster.read_engines();
    cluster.pass(1);
}

fn is_serving(cluster: &Cluster, name: &str) -> bool {
    let found = cluster.observed.pods.iter().find(|pod| pod.metadata.name.as_deref() == Some(name));
    found.is_some_and(|pod| pod.is_ready())
}

/// A cluster whose spot replicas have found no node for so many seconds.
fn stranded(seconds: i64) -> Cluster {
    let mut cluster = Cluster::new(with_fallback().build());
    look(&mut cluster);
    assert_eq!(replicas(&cluster), (1, 3));
    let pods = spot_pods(&cluster);
    strand(&mut cluster, &pods);
    cluster.pass(seconds);
    (0..6).for_each(|_| look(&mut cluster));
    cluster
}

#[test]
fn spot_is_waited_for_and_then_replicas_run_on_demand_beside_one_probe() {
    let waiting = stranded(30);
    assert_eq!(replicas(&waiting), (1, 3));
    let mut given_up = stranded(60);
    assert_eq!(replicas(&given_up), (4, 1));
    let status = given_up.service.status.clone().expect("a status");
    assert_eq!((status.desired_replicas, status.replicas, status.spot_fallback_replicas), (4, 4, Some(3)));
    assert_eq!(status.spot_replicas, Some(0), "the probe is none");
    assert_eq!(given_up.condition(condition::RECONCILING).1, "Settled", "the probe is no replica");
    assert_eq!(given_up.events.iter().filter(|event| event.reason == "SpotFallback").count(), 1);
    let writes = given_up.status_writes;
    given_up.pass(3600);
    look(&mut given_up);
    assert!(given_up.reconcile().steps.is_empty() && given_up.status_writes == writes, "at rest");
}

#[test]
fn a_probe_that_is_replaced_asks_on_and_no_replica_moves() {
    let mut cluster = stranded(60);
    for _ in 0..3 {
        let probe = spot_pods(&cluster);
        let now = cluster.now;
        cluster.change_pod(&probe[0], |pod| pod.metadata.deletion_timestamp = Some(Time(now)));
        // Another takes its place, and the scheduler has not looked at it yet.
        for _ in 0..3 {
            look(&mut cluster);
            assert_eq!(replicas(&cluster), (4, 1));
        }
        let probe = spot_pods(&cluster);
        strand(&mut cluster, &probe);
        look(&mut cluster);
        assert_eq!(replicas(&cluster), (4, 1));
    }
    let told = |reason: &str| cluster.events.iter().filter(|event| event.reason == reason).count();
    assert_eq!((told("SpotFallback"), told("SpotReturned")), (1, 0));
}

#[test]
fn the_look_again_is_when_the_wait_ends() {
    let mut cluster = stranded(30);
    let again = cluster.reconcile().requeue_after;
    assert!(again <= Duration::from_secs(30) && again >= Duration::from_secs(20), "{again:?}");
}

#[test]
fn when_spot_is_back_replicas_return_to_it_as_they_serve_and_none_is_missing_meanwhile() {
    let mut cluster = stranded(60);
    for _ in 0..20 {
        // There is room again: every spot pod gets a node and serves.
        cluster.start_pods();
        look(&mut cluster);
        let serving = cluster.service.status.as_ref().map_or(0, |status| status.ready_replicas);
        assert!(serving >= 4, "{serving} serve");
    }
    cluster.start_pods();
    look(&mut cluster);
    assert_eq!(replicas(&cluster), (1, 3));
    assert_eq!(cluster.service.status.as_ref().and_then(|status| status.spot_fallback_replicas), None);
    assert!(cluster.events.iter().any(|event| event.reason == "SpotReturned"));
}

#[test]
fn a_spot_node_that_goes_falls_back_for_its_replica_alone() {
    let mut cluster = Cluster::serving(with_fallback().build());
    assert_eq!(replicas(&cluster), (1, 3));
    let lost = vec![spot_pods(&cluster)[0].clone()];
    strand(&mut cluster, &lost);
    cluster.pass(60);
    (0..4).for_each(|_| look(&mut cluster));
    assert_eq!(replicas(&cluster), (2, 3), "two placed on spot, the probe, and one more on demand");
}

#[test]
fn scaling_goes_on_during_a_fallback_without_counting_the_probe() {
    let spot = json!({"mode": "Prefer", "onDemandBase": 1, "fallbackAfterSeconds": 60});
    let mut cluster = Cluster::new(service().builtin(4, 8, 500).with("spot", spot).build());
    look(&mut cluster);
    let pods = spot_pods(&cluster);
    strand(&mut cluster, &pods);
    cluster.pass(60);
    (0..30).for_each(|_| look(&mut cluster));
    assert_eq!(replicas(&cluster), (4, 1));
    assert_eq!(cluster.service.status.as_ref().map(|status| status.desired_replicas), Some(4));
}
