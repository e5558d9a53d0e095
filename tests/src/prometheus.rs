//! A real Prometheus on this machine that scrapes the pods which the chart's PodMonitors select when it starts, as the
//! Prometheus operator would have it, under the rules of the chart's PrometheusRule.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

use crate::cluster::Cluster;
use crate::process::{Running, free_port};
use crate::wait::{self, Look};
use crate::{command, operator};

const PATIENCE: Duration = Duration::from_secs(30);
const SCRAPE_SECONDS: u32 = 2;

/// Whether `prometheus` and `promtool` are on the PATH.
pub fn is_installed() -> bool {
    command::output(Command::new("promtool").arg("--version")).is_ok()
}

/// A running Prometheus.
#[derive(Debug)]
pub struct Prometheus {
    process: Running,
    address: String,
    _folder: TempDir,
}

/// One series of an answer.
#[derive(Clone, Debug, Deserialize)]
pub struct Sample {
    /// Labels.
    pub metric: BTreeMap<String, String>,
    /// Time and value.
    pub value: (f64, String),
}

impl Prometheus {
    /// Starts one on what the chart renders for a cluster and the pods that are there.
    ///
    /// # Errors
    /// When the rules are refused, or it does not start.
    pub fn start(cluster: &Cluster) -> Result<Prometheus> {
        let folder = tempfile::tempdir()?;
        let enabled =
            ["--set", "podMonitor.enabled=true,monitoringNamespace=monitoring", "--set", "prometheusRule.enabled=true"];
        let rendered = operator::template(cluster, "windlass", operator::RELEASE, operator::NAMESPACE, &enabled)?;
        let objects = operator::objects(&rendered)?;
        std::fs::write(folder.path().join("rules.yaml"), rules(&objects)?.to_string())?;
        let config = configuration(cluster, &objects)?.to_string();
        std::fs::write(folder.path().join("prometheus.yaml"), config)?;
        let check = ["check", "config", "prometheus.yaml"];
        command::output(Command::new("promtool").current_dir(&folder).args(check))?;
        let address = format!("127.0.0.1:{}", free_port()?);
        let mut program = Command::new("prometheus");
        program.current_dir(&folder).args(["--config.file=prometheus.yaml", "--storage.tsdb.path=data"]);
        program.arg(format!("--web.listen-address={address}"));
        let process = Running::start("prometheus", &mut program, folder.path())?;
        let prometheus = Prometheus { process, address, _folder: folder };
        wait::until("Prometheus answers", PATIENCE, || prometheus.query("vector(1)").map(|_| Look::Done(())))
            .with_context(|| prometheus.process.log())?;
        Ok(prometheus)
    }

    /// The answer to an instant query.
    ///
    /// # Errors
    /// Prometheus' own words.
    pub fn query(&self, query: &str) -> Result<Vec<Sample>> {
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let url = format!("http://{}/api/v1/query", self.address);
        let mut answer: Value =
            serde_json::from_str(&agent.get(&url).query("query", query).call()?.body_mut().read_to_string()?)?;
        ensure!(answer["status"] == "success", "{query}: {}", answer["error"]);
        serde_json::from_value(answer["data"]["result"].take()).with_context(|| format!("{query}: no vector"))
    }
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

fn rules(objects: &[Value]) -> Result<Value> {
    let rules = of_kind(objects, "PrometheusRule");
    Ok(rules.first().context("the chart renders no PrometheusRule")?["spec"].clone())
}

fn configuration(cluster: &Cluster, objects: &[Value]) -> Result<Value> {
    let monitors = of_kind(objects, "PodMonitor");
    ensure!(monitors.len() == 2, "{} PodMonitors, one of operators and one of engines expected", monitors.len());
    let jobs = monitors.iter().map(|monitor| job(cluster, monitor)).collect::<Result<Vec<_>>>()?;
    let seconds = format!("{SCRAPE_SECONDS}s");
    Ok(json!({
        "global": {"scrape_interval": seconds, "evaluation_interval": seconds},
        "rule_files": ["rules.yaml"], "scrape_configs": jobs,
    }))
}

/// What a PodMonitor selects now, with the labels that the Prometheus operator would give it.
fn job(cluster: &Cluster, monitor: &Value) -> Result<Value> {
    let (spec, name) = (&monitor["spec"], monitor["metadata"]["name"].as_str().context("a PodMonitor without a name")?);
    let namespace = monitor["metadata"]["namespace"].as_str().unwrap_or_default();
    let selector = spec["selector"]["matchLabels"].as_object().context("a PodMonitor without matchLabels")?;
    let selector = selector.iter().map(|(label, value)| format!("{label}={}", value.as_str().unwrap_or_default()));
    let selector = selector.collect::<Vec<_>>().join(",");
    let mut list = vec!["get", "pods", "--selector", &selector];
    match spec["namespaceSelector"]["any"] == true {
        true => list.push("--all-namespaces"),
        false => list.extend(["--namespace", namespace]),
    }
    let endpoint = &spec["podMetricsEndpoints"][0];
    let port = endpoint["port"].as_str().context("a PodMonitor without a port")?;
    let labels: Vec<&str> =
        spec["podTargetLabels"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let pods: Vec<Pod> = cluster.kubectl().list(&list)?;
    let targets: Vec<Value> = pods.iter().filter_map(|pod| target(pod, port, &labels)).collect();
    ensure!(!targets.is_empty(), "{name} selects no pod that has port {port}");
    Ok(json!({"job_name": name, "metrics_path": endpoint["path"], "static_configs": targets}))
}

fn target(pod: &Pod, port: &str, copied: &[&str]) -> Option<Value> {
    let containers = &pod.spec.as_ref()?.containers;
    let mut ports = containers.iter().flat_map(|container| container.ports.iter().flatten());
    let number = ports.find(|found| found.name.as_deref() == Some(port))?.container_port;
    let mut labels = json!({"namespace": pod.metadata.namespace, "pod": pod.metadata.name});
    for label in copied {
        let value = pod.metadata.labels.as_ref().and_then(|labels| labels.get(*label));
        labels[label.replace(|character: char| !character.is_ascii_alphanumeric(), "_")] = json!(value?);
    }
    Some(json!({"targets": [format!("{}:{number}", pod.status.as_ref()?.pod_ip.as_ref()?)], "labels": labels}))
}
