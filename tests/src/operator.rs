//! The operator as users install it: two charts.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;

use crate::cluster::Cluster;
use crate::image::Image;
use crate::{command, workspace};

/// Where it is installed.
pub const NAMESPACE: &str = "windlass-system";
/// Name of the main chart's release, and so of the Deployment.
pub const RELEASE: &str = "windlass";
const SELECTOR: &str = "--selector=app.kubernetes.io/name=windlass-operator";
const CRDS_RELEASE: &str = "windlass-crds";
/// A ConfigMap that says which images the installed operator uses.
const RECORD: &str = "windlass-tests";

/// Installs both charts, or brings them to the state of this checkout, and waits until the operator is ready.
///
/// # Errors
/// helm's own words.
pub fn install(cluster: &Cluster, operator: &Image, engine: &Image) -> Result<()> {
    command::output(&mut upgrade(cluster, CRDS_RELEASE))?;
    command::output(upgrade(cluster, RELEASE).args(values(operator, engine)).args(["--wait", "--timeout", "120s"]))?;
    let record = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": RECORD, "namespace": NAMESPACE},
        "data": {"engineImage": reference(engine)},
    });
    cluster.kubectl().apply(&[record]).map(drop)
}

/// Removes both charts, and with them every InferenceService.
///
/// # Errors
/// helm's own words.
pub fn uninstall(cluster: &Cluster) -> Result<()> {
    for release in [RELEASE, CRDS_RELEASE] {
        let mut helm = cluster.helm();
        helm.args(["uninstall", release, "--namespace", NAMESPACE, "--ignore-not-found", "--wait"]);
        command::output(&mut helm)?;
    }
    cluster.kubectl().run(&["delete", "namespace", NAMESPACE, "--ignore-not-found"]).map(drop)
}

/// The engine image that the installed operator gives to pods.
///
/// # Errors
/// When [`install`] has not run on this cluster.
pub fn engine_image(cluster: &Cluster) -> Result<String> {
    let record: ConfigMap = cluster.kubectl().get(&["get", "configmap", RECORD, "-n", NAMESPACE])?;
    record.data.and_then(|mut data| data.remove("engineImage")).context("the record names no engine image")
}

/// Its pods.
///
/// # Errors
/// kubectl's own words, or that there are none.
pub fn pods(cluster: &Cluster) -> Result<Vec<Pod>> {
    let pods: Vec<Pod> = cluster.kubectl().list(&["get", "pods", "-n", NAMESPACE, SELECTOR])?;
    ensure!(!pods.is_empty(), "the operator has no pods");
    Ok(pods)
}

/// Folder of a chart.
pub fn chart(name: &str) -> PathBuf {
    workspace::root().join("charts").join(name)
}

fn upgrade(cluster: &Cluster, release: &str) -> Command {
    let mut helm = cluster.helm();
    // Objects that were applied as plain manifests before become helm's.
    helm.args(["upgrade", "--install", "--take-ownership", "--force-conflicts", release]).arg(chart(release));
    helm.args(["--namespace", NAMESPACE, "--create-namespace"]);
    helm
}

/// One replica: a second would only wait. The rest is the chart's own default.
fn values(operator: &Image, engine: &Image) -> Vec<String> {
    let values = [
        ("image.repository", operator.repository.as_str()),
        ("image.tag", &operator.tag),
        ("engine.image.repository", &engine.repository),
        ("engine.image.tag", &engine.tag),
        ("replicas", "1"),
    ];
    values.into_iter().flat_map(|(name, value)| ["--set".to_owned(), format!("{name}={value}")]).collect()
}

fn reference(image: &Image) -> String {
    format!("{}:{}", image.repository, image.tag)
}
