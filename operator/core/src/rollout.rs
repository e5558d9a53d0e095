//! Room for a rollout: whether a new pod comes before an old one goes.

use windlass_operator_api::rollout::{Rollout, RolloutStrategy};

use crate::fleet::{Fleet, Workload};
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
}

const DEFAULT_PROGRESS_DEADLINE_SECONDS: i32 = 600;

impl RolloutPolicy {
    pub(crate) fn of(rollout: Option<&Rollout>) -> Self {
        let given = rollout.cloned().unwrap_or_default();
        let deadline = given.progress_deadline_seconds.unwrap_or(DEFAULT_PROGRESS_DEADLINE_SECONDS);
        RolloutPolicy {
            strategy: given.strategy.unwrap_or_default(),
            progress_deadline_seconds: deadline.max(1),
            is_paused: given.paused.unwrap_or(false),
            restarted_at: given.restarted_at,
        }
    }
}

/// What comes first in a workload's rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// There is room for one more pod: it comes first.
    Surge,
    /// An old pod drains first.
    Drain,
}

impl Room {
    /// For a workload of so many replicas.
    pub fn of(policy: &RolloutPolicy, workload: &Workload<'_>, replicas: i32) -> Self {
        match policy.strategy {
            RolloutStrategy::Surge => Room::Surge,
            RolloutStrategy::Drain => Room::Drain,
            // The last pod that serves is not given up for one that may not start.
            RolloutStrategy::Auto if is_without_room(workload) && replicas > 1 => Room::Drain,
            RolloutStrategy::Auto => Room::Surge,
        }
    }
}

/// Whether a pod of the new revision has found no node.
fn is_without_room(workload: &Workload<'_>) -> bool {
    workload.is_rolling() && workload.live().any(|pod| pod.updated && pod.unschedulable_since().is_some())
}

/// Whether a rollout waits for room that it may not make itself.
pub fn lacks_capacity(service: &ValidatedService, fleet: &Fleet<'_>) -> bool {
    let waits = |workload: &Workload<'_>| {
        is_without_room(workload)
            && Room::of(&service.rollout, workload, workload.asked().unwrap_or(0)) == Room::Surge
            && workload.ready() > 0
    };
    fleet.workloads.iter().any(waits)
}
