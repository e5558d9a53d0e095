//! `engineUpgrade: Automatic`: which service takes the operator's default engine image next. One at a time, in the order
//! of their names, and none while the one before has not come to its end: an image that does not start stops with it. Nobody
//! waits for a service for which nothing can be planned.

use windlass_operator_api::rollout::EngineUpgrade;
use windlass_operator_api::status::condition;
use windlass_operator_api::{InferenceService, InferenceServiceStatus};

use crate::status::is_unplannable;

/// Whether `service` leaves its engine's image to the operator, upgrades included.
pub fn is_automatic(service: &InferenceService) -> bool {
    let rollout = service.spec.rollout.clone().unwrap_or_default();
    let names_image = service.spec.engine.as_ref().is_some_and(|engine| engine.image.is_some());
    let is_held = rollout.paused == Some(true) || rollout.pinned_revision.is_some();
    rollout.engine_upgrade == Some(EngineUpgrade::Automatic) && !names_image && !is_held
}

/// Whether `service` runs another image than `default`.
pub fn is_outdated(service: &InferenceService, default: &str) -> bool {
    let choices = service.status.as_ref().and_then(|status| status.choices.as_ref());
    choices.and_then(|choices| choices.engine_image.as_deref()).is_some_and(|image| image != default)
}

/// Namespace and name of the service of `services` that may upgrade to `default` now.
pub fn whose_turn<'a>(
    services: impl Iterator<Item = &'a InferenceService> + Clone,
    default: &str,
) -> Option<(&'a str, &'a str)> {
    let is_stopped = |service: &InferenceService| service.status.as_ref().is_some_and(is_unplannable);
    let may = |service: &&InferenceService| {
        is_automatic(service) && service.metadata.deletion_timestamp.is_none() && !is_stopped(service)
    };
    let automatic = services.filter(may);
    let mut upgraded = automatic.clone().filter(|service| !is_outdated(service, default));
    if upgraded.any(|service| service.status.as_ref().is_some_and(is_rolling)) {
        return None;
    }
    automatic.filter(|service| is_outdated(service, default)).map(key).min()
}

fn is_rolling(status: &InferenceServiceStatus) -> bool {
    let progressing = status.conditions.iter().find(|found| found.type_ == condition::PROGRESSING);
    progressing.is_some_and(|found| found.reason != "Complete" && status.choices.is_some())
}

