//! What keeps a service from what it should be: when to ask, whom, and what the answers tell.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Event;
use std::time::Duration;
use windlass_operator_api::InferenceService;
use windlass_operator_api::status::condition;
use windlass_operator_core::observed::{Observed, Warning};
use windlass_operator_core::pod::Pod;

/// A pod younger than this is expected to be unready.
const GRACE: SignedDuration = SignedDuration::from_secs(3);

/// Since when a service has not been what it should be; `None` for one that needs no diagnosis.
pub fn unready_since(service: &InferenceService, observed: &Observed) -> Option<Timestamp> {
    let status = service.status.as_ref();
    let ready = status.and_then(|status| status.conditions.iter().find(|found| found.type_ == condition::READY));
    let is_ready =
        ready.is_some_and(|ready| ready.status == "True" && ready.observed_generation == service.metadata.generation);
    let pod =
        observed.pods.iter().filter(|pod| !pod.is_ready() && !pod.is_leaving()).filter_map(|pod| pod.created()).min();
    if is_ready {
        return pod;
    }
    let created = || service.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let changed = ready.filter(|ready| ready.status != "True").map(|ready| ready.last_transition_time.0);
    Some(changed.or(pod).or_else(created).unwrap_or_default())
}

/// Often at first, when a user waits for an answer; seldom once it has been wrong for long.
pub fn interval(since: Timestamp, now: Timestamp) -> Duration {
    let age = Duration::try_from(now.duration_since(since)).unwrap_or_default();
    (age / 4).clamp(Duration::from_secs(3), Duration::from_secs(30))
}

/// Whether an object that the spec names may be what keeps pods from coming. A pod on a node has found all of them: it was
/// made as its account, and placed with its claims.
pub fn may_lack_something(observed: &Observed) -> bool {
    let refuses = |deployment: &Deployment| {
        let conditions = deployment.status.as_ref().and_then(|status| status.conditions.as_ref());
        conditions.into_iter().flatten().any(|found| found.type_ == "ReplicaFailure" && found.status == "True")
    };
    observed.pods.is_empty()
        || observed.pods.iter().any(|pod| !pod.is_leaving() && !is_placed(pod))
        || observed.deployments.iter().any(|deployment| refuses(deployment))
}

/// On a node for longer than an ordinary start takes, not on its way out, and without a container: of nothing else do
/// warnings tell more than the pod itself, and listing them is the API server's dearest answer.
pub fn is_stuck(pod: &Pod, now: Timestamp) -> bool {
    let age = pod.created().map_or(SignedDuration::ZERO, |created| now.duration_since(created));
    !pod.is_leaving() && is_placed(pod) && !has_begun(pod) && age >= GRACE
}

fn is_placed(pod: &Pod) -> bool {
    pod.spec.node_name.is_some()
}

/// Whether one of its containers was ever created.
fn has_begun(pod: &Pod) -> bool {
    let mut states = pod.status.containers.iter().map(|container| &container.state);
    states.any(|state| state.running.is_some() || state.terminated.is_some())
}

