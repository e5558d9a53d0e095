//! Use of spot nodes.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Toleration;
use windlass_operator_api::spot::{Spot, SpotMode};

/// `spec.spot`, validated.
#[derive(Clone, Debug, PartialEq)]
pub struct SpotPolicy {
    /// `None`: no opinion.
    pub mode: Option<SpotMode>,
    /// Replicas that stay off spot nodes.
    pub on_demand_base: i32,
    /// Most of the rest that may be spot, percent.
    pub max_percent_above_base: i32,
    /// After so long without a spot node, replicas run on demand; `None`: the scheduler decides at once.
    pub fallback_after: Option<Duration>,
    /// Labels of spot nodes; empty: the well-known ones.
    pub node_selector: BTreeMap<String, String>,
    /// Taints of spot nodes; empty: the well-known ones.
    pub tolerations: Vec<Toleration>,
}

impl SpotPolicy {
    pub(crate) fn of(spot: Option<&Spot>) -> Self {
        let given = spot.cloned().unwrap_or_default();
        SpotPolicy {
            mode: spot.map(|spot| spot.mode),
            on_demand_base: given.on_demand_base.unwrap_or(0).max(0),
            max_percent_above_base: given.max_percent_above_base.unwrap_or(100).clamp(0, 100),
            fallback_after: fallback_after(&given),
            node_selector: given.node_selector,
            tolerations: given.tolerations,
        }
    }

    /// Whether there is a spot workload.
    pub fn has_workload(&self) -> bool {
        matches!(self.mode, Some(SpotMode::Prefer | SpotMode::Require))
    }
}

fn fallback_after(spot: &Spot) -> Option<Duration> {
    let seconds = spot.fallback_after_seconds.filter(|_| spot.mode == SpotMode::Prefer)?;
    Some(Duration::from_secs(seconds.max(1).unsigned_abs().into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::service;
    use serde_json::{Value, json};

    #[test]
    fn shares_of_spot_are_as_given_and_only_a_preference_falls_back() {
        let spot = |spot: Value| service().with("spot", spot).valid().spot;
        for (mode, has_workload, after) in [("Prefer", true, Some(60)), ("Require", true, None), ("Never", false, None)]
        {
            let found = spot(json!({"mode": mode, "fallbackAfterSeconds": 60}));
            assert_eq!(found.has_workload(), has_workload, "{mode}");
            assert_eq!(found.fallback_after, after.map(Duration::from_secs), "{mode}");
        }
        let given =
            spot(json!({"mode": "Prefer", "onDemandBase": 2, "maxPercentAboveBase": 30, "nodeSelector": {"a": "b"}}));
        assert_eq!((given.on_demand_base, given.max_percent_above_base), (2, 30));
        assert_eq!(given.node_selector, [("a".to_owned(), "b".to_owned())].into());
        let open = spot(json!({"mode": "Prefer"}));
        assert_eq!((open.on_demand_base, open.max_percent_above_base, open.fallback_after), (0, 100, None));
    }
}
