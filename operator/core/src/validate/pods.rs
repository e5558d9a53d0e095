//! What pod templates are made from.

use windlass_operator_api::InferenceServiceSpec;
use windlass_operator_api::autoscaling::{Autoscaling, AutoscalingMode};
use windlass_operator_api::rollout::Rollout;

/// The spec without the fields that no pod template is made from.
pub fn of_pods(spec: &InferenceServiceSpec) -> InferenceServiceSpec {
    let mut pods = spec.clone();
    pods.replicas = 0;
    // Pods of a service with standby have a label of their own; how many there are does not change them.
    pods.autoscaling = spec.autoscaling.as_ref().filter(|scaling| has_standby(scaling)).map(|_| Autoscaling {
        mode: AutoscalingMode::Builtin,
        standby_replicas: Some(1),
        ..Autoscaling::default()
    });
    pods.network = None;
    pods.rollout = spec.rollout.as_ref().and_then(|rollout| {
        let restarted_at = rollout.restarted_at.clone()?;
        Some(Rollout { restarted_at: Some(restarted_at), ..Rollout::default() })
    });
    if let Some(spot) = pods.spot.as_mut() {
        spot.on_demand_base = None;
        spot.max_percent_above_base = None;
        // That there is a fallback keeps pods on spot nodes; how long it waits does not change them.
        spot.fallback_after_seconds = spot.fallback_after_seconds.map(|_| 1);
    }
    pods
}

fn has_standby(scaling: &Autoscaling) -> bool {
    let is_asked = scaling.standby_replicas.is_some_and(|replicas| replicas > 0);
    is_asked && scaling.mode == AutoscalingMode::Builtin && scaling.shadow != Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ServiceBuilder, service};
    use crate::validate::validate;
    use serde_json::{Value, json};

    #[test]
    fn what_pods_are_made_from_is_made_from_itself() {
        let spec = service().builtin(1, 4, 500).standby(2).build().spec;
        assert_eq!(of_pods(&of_pods(&spec)), of_pods(&spec));
    }

    #[test]
    fn pods_know_whether_there_are_spares_and_not_how_many() {
        let hash = |spec: ServiceBuilder| spec.valid().spec_hash;
        let standby = |replicas: i32| service().builtin(1, 4, 500).standby(replicas);
        let mut shadow = standby(1).build();
        shadow.spec.autoscaling.as_mut().expect("autoscaling").shadow = Some(true);
        let plain = hash(service());
        assert_eq!(validate(&shadow).expect("valid").spec_hash, plain, "in shadow nothing is spared");
        for (spec, has_standby) in [
            (service(), false),
            (service().builtin(1, 4, 500), false),
            (standby(0), false),
            (standby(1), true),
            (standby(2), true),
        ] {
            let found = spec.valid();
            assert_eq!((found.has_standby(), found.spec_hash != plain), (has_standby, has_standby));
        }
        assert_eq!(hash(standby(1)), hash(standby(2)));
    }

    #[test]
    fn each_restart_is_of_other_pods_and_nothing_else_of_a_rollout_is() {
        let hash = |rollout: Value| service().with("rollout", rollout).valid().spec_hash;
        let plain = hash(json!({}));
        assert_eq!(hash(json!({"strategy": "Drain", "paused": true, "progressDeadlineSeconds": 9})), plain);
        let [first, second] =
            [30, 31].map(|minute| hash(json!({"restartedAt": format!("2026-11-21T19:{minute}:00Z")})));
        assert!(first != plain && second != plain && first != second);
    }
}
