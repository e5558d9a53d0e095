//! Nodes that are taken back: their pods drain and are replaced while there is still time.
//!
//! Where the end of a node is certain, all of its pods are deleted at once, with no more grace than the provider leaves:
//! admission stops, streams finish or end with an error event, and the ReplicaSet asks for replacements in the same
//! moment. Where a node is only being emptied, by somebody who heeds the disruption budget, pods go one at a time while
//! all others serve.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::build::affinity::SPOT_LABELS;
use crate::fleet::{Fleet, FleetPod, Stage};
use crate::observed::Observed;
use crate::placement::Placement;
use crate::plan::Step;
use crate::validate::ValidatedService;

/// A taint by which somebody tells that a node ends.
struct Notice {
    /// Its key.
    taint: &'static str,
    /// What is left of the node's life when pods learn of it.
    budget: Duration,
    /// When the end is certain.
    certain: Certain,
}

#[derive(Clone, Copy, PartialEq)]
enum Certain {
    Always,
    /// The same taint stands for a voluntary end on nodes that are not spot.
    OnSpot,
    Never,
}

/// Notices of providers and of what runs on them: GKE's graceful shutdown, which leaves ordinary pods 15 of its 30
/// seconds; AWS' termination handler, two minutes; Karpenter; AKS' auto-drain, 30 seconds; a machine that is off.
const NOTICES: [Notice; 8] = [
    notice("cloud.google.com/impending-node-termination", 15, Certain::Always),
    notice("aws-node-termination-handler/spot-itn", 120, Certain::Always),
    notice("aws-node-termination-handler/asg-lifecycle-termination", 120, Certain::Always),
    notice("aws-node-termination-handler/rebalance-recommendation", 120, Certain::Never),
    notice("karpenter.sh/disrupted", 120, Certain::OnSpot),
    notice("karpenter.sh/disruption", 120, Certain::OnSpot),
    notice("remediator.kubernetes.azure.com/unschedulable", 30, Certain::OnSpot),
    notice("node.cloudprovider.kubernetes.io/shutdown", 1, Certain::Always),
];
/// A node object that is being deleted: Karpenter's finalizer empties it first.
const DELETED: Notice = notice("deletion", 120, Certain::OnSpot);

/// What may pass between a plan and its deletion, whose grace counts from then: of so much more nobody is told again.
const SLACK: Duration = Duration::from_secs(3);
/// Of a notice that has passed, while its node still stands.
const LEAST: Duration = Duration::from_secs(1);

const fn notice(taint: &'static str, seconds: u64, certain: Certain) -> Notice {
    Notice { taint, budget: Duration::from_secs(seconds), certain }
}

/// What is to be done about nodes that are taken back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evacuation {
    /// Writes.
    pub steps: Vec<Step>,
    /// Nodes that are taken back and have pods of the service, with the notice.
    pub nodes: Vec<String>,
}

impl Evacuation {
    /// Of the service's pods.
    pub fn of(
        service: &ValidatedService,
        fleet: &Fleet<'_>,
        placement: &Placement,
        observed: &Observed,
        now: Timestamp,
    ) -> Evacuation {
        let doomed: Vec<Doomed<'_>> = fleet.pods().filter_map(|pod| Doomed::of(service, pod, observed, now)).collect();
        let mut nodes: Vec<String> = doomed.iter().map(|one| format!("{} ({})", one.node, one.notice.taint)).collect();
        nodes.sort();
        nodes.dedup();
        let untold = doomed.iter().filter(|one| one.is_certain && one.outlasts_its_node(now));
        let certain: Vec<Step> = untold.map(Doomed::leave).collect();
        let steps =
            if certain.is_empty() { one_at_a_time(fleet, placement, &doomed).into_iter().collect() } else { certain };
        Evacuation { steps, nodes }
    }
}

