//! Where replicas go: on demand or to spot, by the policy and by what spot nodes there are.
//!
//! When a replica has found no spot node for `fallbackAfterSeconds`, all that have none run on demand instead, but one
//! pod goes on asking: the probe. It is no replica that anybody counts. When it gets a node, the others are asked for
//! on spot again, and on-demand replicas go as they come. That spot was given up is in status: a probe that is replaced by
//! another has asked for a moment only.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Node;

use crate::build::affinity;
use crate::fleet::{Fleet, FleetPod, Workload, count};
use crate::names::WorkloadKind;
use crate::validate::SpotPolicy;

/// Replicas of each workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Off spot nodes.
    pub on_demand: i32,
    /// On spot nodes, the probe included.
    pub spot: i32,
    /// Of those on demand, how many are there because no spot node came.
    pub fallback: i32,
    /// When a spot node will have been waited for long enough.
    pub look_again: Option<Duration>,
}

/// How the pods for spot nodes stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Pods that are asked for, the probe included.
    pub asked: i32,
    /// Pods with a node.
    pub placed: i32,
    /// Since when one finds none.
    pub waiting_since: Option<Timestamp>,
}

impl Standing {
    /// In `fleet`.
    pub fn of(fleet: &Fleet<'_>) -> Option<Self> {
        let spot = fleet.workloads.iter().find(|workload| workload.kind == WorkloadKind::Spot)?;
        Some(Standing {
            asked: spot.asked().unwrap_or(0),
            placed: count(spot.live().filter(|pod| pod.is_placed())),
            waiting_since: spot.live().filter_map(FleetPod::unschedulable_since).min(),
        })
    }

    /// Whether every pod that is asked for has a spot node, the probe included.
    fn is_back(&self) -> bool {
        self.asked > 0 && self.placed >= self.asked
    }
}

impl Placement {
    /// Of `total` replicas, for pods that stand like this at `now`. `was_given_up`: some ran on demand at the last look
    /// because no spot node came.
    pub fn of(policy: &SpotPolicy, spot: Option<Standing>, total: i32, was_given_up: bool, now: Timestamp) -> Self {
        let wished = Placement::by_policy(policy, total);
        let Some(after) = policy.fallback_after.and_then(|after| SignedDuration::try_from(after).ok()) else {
            return wished;
        };
        let Some(spot) = spot else { return wished };
        if was_given_up && !spot.is_back() {
            return wished.fall_back(spot.placed);
        }
        let Some(since) = spot.waiting_since else { return wished };
        let left = after - now.duration_since(since);
        match Duration::try_from(left) {
            Ok(left) if !left.is_zero() => Placement { look_again: Some(left), ..wished },
            _ => wished.fall_back(spot.placed),
        }
    }

    /// The base and what may not be spot on demand, the rest on spot.
    pub fn by_policy(policy: &SpotPolicy, total: i32) -> Self {
        let above_base = (total - policy.on_demand_base).max(0);
        let spot = if policy.has_workload() { above_base * policy.max_percent_above_base / 100 } else { 0 };
        Placement { on_demand: total - spot, spot, ..Placement::default() }
    }

    fn fall_back(self, placed: i32) -> Self {
        let spot = placed.min(self.spot);
        let fallback = self.spot - spot;
        let probe = i32::from(fallback > 0);
        Placement { on_demand: self.on_demand + fallback, spot: spot + probe, fallback, look_again: None }
    }

    /// Replicas of this workload.
    pub fn replicas(&self, kind: WorkloadKind) -> i32 {
        match kind {
            WorkloadKind::OnDemand => self.on_demand,
            WorkloadKind::Spot => self.spot,
        }
    }

    /// Whether the workload is one whose pods are known to find no node.
    pub fn is_given_up(&self, kind: WorkloadKind) -> bool {
        kind == WorkloadKind::Spot && self.fallback > 0
    }

    /// Pods that are only asked whether there is a node: no replicas.
    pub fn probes(&self, workload: &Workload<'_>) -> i32 {
        count(workload.live().filter(|pod| self.is_probe(workload.kind, pod)))
    }

    /// Replicas of the spot workload that are on no spot node: they find none, or run on another. Where `nodes` may not be
    /// read, those that find none.
    pub fn off_spot(&self, policy: &SpotPolicy, spot: &Workload<'_>, nodes: Option<&[Arc<Node>]>) -> i32 {
        let is_on =
            |node: &Arc<Node>, pod: &FleetPod<'_>| node.metadata.name.as_deref() == pod.pod.spec.node_name.as_deref();
        let is_elsewhere = |pod: &FleetPod<'_>| {
            let node = nodes.into_iter().flatten().find(|node| is_on(node, pod));
            node.is_some_and(|node| !affinity::is_spot(policy, node))
        };
        let misses = |pod: &&FleetPod<'_>| pod.unschedulable_since().is_some() || is_elsewhere(pod);
        count(spot.live().filter(|pod| !self.is_probe(spot.kind, pod)).filter(misses))
    }

    /// Whether the pod, of a workload of this kind, is only asked whether there is a node.
    pub fn is_probe(&self, kind: WorkloadKind, pod: &FleetPod<'_>) -> bool {
        self.is_given_up(kind) && !pod.is_placed()
    }
}

#[cfg(test)]
mod tests;
