//! What a run came to, and how two of them compare.

use crate::engine::Ended;
use crate::market::SPOT_PRICE;
use crate::protocol::{CapacityType, Targets};

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Requests of the trace.
    pub requests: usize,
    /// Those that held both targets.
    pub attained: usize,
    /// Streams cut by a drain timeout.
    pub broken: usize,
    /// Paid time of all pods, in seconds on demand.
    pub gpu_seconds: f64,
    /// Paid time of pods on spot nodes.
    pub spot_seconds: f64,
    /// Pods that do not drain, by tick.
    pub replicas: Vec<i32>,
}

impl Score {
    /// Takes in requests that ended.
    pub(crate) fn take(&mut self, ended: &mut Vec<Ended>, targets: &Targets) {
        let holds = |one: &Ended| one.ttft <= targets.ttft_seconds && one.inter_token <= targets.inter_token_seconds;
        self.attained += ended.drain(..).filter(holds).count();
    }

    /// Pays for time of a node, or takes it back.
    pub(crate) fn pay(&mut self, capacity: CapacityType, seconds: f64) {
        match capacity {
            CapacityType::OnDemand => self.gpu_seconds += seconds,
            CapacityType::Spot => {
                self.gpu_seconds += seconds * SPOT_PRICE;
                self.spot_seconds += seconds;
            }
        }
    }

    /// Share of requests that held both targets.
    pub fn attainment(&self) -> f64 {
        self.attained as f64 / self.requests.max(1) as f64
    }

    /// Paid hours, in hours on demand.
    pub fn gpu_hours(&self) -> f64 {
        self.gpu_seconds / 3600.0
    }

    /// Neither worse in attainment nor in cost, and better in one of them.
    pub fn dominates(&self, other: &Score) -> bool {
        let attains = self.attained >= other.attained;
        let costs = self.gpu_seconds <= other.gpu_seconds;
        attains && costs && (self.attained > other.attained || self.gpu_seconds < other.gpu_seconds)
    }
}

/// How ours stands to the adaptive peers of one scenario.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
    /// Peers whose point dominates ours.
    pub dominated_by: Vec<String>,
    /// Peers with at least [`GOOD`] that ours does not dominate.
    pub not_dominated: Vec<String>,
}

/// Attainment from which a peer has to be beaten in both.
pub const GOOD: f64 = 0.95;

impl Standing {
    /// Compares.
    pub fn of<'a>(ours: &Score, peers: impl Iterator<Item = (&'a str, &'a Score)>) -> Self {
        let mut standing = Standing::default();
        for (name, peer) in peers {
            if peer.dominates(ours) {
                standing.dominated_by.push(name.to_owned());
            }
            if peer.attainment() >= GOOD && !ours.dominates(peer) {
                standing.not_dominated.push(name.to_owned());
            }
        }
        standing
    }

    /// No peer is left to beat.
    pub fn holds(&self) -> bool {
        self.dominated_by.is_empty() && self.not_dominated.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(attained: usize, gpu_seconds: f64) -> Score {
        Score { requests: 1000, attained, gpu_seconds, ..Score::default() }
    }

    #[test]
    fn domination_needs_one_better_and_none_worse() {
        assert!(score(990, 10.0).dominates(&score(980, 10.0)) && score(990, 9.0).dominates(&score(990, 10.0)));
        assert!(!score(990, 11.0).dominates(&score(980, 10.0)) && !score(990, 10.0).dominates(&score(990, 10.0)));
    }

    #[test]
    fn good_peers_have_to_be_beaten_and_bad_ones_only_not_to_beat_us() {
        let of = |peer: Score| Standing::of(&score(980, 10.0), [("peer", &peer)].into_iter());
        assert!(of(score(949, 1.0)).holds() && of(score(960, 11.0)).holds());
        assert_eq!(of(score(960, 9.0)).not_dominated, ["peer"]);
        assert_eq!(of(score(985, 9.0)).dominated_by, ["peer"]);
    }
}
