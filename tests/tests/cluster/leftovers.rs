//! What the spec no longer asks for goes, and not before others have taken its place.

use anyhow::Result;
use serde_json::json;
use std::time::Duration;
use windlass_tests::namespace::{Namespace, with_namespace};
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn a_workload_and_an_account_that_are_not_asked_for_any_more_go() -> Result<()> {
    with_namespace("leftovers", |namespace| {
        let mut spec = service::simulated(&[]);
        spec["replicas"] = json!(2);
        spec["spot"] = json!({"mode": "Prefer", "onDemandBase": 1});
        let service = Service::apply(namespace, "changed", &spec)?;
        service.wait_ready(2, PATIENCE)?;
        until(namespace, "deployments", &["deployment.apps/changed", "deployment.apps/changed-spot"])?;
        until(namespace, "serviceaccounts", &["serviceaccount/changed", "serviceaccount/default"])?;
        service.patch(&json!({"spec": {"spot": null, "serviceAccountName": "default"}}))?;
        until(namespace, "deployments", &["deployment.apps/changed"])?;
        until(namespace, "serviceaccounts", &["serviceaccount/default"])?;
        service.wait_ready(2, PATIENCE)
    })
}

fn until(namespace: &Namespace, kind: &str, names: &[&str]) -> Result<()> {
    wait::until(&format!("{kind} are {names:?}"), PATIENCE, || {
        let found = namespace.run(&["get", kind, "-o", "name"])?;
        Ok(Look::when(found.lines().eq(names.iter().copied()), (), found))
    })
}
