//! Warm standby: replicas that have generated their token, and that no request reaches until they are needed.
//!
//! They are pods like all others, of one Deployment. The template has a label by which the Service finds its pods; the
//! operator turns it off on those to spare and on again as they are needed, which takes a moment instead of a cold
//! start. A pod that nobody looks after takes requests: what is missing without an operator are spares, not replicas.

use jiff::Timestamp;

use crate::autoscale::policy::Scaling;
use crate::fleet::{Fleet, FleetPod, Stage};
use crate::names::ROUTED;
use crate::plan::{Mark, Step};
use crate::validate::ValidatedService;

/// Value of the label on pods that take requests.
pub const ON: &str = "true";
/// Value of the label on pods to spare.
pub const OFF: &str = "false";

/// Replicas to spare of one service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standby {
    /// How many there are to be.
    pub replicas: i32,
    /// Every pod that serves has the label, so that the Service may go by it.
    pub is_routed: bool,
}

impl Standby {
    /// As the spec asks, and as far as pods have come.
    pub fn of(service: &ValidatedService, fleet: &Fleet<'_>) -> Standby {
        let replicas = match &service.scaling {
            Scaling::Builtin(policy) => policy.standby,
            Scaling::Manual { .. } | Scaling::External { .. } | Scaling::Hpa { .. } => 0,
        };
        let is_routed = replicas > 0 && fleet.ready().next().is_some() && fleet.ready().all(|pod| label(pod).is_some());
        Standby { replicas, is_routed }
    }

    /// Whether no request reaches the pod.
    pub fn holds(&self, pod: &FleetPod<'_>) -> bool {
        self.is_routed && pod.is_spare()
    }

    /// Turns the label off where more than `wanted` serve, and on on all others: also on pods that came without it.
    pub fn steps(&self, fleet: &Fleet<'_>, wanted: i32) -> Vec<Step> {
        if self.replicas == 0 {
            return Vec::new();
        }
        let mut ready: Vec<_> = fleet.ready().collect();
        ready.sort_by_key(|pod| self.rank(pod));
        // Before all have the label the Service leads to every pod, and none is spared.
        let spares = if self.is_routed { count(self.replicas) } else { 0 };
        let surplus = ready.len().saturating_sub(count(wanted)).min(spares);
        let mark = |(index, pod): (usize, &&FleetPod<'_>)| {
            let value = if index < surplus { OFF } else { ON };
            let step = Step::MarkPod { pod: pod.name.to_owned(), mark: Mark::Label(ROUTED), value: Some(value.into()) };
            (label(pod) != Some(value)).then_some(step)
        };
        ready.iter().enumerate().filter_map(mark).collect()
    }

    /// Who is spared first: who is already, then who has come last and has the least to lose.
    fn rank<'a>(&self, pod: &FleetPod<'a>) -> (bool, std::cmp::Reverse<Timestamp>, &'a str) {
        let since = match pod.stage {
            Stage::Ready { since } => since,
            Stage::Waiting | Stage::Leaving => Timestamp::MAX,
        };
        (!self.holds(pod), std::cmp::Reverse(since), pod.name)
    }
}

fn label<'a>(pod: &FleetPod<'a>) -> Option<&'a str> {
    pod.pod.label(ROUTED)
}

fn count(replicas: i32) -> usize {
    usize::try_from(replicas).unwrap_or(0)
}
