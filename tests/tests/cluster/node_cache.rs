//! A cache that each node has for itself: a model is fetched once for all pods of the node, and goes when none serves it.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};
use windlass_tests::model;
use windlass_tests::namespace::{Namespace, skip, with_namespace};
use windlass_tests::service::{self, Service};
use windlass_tests::wait::{self, Look};
use windlass_tests::workspace;

const PATIENCE: Duration = Duration::from_secs(120);
const DAY: Duration = Duration::from_secs(86_400);
const CLAIM: &str = "node-cache";
/// A byte in the middle of the file, which only who fetches it asks for.
const MIDDLE: u64 = 40_000_000;

#[test]
fn a_node_fetches_a_model_once_and_clears_away_what_nobody_serves() -> Result<()> {
    with_namespace("node-cache", |namespace| {
        let Some(address) = namespace.cluster().host_address().filter(|_| namespace.cluster().is_own()) else {
            return skip("the node's disk is not this machine's, or its pods cannot reach this machine");
        };
        let disk = tempfile::tempdir()?;
        let server = crate::tls::Server::start(address, &model::file()?, u64::MAX)?;
        let other = crate::tls::Server::start(address, &workspace::root().join("LICENSE"), u64::MAX)?;
        let authorities = json!({"ca.crt": format!("{}{}", server.authority(), other.authority())});
        let authorities = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "authorities"}, "data": authorities,
        });
        namespace.apply(&[volume(namespace, disk.path()), claim(), authorities])?;

        let spec = with(service::real(), json!({"source": server.url(), "sha256": model::SHA256}));
        let served = Service::apply(namespace, "served", &spec)?;
        served.wait_ready(2, PATIENCE)?;
        ensure!(server.times(MIDDLE) == 1, "two pods of one node have fetched it {} times", server.times(MIDDLE));

        let fetched = format!("{}.gguf", model::SHA256);
        for name in ["abandoned.gguf", "abandoned.gguf.fetched.json", "theirs.gguf"] {
            fs::write(disk.path().join(name), "{}")?;
        }
        unused_for(2 * DAY, disk.path(), &[&fetched, "abandoned.gguf"])?;
        start_another(namespace, "first", &other)?;
        let left = |name: &str| disk.path().join(name).exists();
        ensure!(!left("abandoned.gguf"), "what no pod serves was kept");
        ensure!(left(&fetched), "what two pods serve was removed");
        ensure!(left("theirs.gguf"), "what no pod has fetched was removed");

        served.delete()?;
        wait::until("nobody serves the model", PATIENCE, || {
            let pods = served.pods()?.len();
            Ok(Look::when(pods == 0, (), format!("{pods} pods")))
        })?;
        start_another(namespace, "second", &other)?;
        ensure!(!left(&fetched) && left("theirs.gguf"), "what no pod serves any more was kept");
        Ok(())
    })
}

/// Lets the models count as unused for so long.
fn unused_for(age: Duration, disk: &Path, models: &[&str]) -> Result<()> {
    for model in models {
        let record = File::options().write(true).open(disk.join(format!("{model}.fetched.json")))?;
        record.set_modified(SystemTime::now() - age)?;
    }
    Ok(())
}

/// Pods that fetch something small, and by that clear away; that it is no model they find out later.
fn start_another(namespace: &Namespace, name: &str, server: &crate::tls::Server) -> Result<()> {
    let file = fs::read(workspace::root().join("LICENSE"))?;
    let sha256: String = Sha256::digest(file).iter().map(|byte| format!("{byte:02x}")).collect();
    let spec = with(service::simulated(&[]), json!({"source": server.url(), "sha256": sha256}));
    Service::apply(namespace, name, &spec)?.wait_condition("Ready", "False", Some("ModelInvalid"), PATIENCE).map(drop)
}

/// Two pods of `spec` with `model` in the node's cache.
fn with(mut spec: Value, mut model: Value) -> Value {
    model["caConfigMapRef"] = json!({"name": "authorities"});
    model["cache"] =
        json!({"type": "Node", "claimName": CLAIM, "sizeLimit": "1Gi", "keepUnusedSeconds": DAY.as_secs()});
    spec["model"] = model;
    spec["replicas"] = json!(2);
    spec["resources"]["requests"] = json!({"cpu": "100m", "memory": "256Mi"});
    spec
}

/// A folder that every node has for itself; with one node, one.
fn volume(namespace: &Namespace, disk: &Path) -> Value {
    let anywhere = json!({"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]});
    json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": format!("{}-cache", namespace.name())},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "storageClassName": CLAIM,
            "local": {"path": disk},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [anywhere]}]}},
            "claimRef": {"namespace": namespace.name(), "name": CLAIM},
        },
    })
}

fn claim() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM},
        "spec": {
            "accessModes": ["ReadWriteMany"], "storageClassName": CLAIM, "resources": {"requests": {"storage": "1Gi"}},
        },
    })
}
