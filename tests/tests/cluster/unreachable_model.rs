//! A model that cannot be had becomes a condition with the cause; the operator itself stays up.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::time::Duration;
use windlass_tests::cluster::Cluster;
use windlass_tests::namespace::with_namespace;
use windlass_tests::operator;
use windlass_tests::service::{self, Service, pod_name};

const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn the_cause_becomes_a_condition_and_the_operator_stays_up() -> Result<()> {
    with_namespace("unreachable", |namespace| {
        let before = restarts(namespace.cluster())?;
        let no_claim =
            Service::apply(namespace, "no-claim", &with_model(json!({"source": "pvc://nowhere/model.gguf"})))?;
        let mut absent = with_model(json!({"source": "pvc://models/absent.gguf"}));
        absent["rollout"] = json!({"progressDeadlineSeconds": 60});
        let no_file = Service::apply(namespace, "no-file", &absent)?;
        let closed = json!({"source": "https://127.0.0.1:9/model.gguf", "sha256": "0".repeat(64)});
        let no_server = Service::apply(namespace, "no-server", &with_model(closed))?;

        let condition = no_claim.wait_words("nowhere", PATIENCE)?;
        ensure!(condition.status != "True" || condition.type_ != "Ready", "{condition:?}");
        let condition = no_file.wait_condition("Ready", "False", Some("ModelUnavailable"), PATIENCE)?;
        ensure!(condition.message.contains("absent.gguf"), "{condition:?}");
        let condition = no_server.wait_condition("Ready", "False", Some("ModelUnavailable"), PATIENCE)?;
        ensure!(condition.message.contains("127.0.0.1:9"), "{condition:?}");

        // It is tried again for ever; that it has not come to serve in time is told, and why.
        let stuck = no_file.wait_condition("Stalled", "True", Some("ProgressDeadlineExceeded"), PATIENCE)?;
        ensure!(stuck.message.contains("ModelUnavailable"), "{stuck:?}");
        no_file.wait_condition("Reconciling", "False", Some("ProgressDeadlineExceeded"), PATIENCE)?;

        let after = restarts(namespace.cluster())?;
        ensure!(before == after, "the operator restarted: {before:?}, then {after:?}");
        Ok(())
    })
}

fn with_model(model: Value) -> Value {
    let mut spec = service::real();
    spec["resources"] = json!({"requests": {"cpu": "50m", "memory": "64Mi"}});
    spec["model"] = model;
    spec
}

/// Names of the operator's pods with their restarts.
fn restarts(cluster: &Cluster) -> Result<Vec<(String, i32)>> {
    let of = |pod: &Pod| {
        let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
        Some((pod_name(pod).to_owned(), statuses.iter().map(|status| status.restart_count).sum()))
    };
    operator::pods(cluster)?.iter().map(|pod| of(pod).context("a pod of the operator has no status")).collect()
}
