//! The operator as users install it: two charts.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use serde::Deserialize;
use serde_json::{Value, json};
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
    command::output(upgrade(cluster, RELEASE).args(values(operator, engine)).args(WAIT))?;
    let record = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": RECORD, "namespace": NAMESPACE},
        "data": {"engineImage": reference(engine)},
    });
    cluster.kubectl().apply(&[record]).map(drop)
}

/// Removes both charts; the resource and its objects stay.
///
/// # Errors
/// helm's own words.
pub fn uninstall(cluster: &Cluster) -> Result<()> {
    [RELEASE, CRDS_RELEASE].iter().try_for_each(|release| uninstall_release(cluster, release))?;
    cluster.kubectl().run(&["delete", "namespace", NAMESPACE, "--ignore-not-found"]).map(drop)
}

/// The main chart's release as it was found, so that it can be changed and brought back.
#[derive(Debug)]
pub struct Installation<'a> {
    cluster: &'a Cluster,
    values: Value,
}

impl<'a> Installation<'a> {
    /// As it is now.
    ///
    /// # Errors
    /// helm's own words.
    pub fn of(cluster: &'a Cluster) -> Result<Installation<'a>> {
        let mut get = cluster.helm();
        get.args(["get", "values", RELEASE, "--namespace", NAMESPACE, "--output", "json"]);
        let values = serde_json::from_str(&command::output(&mut get)?).context("helm's values are no JSON")?;
        Ok(Installation { cluster, values })
    }

    /// Upgrades it with further values, each `name=value`.
    ///
    /// # Errors
    /// helm's own words.
    pub fn upgrade(&self, values: &[&str]) -> Result<()> {
        let mut helm = upgrade(self.cluster, RELEASE);
        helm.args(["--values", "-"]).args(values.iter().flat_map(|value| ["--set", value])).args(WAIT);
        command::output_with_input(&mut helm, &self.values.to_string()).map(drop)
    }

    /// Back to the revision before, as `helm rollback` does it.
    ///
    /// # Errors
    /// helm's own words.
    pub fn roll_back(&self) -> Result<()> {
        let mut helm = self.cluster.helm();
        helm.args(["rollback", RELEASE, "--namespace", NAMESPACE]).args(WAIT);
        command::output(&mut helm).map(drop)
    }

    /// Uninstalls both charts; what they keep stays.
    ///
    /// # Errors
    /// helm's own words.
    pub fn remove(&self) -> Result<()> {
        [RELEASE, CRDS_RELEASE].iter().try_for_each(|release| uninstall_release(self.cluster, release))
    }

    /// Both charts with the values that were found.
    ///
    /// # Errors
    /// helm's own words.
    pub fn restore(&self) -> Result<()> {
        command::output(&mut upgrade(self.cluster, CRDS_RELEASE))?;
        self.upgrade(&[])
    }
}

/// Until what helm applies is ready.
const WAIT: [&str; 3] = ["--wait", "--timeout", "120s"];

fn uninstall_release(cluster: &Cluster, release: &str) -> Result<()> {
    let mut helm = cluster.helm();
    helm.args(["uninstall", release, "--namespace", NAMESPACE, "--ignore-not-found", "--wait"]);
    command::output(&mut helm).map(drop)
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

/// Name of its pod that acts.
///
/// # Errors
/// kubectl's own words, or that nobody leads.
pub fn leader(cluster: &Cluster) -> Result<String> {
    let lease: Lease = cluster.kubectl().get(&["get", "lease", RELEASE, "-n", NAMESPACE])?;
    lease.spec.and_then(|spec| spec.holder_identity).context("nobody leads")
}

/// Folder of a chart.
pub fn chart(name: &str) -> PathBuf {
    workspace::root().join("charts").join(name)
}

/// What a chart renders under the name `release`, as a stream of YAML documents.
///
/// # Errors
/// helm's own words.
pub fn template(cluster: &Cluster, name: &str, release: &str, namespace: &str, values: &[&str]) -> Result<String> {
    let mut helm = cluster.helm();
    helm.args(["template", release]).arg(chart(name)).args(["--namespace", namespace]).args(values);
    command::output(&mut helm)
}

/// The objects of a stream of YAML documents.
///
/// # Errors
/// When it is none.
pub fn objects(documents: &str) -> Result<Vec<Value>> {
    let objects = serde_yaml_ng::Deserializer::from_str(documents).map(Value::deserialize);
    let objects: Vec<Value> = objects.collect::<Result<_, _>>().context("what the chart renders is no YAML")?;
    Ok(objects.into_iter().filter(|object| !object.is_null()).collect())
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
