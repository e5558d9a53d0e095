//! Room for a rollout: whether a new pod comes before an old one goes, and what becomes of it where the new one does not
//! start.
//!
//! A Deployment never makes a pod of an old template again. So a rollout in which an old pod has made room in vain is
//! paused, and the pods that do not start are withdrawn: a paused Deployment makes the pods it lacks of what is left.

use std::collections::BTreeSet;
use std::time::Duration;

use windlass_operator_api::rollout::{EngineUpgrade, Rollout, RolloutStrategy};

use crate::fleet::{Fleet, FleetPod, Workload, count};
use crate::plan::Step;
use crate::validate::ValidatedService;

/// `spec.rollout`, validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolloutPolicy {
    /// What comes first.
    pub strategy: RolloutStrategy,
    /// After so long without progress a rollout is stuck.
    pub progress_deadline_seconds: i32,
    /// Nothing rolls.
    pub is_paused: bool,
    /// The last restart asked for.
    pub restarted_at: Option<String>,
    /// An earlier revision is served whatever the spec says.
    pub is_pinned: bool,
    /// Earlier revisions that are kept.
    pub revision_history_limit: usize,
    /// When the operator's default engine image is taken.
    pub engine_upgrade: EngineUpgrade,
}

const DEFAULT_PROGRESS_DEADLINE_SECONDS: i32 = 600;
const DEFAULT_REVISION_HISTORY_LIMIT: usize = 10;

impl RolloutPolicy {
    pub(crate) fn of(rollout: Option<&Rollout>) -> Self {
        let given = rollout.cloned().unwrap_or_default();
        let deadline = given.progress_deadline_seconds.unwrap_or(DEFAULT_PROGRESS_DEADLINE_SECONDS);
        RolloutPolicy {
            strategy: given.strategy.unwrap_or_default(),
            progress_deadline_seconds: deadline.max(1),
            is_paused: given.paused.unwrap_or(false),
            restarted_at: given.restarted_at,
            is_pinned: given.pinned_revision.is_some(),
            revision_history_limit: given
                .revision_history_limit
                .and_then(|limit| usize::try_from(limit).ok())
                .unwrap_or(DEFAULT_REVISION_HISTORY_LIMIT),
            engine_upgrade: given.engine_upgrade.unwrap_or_default(),
        }
    }

    /// After so long without progress a rollout is stuck.
    pub fn progress_deadline(&self) -> Duration {
        Duration::from_secs(self.progress_deadline_seconds.max(0).unsigned_abs().into())
    }
}

/// What comes first in a workload's rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// There is room for one more pod: it comes first.
    Surge,
    /// An old pod drains first.
    Drain,
    /// One has drained, and no new one starts: old ones come back, and stay until there is another template.
    GivenUp,
}

impl Room {
    /// For a template that no pod has yet.
    pub fn first(policy: &RolloutPolicy) -> Self {
        if policy.strategy == RolloutStrategy::Drain { Room::Drain } else { Room::Surge }
    }

    /// For the template that a workload of so many replicas has.
    pub fn of(policy: &RolloutPolicy, fleet: &Fleet<'_>, workload: &Workload<'_>, replicas: i32) -> Self {
        if workload.is_given_up() || is_in_vain(workload, replicas) {
            return Room::GivenUp;
        }
        // The last pod that serves is not given up for one that may not start.
        let others = fleet.workloads.iter().filter(|other| other.kind != workload.kind);
        let is_last = replicas <= 1 && others.map(Workload::ready).sum::<i32>() == 0;
        match policy.strategy {
            RolloutStrategy::Auto if is_without_room(workload) && !is_last => Room::Drain,
            RolloutStrategy::Auto | RolloutStrategy::Surge | RolloutStrategy::Drain => Room::first(policy),
        }
    }
}

/// Whether an old pod has made room for one that has its node and did not come to serve within the progress deadline, and
/// others are left of which there can be one more.
fn is_in_vain(workload: &Workload<'_>, replicas: i32) -> bool {
    let (new, old): (Vec<&FleetPod<'_>>, Vec<_>) = workload.live().partition(|pod| pod.updated);
    let has_made_room = !old.is_empty() && count(old.iter()) < replicas;
    let is_placed_in_vain = !new.iter().any(|pod| pod.is_ready()) && new.iter().any(|pod| pod.is_placed());
    workload.is_overdue() && workload.is_observed() && has_made_room && is_placed_in_vain
}

/// Takes away the pods of a template that was given up, once the Deployment is known not to make them again.
pub fn withdraw(workload: &Workload<'_>) -> Vec<Step> {
    if !workload.is_given_up() || !workload.is_observed() {
        return Vec::new();
    }
    let owner = |pod: &FleetPod<'_>| {
        let owners = pod.pod.metadata.owner_references.iter().flatten();
        owners.into_iter().find(|owner| owner.kind == "ReplicaSet").map(|owner| owner.name.clone())
    };
    let names: BTreeSet<String> = workload.live().filter(|pod| pod.updated).filter_map(owner).collect();
    names.into_iter().map(|replica_set| Step::Withdraw { replica_set }).collect()
}

/// Whether a pod of the new revision has found no node.
fn is_without_room(workload: &Workload<'_>) -> bool {
    workload.is_rolling() && workload.live().any(|pod| pod.updated && pod.unschedulable_since().is_some())
}

/// Whether a rollout waits for room that it may not make itself.
pub fn lacks_capacity(service: &ValidatedService, fleet: &Fleet<'_>) -> bool {
    let waits = |workload: &Workload<'_>| {
        is_without_room(workload)
            && Room::of(&service.rollout, fleet, workload, workload.asked().unwrap_or(0)) == Room::Surge
            && workload.ready() > 0
    };
    fleet.workloads.iter().any(waits)
}
