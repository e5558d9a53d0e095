//! A real Prometheus on this machine that scrapes what the chart's PodMonitors name, as the Prometheus operator would
//! have it, under the rules of the chart's PrometheusRule.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
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
    /// Starts one on what the chart renders for a cluster.
    ///
    /// # Errors
    /// When the rules are refused, or it does not start.
    pub fn start(cluster: &Cluster) -> Result<Prometheus> {
        let folder = tempfile::tempdir()?;
        let enabled = ["--set", "podMonitor.enabled=true", "--set", "prometheusRule.enabled=true"];
        let rendered = operator::template(cluster, "windlass", operator::RELEASE, operator::NAMESPACE, &enabled)?;
        let objects = operator::objects(&rendered)?;
        std::fs::write(folder.path().join("rules.yaml"), rules(&objects)?.to_string())?;
        let config = configuration(&objects, cluster.kubeconfig())?.to_string();
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

fn configuration(objects: &[Value], kubeconfig: &Path) -> Result<Value> {
    let monitors = of_kind(objects, "PodMonitor");
    ensure!(monitors.len() == 2, "{} PodMonitors, one of operators and one of engines expected", monitors.len());
    let jobs = monitors.iter().map(|monitor| job(monitor, kubeconfig)).collect::<Result<Vec<_>>>()?;
    Ok(json!({
        "global": {"scrape_interval": format!("{SCRAPE_SECONDS}s"), "evaluation_interval": format!("{SCRAPE_SECONDS}s")},
        "rule_files": ["rules.yaml"], "scrape_configs": jobs,
    }))
}

/// The scrape job that the Prometheus operator would make of a PodMonitor.
fn job(monitor: &Value, kubeconfig: &Path) -> Result<Value> {
    let spec = &monitor["spec"];
    let endpoint = &spec["podMetricsEndpoints"][0];
    let name = monitor["metadata"]["name"].as_str().context("a PodMonitor without a name")?;
    let any = spec["namespaceSelector"]["any"] == true;
    let namespaces = if any { json!([]) } else { json!([monitor["metadata"]["namespace"]]) };
    let selector = spec["selector"]["matchLabels"].as_object().context("a PodMonitor without matchLabels")?;
    let keep = |label: &str, value: &Value| json!({"action": "keep", "source_labels": [label], "regex": value});
    let copy = |from: &str, to: &str| json!({"source_labels": [from], "target_label": to});
    let mut relabel: Vec<Value> =
        selector.iter().map(|(label, value)| keep(&pod_label(&sanitized(label)), value)).collect();
    relabel.push(keep("__meta_kubernetes_pod_container_port_name", &endpoint["port"]));
    relabel.push(copy("__meta_kubernetes_namespace", "namespace"));
    relabel.push(copy("__meta_kubernetes_pod_name", "pod"));
    let targets = spec["podTargetLabels"].as_array().into_iter().flatten().filter_map(Value::as_str);
    relabel.extend(targets.map(sanitized).map(|label| copy(&pod_label(&label), &label)));
    Ok(json!({
        "job_name": name, "metrics_path": endpoint["path"], "relabel_configs": relabel,
        "kubernetes_sd_configs": [{"role": "pod", "kubeconfig_file": kubeconfig, "namespaces": {"names": namespaces}}],
    }))
}

fn pod_label(label: &str) -> String {
    format!("__meta_kubernetes_pod_label_{label}")
}

fn sanitized(label: &str) -> String {
    label.replace(|character: char| !character.is_ascii_alphanumeric(), "_")
}
