//! Deleting a service leaves nothing behind.

use anyhow::Result;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::Duration;
use windlass_tests::namespace::{Namespace, with_namespace};
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn deleting_a_service_leaves_nothing() -> Result<()> {
    with_namespace("deletion", |namespace| {
        let kinds = kinds(namespace)?;
        let before = objects(namespace, &kinds)?;
        let mut spec = service::simulated(&[]);
        spec["spot"] = json!({"mode": "Prefer", "onDemandBase": 1});
        spec["replicas"] = json!(2);
        let service = Service::apply(namespace, "brief", &spec)?;
        wait::until("children of every kind exist", PATIENCE, || {
            let made = objects(namespace, &kinds)?.len() - before.len();
            let (deployments, pods) = (count(namespace, "deployments")?, service.pods()?.len());
            Ok(Look::when(
                deployments == 2 && pods > 0,
                (),
                format!("{made} objects, {deployments} deployments, {pods} pods"),
            ))
        })?;
        service.delete()?;
        wait::until("what was there before is all that is left", PATIENCE, || {
            let left: BTreeSet<_> = objects(namespace, &kinds)?.difference(&before).cloned().collect();
            Ok(Look::when(left.is_empty(), (), format!("{left:?}")))
        })
    })
}

/// Every kind of namespaced object that can be listed, events aside: those expire by themselves.
fn kinds(namespace: &Namespace) -> Result<String> {
    let names = namespace.cluster().kubectl().run(&["api-resources", "--namespaced", "--verbs=list", "-o", "name"])?;
    Ok(names.lines().filter(|name| !name.starts_with("events")).collect::<Vec<_>>().join(","))
}

fn objects(namespace: &Namespace, kinds: &str) -> Result<BTreeSet<String>> {
    Ok(namespace.run(&["get", kinds, "-o", "name"])?.lines().map(str::to_owned).collect())
}

fn count(namespace: &Namespace, kind: &str) -> Result<usize> {
    Ok(namespace.run(&["get", kind, "-o", "name"])?.lines().count())
}