/// The pod that goes first from nodes that are being emptied, if the service can do without one.
fn one_at_a_time(fleet: &Fleet<'_>, placement: &Placement, doomed: &[Doomed<'_>]) -> Option<Step> {
    let is_doomed = |pod: &FleetPod<'_>| doomed.iter().any(|one| one.pod.name == pod.name);
    let replicas = fleet
        .workloads
        .iter()
        .flat_map(|workload| workload.pods.iter().filter(|pod| !placement.is_probe(workload.kind, pod)));
    let mut others = replicas.filter(|pod| !is_doomed(pod)).peekable();
    let can_spare = others.peek().is_some() && others.all(FleetPod::is_ready) && !fleet.is_rolling();
    let is_leaving = doomed.iter().any(|one| one.pod.stage == Stage::Leaving);
    doomed.first().filter(|_| can_spare && !is_leaving).map(Doomed::leave)
}

/// A pod on a node that is taken back.
struct Doomed<'a> {
    pod: FleetPod<'a>,
    node: &'a str,
    notice: &'static Notice,
    /// What is left of the notice.
    left: Duration,
    is_certain: bool,
}

impl<'a> Doomed<'a> {
    fn of(service: &ValidatedService, pod: &FleetPod<'a>, observed: &Observed, now: Timestamp) -> Option<Doomed<'a>> {
        let name = pod.pod.spec.node_name.as_deref()?;
        let node = observed.nodes.as_ref()?.iter().find(|node| node.metadata.name.as_deref() == Some(name))?;
        let (notice, left) = told(node, now)?;
        let is_certain = match notice.certain {
            Certain::Always => true,
            Certain::OnSpot => is_spot(service, node),
            Certain::Never => false,
        };
        Some(Doomed { pod: *pod, node: name, notice, left, is_certain })
    }

    /// Whether it would still be there when its node is not: it does not leave, or has more time to than the notice.
    fn outlasts_its_node(&self, now: Timestamp) -> bool {
        let end = self.pod.pod.metadata.deletion_timestamp.as_ref();
        let exceeds = |rest: Duration| rest > self.left + SLACK;
        end.is_none_or(|end| Duration::try_from(end.0.duration_since(now)).is_ok_and(exceeds))
    }

    fn leave(&self) -> Step {
        Step::Evacuate {
            pod: self.pod.name.to_owned(),
            uid: self.pod.pod.metadata.uid.clone().unwrap_or_default(),
            address: self.pod.pod.status.pod_ip.as_deref().map(str::to_owned),
            budget: self.is_certain.then_some(self.left),
        }
    }
}

/// The notice of the node of which least is left, and how much. It counts from when it was given, where that is told:
/// whoever comes later, as the next leader does, has less of it.
fn told(node: &Node, now: Timestamp) -> Option<(&'static Notice, Duration)> {
    let taints = || node.spec.as_ref().and_then(|spec| spec.taints.as_ref()).into_iter().flatten();
    let tainted = taints().filter_map(|taint| {
        let notice = NOTICES.iter().find(|notice| notice.taint == taint.key)?;
        Some((notice, taint.time_added.as_ref()))
    });
    let deleted = node.metadata.deletion_timestamp.as_ref().map(|since| (&DELETED, Some(since)));
    let left = |(notice, since): (&'static Notice, Option<&Time>)| {
        let passed = since.and_then(|since| Duration::try_from(now.duration_since(since.0)).ok()).unwrap_or_default();
        (notice, notice.budget.saturating_sub(passed).max(LEAST))
    };
    tainted.chain(deleted).map(left).min_by_key(|(_, left)| *left)
}

fn is_spot(service: &ValidatedService, node: &Node) -> bool {
    let labels = node.metadata.labels.as_ref();
    let has = |key: &str, value: &str| labels.is_some_and(|labels| labels.get(key).is_some_and(|found| found == value));
    let own = &service.spot.node_selector;
    let is_own = !own.is_empty() && own.iter().all(|(key, value)| has(key, value));
    is_own || SPOT_LABELS.iter().any(|(key, value)| has(key, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::cluster::Cluster;
    use crate::testing::service;
    use serde_json::json;
    use std::sync::Arc;

    /// Three replicas on `node-0` to `node-2`.
    fn spread() -> Cluster {
        let mut cluster = Cluster::serving(service().with("replicas", json!(3)).build());
        for (index, name) in cluster.live().into_iter().enumerate() {
            cluster.change_pod(&name, |pod| pod.spec.node_name = Some(format!("node-{index}").into()));
        }
        cluster.observed.nodes = Some((0..3).map(|index| node(index, None, false)).collect());
        cluster
    }

    fn node(index: usize, taint: Option<&str>, is_spot: bool) -> Arc<Node> {
        let taints: Vec<_> = taint.into_iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
        let labels = if is_spot { json!({"karpenter.sh/capacity-type": "spot"}) } else { json!({}) };
        let node = json!({"metadata": {"name": format!("node-{index}"), "labels": labels}, "spec": {"taints": taints}});
        Arc::new(serde_json::from_value(node).expect("a node"))
    }

    fn taint(cluster: &mut Cluster, index: usize, taint: &str, is_spot: bool) {
        cluster.observed.nodes.as_mut().expect("nodes")[index] = node(index, Some(taint), is_spot);
    }

    fn evacuated(cluster: &mut Cluster) -> Vec<(String, Option<u64>)> {
        let told = |step: &Step| match step {
            Step::Evacuate { pod, budget, .. } => Some((pod.clone(), budget.map(|budget| budget.as_secs()))),
            _ => None,
        };
        cluster.reconcile().steps.iter().filter_map(told).collect()
    }

    #[test]
    fn without_a_notice_nobody_leaves() {
        assert_eq!(evacuated(&mut spread()), []);
        let mut cluster = spread();
        taint(&mut cluster, 0, "node.kubernetes.io/memory-pressure", true);
        assert_eq!(evacuated(&mut cluster), []);
    }

    #[test]
    fn a_certain_end_empties_the_node_within_the_providers_budget() {
        for (key, is_spot, budget) in [
            ("cloud.google.com/impending-node-termination", false, 15),
            ("aws-node-termination-handler/spot-itn", true, 120),
            ("karpenter.sh/disrupted", true, 120),
            ("remediator.kubernetes.azure.com/unschedulable", true, 30),
        ] {
            let mut cluster = spread();
            taint(&mut cluster, 0, key, is_spot);
            taint(&mut cluster, 1, key, is_spot);
            let left = evacuated(&mut cluster);
            assert_eq!(left.iter().map(|(_, budget)| *budget).collect::<Vec<_>>(), [Some(budget); 2], "{key}");
            assert_eq!(evacuated(&mut cluster), [], "{key}: those that leave are not told twice");
            let status = cluster.service.status.clone().expect("a status");
            assert_eq!(status.interrupted_nodes.len(), 2, "{key}");
            assert_eq!(cluster.events.iter().filter(|event| event.reason == "NodeInterrupted").count(), 1, "{key}");
            assert_eq!(status.desired_replicas, 3);
        }
    }

    #[test]
    fn a_pod_that_leaves_with_more_time_than_its_node_has_is_told_again() {
        let again = |key: &str, is_spot: bool, grace: i64| {
            let mut cluster = spread();
            let name = cluster.live()[0].clone();
            let end = windlass_operator_api::status::time(cluster.now + jiff::SignedDuration::from_secs(grace));
            cluster.change_pod(&name, |pod| pod.metadata.deletion_timestamp = Some(end));
            taint(&mut cluster, 0, key, is_spot);
            evacuated(&mut cluster).first().map(|(_, budget)| budget.expect("a certain end"))
        };
        for (key, is_spot, grace, told) in [
            ("cloud.google.com/impending-node-termination", false, 330, Some(15)),
            ("cloud.google.com/impending-node-termination", false, 19, Some(15)),
            ("cloud.google.com/impending-node-termination", false, 18, None),
            ("cloud.google.com/impending-node-termination", false, 3, None),
            ("cloud.google.com/impending-node-termination", false, -40, None),
            ("aws-node-termination-handler/spot-itn", true, 330, Some(120)),
            ("aws-node-termination-handler/spot-itn", true, 100, None),
            ("karpenter.sh/disrupted", true, 330, Some(120)),
            ("karpenter.sh/disrupted", false, 330, None),
            ("aws-node-termination-handler/rebalance-recommendation", true, 330, None),
        ] {
            assert_eq!(again(key, is_spot, grace), told, "{key} {is_spot} {grace}");
        }
    }

    #[test]
    fn a_replacement_is_asked_for_in_the_same_moment() {
        let mut cluster = spread();
        taint(&mut cluster, 0, "cloud.google.com/impending-node-termination", true);
        cluster.reconcile();
        cluster.run_controllers();
        assert_eq!(cluster.live().len(), 3);
    }

    #[test]
    fn a_node_that_is_only_being_emptied_loses_one_pod_at_a_time_while_the_others_serve() {
        let mut cluster = spread();
        taint(&mut cluster, 0, "karpenter.sh/disrupted", false);
        taint(&mut cluster, 1, "karpenter.sh/disrupted", false);
        assert_eq!(evacuated(&mut cluster).iter().map(|(_, budget)| *budget).collect::<Vec<_>>(), [None]);
        assert_eq!(evacuated(&mut cluster), [], "one drains");
        cluster.run_controllers();
        cluster.end_pods();
        assert_eq!(evacuated(&mut cluster), [], "its replacement does not serve yet");
        cluster.start_pods();
        cluster.run_controllers();
        assert_eq!(evacuated(&mut cluster).len(), 1);
    }

    #[test]
    fn the_only_replica_is_left_to_whoever_empties_its_node() {
        let mut cluster = spread();
        (0..3).for_each(|index| taint(&mut cluster, index, "karpenter.sh/disrupted", false));
        assert_eq!(evacuated(&mut cluster), []);
    }

    #[test]
    fn a_notice_counts_from_when_it_was_given() {
        let given = |seconds: i64, key: &str| {
            let mut cluster = spread();
            let since = windlass_operator_api::status::time(cluster.now - jiff::SignedDuration::from_secs(seconds));
            let mut told = Node::clone(&node(0, (key != "deletion").then_some(key), true));
            if key == "deletion" {
                told.metadata.deletion_timestamp = Some(since);
            } else {
                told.spec.get_or_insert_default().taints.get_or_insert_default()[0].time_added = Some(since);
            }
            cluster.observed.nodes.as_mut().expect("nodes")[0] = Arc::new(told);
            evacuated(&mut cluster)[0].1
        };
        for (key, passed, left) in [
            ("deletion", 0, 120),
            ("deletion", 50, 70),
            ("deletion", 5000, 1),
            ("deletion", -30, 120),
            ("aws-node-termination-handler/spot-itn", 100, 20),
            ("cloud.google.com/impending-node-termination", 14, 1),
        ] {
            assert_eq!(given(passed, key), Some(left), "{key} {passed}");
        }
    }

    #[test]
    fn a_probe_for_a_spot_node_is_no_replica_that_is_waited_for() {
        let spot = json!({"mode": "Prefer", "onDemandBase": 3, "fallbackAfterSeconds": 60});
        let spec = service().with("replicas", json!(4)).with("spot", spot);
        let mut cluster = Cluster::new(spec.build());
        let start = |cluster: &mut Cluster| {
            cluster.reconcile();
            cluster.run_controllers();
            for name in cluster.live().into_iter().filter(|name| !name.starts_with("llama-spot")) {
                let node = format!("node-{}", name.bytes().last().unwrap_or_default() % 4);
                cluster.change_pod(&name, |pod| pod.spec.node_name = Some(node.into()));
                cluster.start_pod(&name);
            }
            cluster.read_engines();
        };
        start(&mut cluster);
        let probe = cluster.live().into_iter().find(|name| name.starts_with("llama-spot")).expect("a spot pod");
        cluster.strand(&probe);
        cluster.pass(60);
        (0..3).for_each(|_| start(&mut cluster));
        assert_eq!(cluster.service.status.as_ref().and_then(|status| status.spot_fallback_replicas), Some(1));
        cluster.observed.nodes = Some((0..4).map(|index| node(index, None, false)).collect());
        taint(&mut cluster, 1, "karpenter.sh/disrupted", false);
        assert_eq!(evacuated(&mut cluster).len(), 1);
    }

    #[test]
    fn a_deleted_spot_node_is_a_notice_too() {
        let mut cluster = spread();
        let mut deleted = Node::clone(&node(2, None, true));
        deleted.metadata.deletion_timestamp = Some(windlass_operator_api::status::time(cluster.now));
        cluster.observed.nodes.as_mut().expect("nodes")[2] = Arc::new(deleted);
        assert_eq!(evacuated(&mut cluster).len(), 1);
    }
}
