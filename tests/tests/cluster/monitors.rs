//! What the chart's monitors select is what the chart makes: objects by their labels, ports by their names, and the
//! certificate by which a ServiceMonitor trusts them.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use windlass_tests::namespace::prepared_cluster;
use windlass_tests::operator;

const MONITORS: &str = "podMonitor.enabled=true,monitoringNamespace=monitoring";
const GUARDED: &str = "guardedMetrics.enabled=true";
/// Another Service of the operator's, which has no metrics of Prometheus.
const BESIDE: &str = "customMetrics.enabled=true";

#[test]
fn open_metrics_are_found_by_a_pod_monitor() -> Result<()> {
    let Some(chart) = Chart::rendered(&[MONITORS, BESIDE])? else { return Ok(()) };
    ensure!(chart.all("ServiceMonitor").is_empty(), "a ServiceMonitor without guarded metrics");
    let monitor = chart.named("PodMonitor", operator::RELEASE)?;
    let deployment = chart.named("Deployment", operator::RELEASE)?;
    let template = &deployment["spec"]["template"];
    ensure!(selects(monitor, template), "{} does not select {}", monitor["spec"]["selector"], template["metadata"]);
    let port = &monitor["spec"]["podMetricsEndpoints"][0]["port"];
    ensure!(container_ports(template).any(|found| found["name"] == *port), "pods have no port {port}");
    Ok(())
}

#[test]
fn guarded_metrics_are_found_by_a_service_monitor_that_trusts_them() -> Result<()> {
    let Some(chart) = Chart::rendered(&[MONITORS, GUARDED, BESIDE])? else { return Ok(()) };
    let monitor = chart.named("ServiceMonitor", operator::RELEASE)?;
    let endpoint = &monitor["spec"]["endpoints"][0];
    let port_of = |service: &Value| {
        let ports = service["spec"]["ports"].as_array()?;
        ports.iter().find(|port| port["name"] == endpoint["port"]).cloned()
    };
    let selected: Vec<_> = chart.all("Service").into_iter().filter(|found| selects(monitor, found)).collect();
    let scraped: Vec<_> = selected.iter().filter_map(|service| Some((service, port_of(service)?))).collect();
    let [(service, port)] = &scraped[..] else { anyhow::bail!("it scrapes {scraped:?}") };

    let template = &chart.named("Deployment", operator::RELEASE)?["spec"]["template"];
    let reached = container_ports(template).any(|found| found["name"] == port["targetPort"]);
    ensure!(reached && endpoint["scheme"] == "https", "pods have no port {}", port["targetPort"]);
    let tls = &endpoint["tlsConfig"];
    let name = service["metadata"]["name"].as_str().unwrap_or_default();
    ensure!(tls["serverName"] == format!("{name}.{}.svc", operator::NAMESPACE), "{tls} is not {name}");
    let authority = &tls["ca"]["secret"];
    let secret = chart.named("Secret", authority["name"].as_str().context("no authority")?)?;
    ensure!(secret["data"][authority["key"].as_str().unwrap_or_default()].is_string(), "the Secret has no {authority}");
    Ok(())
}

/// What the chart renders.
struct Chart(Vec<Value>);

impl Chart {
    /// `None` without a cluster, whose helm it takes.
    fn rendered(values: &[&str]) -> Result<Option<Chart>> {
        let Some(cluster) = prepared_cluster()? else { return Ok(None) };
        let set: Vec<&str> = values.iter().flat_map(|value| ["--set", value]).collect();
        let text = operator::template(&cluster, "windlass", operator::RELEASE, operator::NAMESPACE, &set)?;
        Ok(Some(Chart(operator::objects(&text)?)))
    }

    fn all(&self, kind: &str) -> Vec<&Value> {
        self.0.iter().filter(|object| object["kind"] == kind).collect()
    }

    fn named(&self, kind: &str, name: &str) -> Result<&Value> {
        let found = self.all(kind).into_iter().find(|object| object["metadata"]["name"] == name);
        found.with_context(|| format!("no {kind} {name}"))
    }
}

/// Whether an object has every label of the monitor's selector.
fn selects(monitor: &Value, object: &Value) -> bool {
    let wanted = monitor["spec"]["selector"]["matchLabels"].as_object();
    wanted.is_some_and(|labels| labels.iter().all(|(name, value)| object["metadata"]["labels"][name] == *value))
}

fn container_ports(template: &Value) -> impl Iterator<Item = &Value> {
    let containers = template["spec"]["containers"].as_array().into_iter().flatten();
    containers.flat_map(|container| container["ports"].as_array().into_iter().flatten())
}
