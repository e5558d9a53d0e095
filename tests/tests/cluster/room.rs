//! Rollouts where nodes have no room for one more pod, and rollouts that are held. Room is counted in a resource of
//! each test's own, which the node is said to have.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::load::Load;
use windlass_tests::namespace::{Namespace, with_namespace, with_own_nodes};
use windlass_tests::service::{self, Service, is_ready, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);

/// A service of so many replicas on a node that has room for just as many.
fn crowded(namespace: &Namespace, name: &str, replicas: u32) -> Result<Value> {
    let resource = format!("{name}.test.windlass.dev/room");
    namespace.cluster().advertise(&resource, replicas)?;
    let mut spec = service::simulated(&["--max-connection-age-seconds=2", service::PATIENT_DRAIN]);
    spec["replicas"] = json!(replicas);
    spec["resources"]["requests"][&resource] = json!("1");
    spec["resources"]["limits"][&resource] = json!("1");
    Ok(spec)
}

fn edit(sequences: u32) -> Value {
    json!({"spec": {"engine": {"maxSequences": sequences}}})
}

#[test]
fn the_last_pod_is_given_up_only_where_that_is_asked_for() -> Result<()> {
    with_own_nodes("last-pod", |namespace| {
        let service = Service::apply(namespace, "last", &crowded(namespace, "last", 1)?)?;
        service.wait_ready(1, PATIENCE)?;
        let before = ready(&service)?;
        service.patch(&edit(16))?;
        service.wait_condition("Progressing", "False", Some("NoCapacity"), PATIENCE)?;
        ensure!(ready(&service)? == before, "the pod that served is gone");
        service.patch(&json!({"spec": {"rollout": {"strategy": "Drain"}}}))?;
        service.wait_ready(1, PATIENCE)?;
        ensure!(ready(&service)?.is_disjoint(&before), "the pod is the old one");
        Ok(())
    })
}

#[test]
fn without_room_pods_are_replaced_one_at_a_time_and_no_request_fails() -> Result<()> {
    with_own_nodes("no-room", |namespace| {
        let service = Service::apply(namespace, "full", &crowded(namespace, "full", 2)?)?;
        service.wait_ready(2, PATIENCE)?;
        let before = ready(&service)?;
        let reach = service.reach()?;
        let load = Load::start(&Client::pooled(reach.url()), 2, |number| {
            chat::request("full", &format!("Request {number}"), 20)
        });
        service.patch(&edit(16))?;
        let replaced = wait::until("both pods are new", PATIENCE, || {
            let now = ready(&service)?;
            ensure!(!now.is_empty(), "no pod serves");
            Ok(Look::when(now.len() == 2 && now.is_disjoint(&before), (), format!("{now:?} serve")))
        });
        let report = load.stop();
        replaced?;
        ensure!(report.failures.is_empty(), "{} failed: {:?}", report.failures.len(), report.failures);
        ensure!(report.completed > 10, "only {} requests were answered", report.completed);
        service.wait_ready(2, PATIENCE)
    })
}

#[test]
fn without_room_a_pod_that_went_for_one_that_does_not_start_comes_back() -> Result<()> {
    with_own_nodes("in-vain", |namespace| {
        let mut spec = crowded(namespace, "vain", 2)?;
        spec["rollout"]["progressDeadlineSeconds"] = json!(60);
        let service = Service::apply(namespace, "vain", &spec)?;
        service.wait_ready(2, PATIENCE)?;
        let before = ready(&service)?;
        let mut args = spec["engine"]["extraArgs"].as_array().cloned().unwrap_or_default();
        args.push(json!("--no-such-flag"));
        service.patch(&json!({"spec": {"engine": {"extraArgs": args}}}))?;
        wait::until("an old pod has made room", PATIENCE, || {
            let now = ready(&service)?;
            Ok(Look::when(now.len() == 1 && now.is_subset(&before), (), format!("{now:?} serve")))
        })?;
        service.wait_condition("Progressing", "False", Some("ProgressDeadlineExceeded"), PATIENCE * 2)?;
        let back = wait::until("as many serve as before", PATIENCE, || {
            let (now, all) = (ready(&service)?, service.pods()?.len());
            Ok(Look::when(now.len() == 2 && all == 2, now.clone(), format!("{now:?} serve, of {all}")))
        })?;
        service.patch(&json!({"spec": {"engine": {"extraArgs": spec["engine"]["extraArgs"], "maxSequences": 16}}}))?;
        service.wait_condition("Progressing", "True", Some("Complete"), PATIENCE * 2)?;
        ensure!(ready(&service)?.is_disjoint(&back), "a pod of the earlier spec is left");
        Ok(())
    })
}

#[test]
fn a_paused_rollout_changes_no_pod_but_their_number_and_goes_on_when_resumed() -> Result<()> {
    with_namespace("paused", |namespace| {
        let service = Service::apply(namespace, "held", &service::simulated(&[]))?;
        service.wait_ready(1, PATIENCE)?;
        let before = ready(&service)?;
        service.patch(&json!({"spec": {"rollout": {"paused": true}}}))?;
        service.patch(&edit(16))?;
        service.wait_condition("Progressing", "False", Some("Paused"), PATIENCE)?;
        service.scale(2)?;
        let grown = wait::until("a second pod serves", PATIENCE, || {
            let now = ready(&service)?;
            Ok(Look::when(now.len() == 2, now.clone(), format!("{now:?} serve")))
        })?;
        ensure!(grown.is_superset(&before), "{before:?}, then {grown:?}");
        service.patch(&json!({"spec": {"rollout": {"paused": false}}}))?;
        service.wait_ready(2, PATIENCE)?;
        ensure!(ready(&service)?.is_disjoint(&grown), "a pod of the earlier spec is left");
        let now = ready(&service)?;
        service.patch(&json!({"spec": {"rollout": {"restartedAt": "2026-01-01T00:00:00Z"}}}))?;
        service.wait_condition("Progressing", "True", Some("RollingOut"), PATIENCE)?;
        service.wait_ready(2, PATIENCE)?;
        ensure!(ready(&service)?.is_disjoint(&now), "a restart has left a pod");
        Ok(())
    })
}

/// Names of pods that serve.
fn ready(service: &Service<'_>) -> Result<BTreeSet<String>> {
    Ok(service.pods()?.iter().filter(|pod| is_ready(pod)).map(|pod| pod_name(pod).to_owned()).collect())
}
