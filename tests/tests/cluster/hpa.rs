//! Mode HPA with the cluster's own controller: without a metrics API it says so, with ours it scales the service.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use windlass_tests::chat::{self, Client};
use windlass_tests::cluster::Cluster;
use windlass_tests::load;
use windlass_tests::namespace::{Namespace, skip, with_namespace};
use windlass_tests::operator::{self, Installation};
use windlass_tests::service::{self, Service, pod_name};
use windlass_tests::wait::{self, Look};

use crate::secured::Secured;

const PATIENCE: Duration = Duration::from_secs(120);
const CUSTOM_METRICS: &str = "windlass-custom-metrics";
/// Where the operator's pods serve them.
const PORT: u16 = 6443;
const METRICS: &str = "/apis/custom.metrics.k8s.io/v1beta2";

#[test]
fn an_autoscaler_of_the_cluster_scales_by_our_metrics() -> Result<()> {
    with_namespace("hpa", |namespace| {
        let cluster = namespace.cluster();
        if !cluster.is_own() {
            return skip("the metrics API of this cluster is not ours to serve");
        }
        let service = Service::apply(namespace, "scaled", &spec())?;
        service.wait_condition("ScalingActive", "False", Some("MetricsAPIMissing"), PATIENCE)?;

        let installation = Installation::of(cluster)?;
        // A second replica of the operator, which follows.
        let scaled = installation
            .upgrade(&["customMetrics.enabled=true", "replicas=2"])
            .and_then(|()| scales(&service, namespace));
        // Whatever came of it, the operator is as the other tests know it.
        installation.restore()?;
        scaled
    })
}

fn scales(service: &Service<'_>, namespace: &Namespace) -> Result<()> {
    let kubectl = namespace.cluster().kubectl();
    wait::until("the API server finds the metrics", PATIENCE, || {
        let answer = kubectl.run(&["get", "--raw", METRICS]);
        Ok(answer.map_or_else(|error| Look::NotYet(format!("{error:#}")), |_| Look::Done(())))
    })?;
    service.wait_condition("ScalingActive", "True", Some("HPA"), PATIENCE)?;
    let reach = service.reach()?;
    // A token every 50 ms against a target of 20: the autoscaler asks for more whatever it adds.
    let requests = (0..8).map(|n| chat::request("scaled", &format!("Stream {n}"), 1200)).collect();
    let client = Client::unpooled(reach.url());
    let streams = std::thread::spawn(move || load::together(&client, requests));
    wait::until("the autoscaler has set spec.replicas", PATIENCE, || {
        let replicas = service.read()?.spec.replicas;
        Ok(Look::when(replicas > 1, (), format!("{replicas}")))
    })?;
    let path = format!(
        "{METRICS}/namespaces/{}/inferenceservices.windlass.dev/scaled/windlass_inter_token_p95_milliseconds",
        namespace.name()
    );
    let list: Value = serde_json::from_str(&kubectl.run(&["get", "--raw", &path])?)?;
    ensure!(list["items"][0]["describedObject"]["name"] == "scaled", "{list}");
    leader_and_follower_answer(namespace.cluster(), &path)?;
    drop(streams);
    service.patch(&json!({"spec": {"autoscaling": null}}))?;
    wait::until("the autoscaler goes with the mode", PATIENCE, || {
        let left: Vec<HorizontalPodAutoscaler> = namespace.list(&["get", "horizontalpodautoscalers"])?;
        Ok(Look::when(left.is_empty(), (), "it is still there"))
    })
}

/// Asks each replica of the operator as the API server asks the one that its Service leads to.
fn leader_and_follower_answer(cluster: &Cluster, path: &str) -> Result<()> {
    let client = Secured::trusting(cluster, CUSTOM_METRICS, cluster.front_proxy().as_deref())?;
    let leader = operator::leader(cluster)?;
    let mut pods = operator::pods(cluster)?;
    pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
    ensure!(pods.len() == 2 && pods.iter().any(|pod| pod_name(pod) == leader), "{leader} does not lead two");
    for pod in &pods {
        let role = if pod_name(pod) == leader { "the leader" } else { "the follower" };
        let address = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).context("no address")?;
        let address = SocketAddr::new(address.parse()?, PORT);
        wait::until(&format!("{role} answers"), PATIENCE, || {
            let answer = client.get(address, path, None)?;
            let has_value = answer.starts_with("HTTP/1.1 200 ") && answer.contains("\"name\":\"scaled\"");
            Ok(Look::when(has_value, (), answer))
        })?;
    }
    Ok(())
}

fn spec() -> Value {
    let mut spec = service::simulated(&["--sim-step-us=50000", "--sim-mean-answer-tokens=0"]);
    let target = json!({"metric": "InterToken", "percentile": 95, "milliseconds": 20});
    spec["autoscaling"] = json!({"mode": "HPA", "minReplicas": 1, "maxReplicas": 3, "targets": [target]});
    spec
}