/// An event as planning takes it, whichever of its two generations of fields its author filled.
pub fn warning(event: Event) -> Option<Warning> {
    let series = event.series.and_then(|series| series.last_observed_time).map(|time| time.0);
    let at = series.or(event.last_timestamp.map(|time| time.0)).or(event.event_time.map(|time| time.0));
    let about = event.involved_object;
    Some(Warning {
        about: format!("{}/{}", about.kind?, about.name?),
        reason: event.reason?,
        message: event.message?,
        at: at.or(event.metadata.creation_timestamp.map(|time| time.0))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::sync::Arc;

    fn seconds(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    fn service(ready: &str, observed_generation: i64) -> InferenceService {
        serde_json::from_value(json!({
            "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"namespace": "n", "name": "a", "generation": 2, "creationTimestamp": "1970-01-01T00:00:05Z"},
            "spec": {"model": {"source": "pvc://models/a.gguf"}},
            "status": {"conditions": [{
                "type": "Ready", "status": ready, "reason": "R", "message": "", "observedGeneration": observed_generation,
                "lastTransitionTime": "1970-01-01T00:01:00Z",
            }]},
        }))
        .expect("a service")
    }

    fn pod(ready: &str) -> Arc<Pod> {
        let pod = json!({
            "metadata": {"name": "p", "creationTimestamp": "1970-01-01T00:00:30Z"},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        });
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn a_ready_service_is_observed_without_requests() {
        let observed = Observed { pods: vec![pod("True")], ..Observed::default() };
        assert_eq!(unready_since(&service("True", 2), &observed), None);
    }

    #[test]
    fn a_new_generation_an_unready_service_and_an_unready_pod_are_diagnosed() {
        let none = Observed::default();
        assert_eq!(unready_since(&service("True", 1), &none), Some(seconds(5)), "a new spec: since it exists");
        assert_eq!(unready_since(&service("False", 2), &none), Some(seconds(60)), "since the condition says so");
        let stuck = Observed { pods: vec![pod("False")], ..Observed::default() };
        assert_eq!(unready_since(&service("True", 2), &stuck), Some(seconds(30)), "since the pod exists");
    }

    #[test]
    fn diagnosis_grows_rarer_and_keeps_its_bounds() {
        let seconds_at = |age| interval(seconds(0), seconds(age)).as_secs();
        assert_eq!((seconds_at(0), seconds_at(40), seconds_at(86_400)), (3, 10, 30));
        assert_eq!(interval(seconds(10), seconds(0)).as_secs(), 3, "a clock that went back");
    }

    #[test]
    fn warnings_are_read_of_pods_that_a_node_has_had_for_a_while_without_a_container() {
        let on_node = |state: serde_json::Value| -> Pod {
            let status = json!({"containerStatuses": [{
                "name": "engine", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state,
            }]});
            let pod = json!({
                "metadata": {"name": "p", "creationTimestamp": "1970-01-01T00:00:30Z"},
                "spec": {"nodeName": "node-1", "containers": []}, "status": status,
            });
            serde_json::from_value(pod).expect("a pod")
        };
        let creating = on_node(json!({"waiting": {"reason": "ContainerCreating"}}));
        assert_eq!((is_stuck(&creating, seconds(32)), is_stuck(&creating, seconds(33))), (false, true));
        assert!(!is_stuck(&on_node(json!({"running": {}})), seconds(99)), "it loads its model");
        assert!(!is_stuck(&on_node(json!({"terminated": {"exitCode": 1}})), seconds(99)), "its end says why");
        assert!(!is_stuck(&pod("False"), seconds(99)), "why it is on no node is its own condition");
    }

    #[test]
    fn what_the_spec_names_is_looked_up_until_every_pod_has_found_it() {
        let on_node = |node: Option<&str>| {
            let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeName": node, "containers": []}});
            Arc::new(serde_json::from_value::<Pod>(pod).expect("a pod"))
        };
        let refusing = |status: &str| {
            let failure = json!({"type": "ReplicaFailure", "status": status});
            let deployment = json!({"metadata": {"name": "a"}, "status": {"conditions": [failure]}});
            Arc::new(serde_json::from_value::<Deployment>(deployment).expect("a deployment"))
        };
        for (pods, failure, expected) in [
            (vec![], "False", true),
            (vec![on_node(Some("n"))], "False", false),
            (vec![on_node(Some("n")), on_node(None)], "False", true),
            (vec![on_node(Some("n"))], "True", true),
        ] {
            let observed = Observed { pods, deployments: vec![refusing(failure)], ..Observed::default() };
            assert_eq!(may_lack_something(&observed), expected, "{observed:?}");
        }
    }

    #[test]
    fn a_warning_carries_the_time_it_was_last_seen() {
        let event: Event = serde_json::from_value(json!({
            "metadata": {"name": "e", "creationTimestamp": "1970-01-01T00:00:01Z"},
            "involvedObject": {"kind": "Pod", "name": "p"}, "type": "Warning",
            "reason": "FailedMount", "message": "secret not found",
            "lastTimestamp": "1970-01-01T00:00:07Z",
        }))
        .expect("an event");
        let read = warning(event).expect("complete");
        assert_eq!((read.about.as_str(), read.at), ("Pod/p", seconds(7)));
    }
}
