//! A change that cannot serve is told while the old pods go on, and a pinned revision takes it back.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::Duration;
use windlass_tests::namespace::with_namespace;
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn a_broken_change_is_told_and_taken_back_by_the_name_of_its_forerunner() -> Result<()> {
    with_namespace("revision", |namespace| {
        let service = Service::apply(namespace, "kept", &service::simulated(&[]))?;
        service.wait_ready(1, PATIENCE)?;
        let first = revision(&service)?;
        let serving = service.pods()?;

        let flags = json!(["--executor=sim", "--no-such-flag"]);
        service.patch(&json!({"spec": {"engine": {"extraArgs": flags}}}))?;
        let told = service.wait_condition("Progressing", "False", Some("InvalidConfiguration"), PATIENCE)?;
        ensure!(told.message.contains("no-such-flag"), "the cause is not told: {told:?}");
        let broken = revision(&service)?;
        ensure!(broken != first, "the change has no revision of its own");

        service.patch(&json!({"spec": {"rollout": {"pinnedRevision": first}}}))?;
        service.wait_ready(1, PATIENCE)?;
        ensure!(revision(&service)? == first, "{first} is pinned");
        let uid = |pods: &[k8s_openapi::api::core::v1::Pod]| pods.first().and_then(|pod| pod.metadata.uid.clone());
        ensure!(uid(&service.pods()?) == uid(&serving), "the pod that served all along was replaced");

        service.patch(&json!({"spec": {"rollout": {"pinnedRevision": "kept-nothing"}}}))?;
        let refused = service.wait_condition("Ready", "False", Some("InvalidSpec"), PATIENCE)?;
        ensure!(refused.message.contains(&first), "the names that there are are not told: {refused:?}");

        service.patch(&json!({"spec": {"rollout": {"pinnedRevision": first, "revisionHistoryLimit": 0}}}))?;
        wait::until("the broken revision is forgotten", PATIENCE, || {
            let known = service.read()?.status.map(|status| status.revisions.len()).unwrap_or_default();
            Ok(Look::when(known == 1, (), format!("{known} revisions are kept")))
        })
    })
}

fn revision(service: &Service<'_>) -> Result<String> {
    service.read()?.status.and_then(|status| status.revision).context("status tells no revision")
}