fn key(service: &InferenceService) -> (&str, &str) {
    let (namespace, name) = (&service.metadata.namespace, &service.metadata.name);
    (namespace.as_deref().unwrap_or_default(), name.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::service;
    use serde_json::{Value, json};

    fn running(name: &str, image: &str, progressing: &str, rollout: Value) -> InferenceService {
        let mut service = service().named(name).with("rollout", rollout).build();
        let condition = json!({
            "type": "Progressing", "status": "True", "reason": progressing, "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        let status = json!({"choices": {"engineImage": image}, "conditions": [condition]});
        service.status = Some(serde_json::from_value(status).expect("a status"));
        service
    }

    fn turn(services: &[InferenceService]) -> Option<String> {
        whose_turn(services.iter(), "engine:2").map(|(_, name)| name.to_owned())
    }

    #[test]
    fn outdated_services_take_their_turns_by_name() {
        let automatic = || json!({"engineUpgrade": "Automatic"});
        let old = |name: &str| running(name, "engine:1", "Complete", automatic());
        let new = |name: &str, progressing: &str| running(name, "engine:2", progressing, automatic());
        assert_eq!(turn(&[old("b"), old("a")]).as_deref(), Some("a"));
        assert_eq!(turn(&[new("a", "RollingOut"), old("b")]), None, "the first has not come to its end");
        assert_eq!(turn(&[new("a", "ProgressDeadlineExceeded"), old("b")]), None, "nor will it");
        assert_eq!(turn(&[new("a", "Complete"), old("b")]).as_deref(), Some("b"));
        assert_eq!(turn(&[new("a", "Complete")]), None);
    }

    #[test]
    fn those_that_are_left_out_never_have_a_turn() {
        for rollout in [
            json!({}),
            json!({"engineUpgrade": "OnSpecChange"}),
            json!({"engineUpgrade": "Automatic", "paused": true}),
            json!({"engineUpgrade": "Automatic", "pinnedRevision": "a-1"}),
        ] {
            assert_eq!(turn(&[running("a", "engine:1", "Complete", rollout.clone())]), None, "{rollout}");
        }
        let old = || running("a", "engine:1", "Complete", json!({"engineUpgrade": "Automatic"}));
        let mut named = old();
        named.spec.engine = serde_json::from_value(json!({"image": "their-engine:1"})).expect("an engine");
        let mut configured = old();
        configured.spec.engine = serde_json::from_value(json!({"maxSequences": 4})).expect("an engine");
        let mut leaving = old();
        leaving.metadata.deletion_timestamp = Some(windlass_operator_api::status::time(crate::testing::at(100)));
        let mut new = old();
        new.status = None;
        for (service, has_turn) in [(old(), true), (configured, true), (named, false), (leaving, false), (new, false)] {
            assert_eq!(turn(std::slice::from_ref(&service)).is_some(), has_turn, "{service:?}");
        }
    }

    #[test]
    fn nobody_waits_for_a_service_that_has_made_nothing_yet_or_leaves() {
        let automatic = || json!({"engineUpgrade": "Automatic"});
        let old = running("b", "engine:1", "Complete", automatic());
        let mut fresh = running("a", "engine:2", "RollingOut", automatic());
        let mut leaving = fresh.clone();
        fresh.status.as_mut().expect("a status").choices = None;
        leaving.metadata.deletion_timestamp = Some(windlass_operator_api::status::time(crate::testing::at(100)));
        let paused = json!({"engineUpgrade": "Automatic", "paused": true});
        for first in [fresh, leaving, running("a", "engine:2", "RollingOut", paused)] {
            assert_eq!(turn(&[first, old.clone()]).as_deref(), Some("b"));
        }
    }

    #[test]
    fn nobody_waits_for_a_service_that_cannot_be_planned() {
        let automatic = || json!({"engineUpgrade": "Automatic"});
        let stopped = |image: &str, reason: &str| {
            let mut service = running("a", image, reason, automatic());
            let conditions = &mut service.status.as_mut().expect("a status").conditions;
            let mut stalled = conditions[0].clone();
            (stalled.type_, conditions[0].status) = ("Stalled".into(), "False".into());
            conditions.push(stalled);
            service
        };
        for (image, reason, turn_of_other) in [
            ("engine:1", "InvalidSpec", true),
            ("engine:1", "NameTaken", true),
            ("engine:2", "InvalidSpec", true),
            ("engine:2", "ProgressDeadlineExceeded", false),
            ("engine:2", "OutOfMemory", false),
        ] {
            let services = [stopped(image, reason), running("b", "engine:1", "Complete", automatic())];
            assert_eq!(turn(&services).as_deref() == Some("b"), turn_of_other, "{image} {reason}");
        }
        let mut cluster = crate::testing::cluster::Cluster::serving(service().build());
        let is_stopped =
            |cluster: &crate::testing::cluster::Cluster| cluster.service.status.as_ref().map(is_unplannable);
        assert_eq!(is_stopped(&cluster), Some(false));
        cluster.edit(service().with("replicas", json!(-1)).build());
        cluster.reconcile();
        assert_eq!(is_stopped(&cluster), Some(true), "by what the operator writes itself");
    }

    #[test]
    fn of_two_namespaces_the_first_has_its_turn_first() {
        let mut services =
            ["a", "b"].map(|name| running(name, "engine:1", "Complete", json!({"engineUpgrade": "Automatic"})));
        services[0].metadata.namespace = Some("late".into());
        services[1].metadata.namespace = Some("early".into());
        assert_eq!(whose_turn(services.iter(), "engine:2"), Some(("early", "b")));
    }
}
