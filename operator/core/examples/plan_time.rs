//! How long planning a service at rest takes: `cargo run --release -p windlass-operator-core --example plan_time`.
//!
//! A thousand services of ten pods, looked at every five minutes when nothing happens, cost 1000 / 300 plans a second.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::json;
use windlass_operator_api::InferenceService;
use windlass_operator_core::observed::{Defaults, Observed};
use windlass_operator_core::plan;
use windlass_operator_core::plan::{Object, Step};
use windlass_operator_core::pod::Pod;

const PODS: usize = 10;
const ROUNDS: u32 = 2000;

fn main() {
    let service = service();
    let observed = at_rest(&service);
    let now = Timestamp::UNIX_EPOCH;
    assert_eq!(plan(&service, &observed, &defaults(), now).steps, vec![], "not at rest");
    let start = Instant::now();
    for _ in 0..ROUNDS {
        std::hint::black_box(plan(&service, std::hint::black_box(&observed), &defaults(), now));
    }
    let each = start.elapsed() / ROUNDS;
    println!("{each:?} to plan a service of {PODS} pods at rest");
}

fn service() -> InferenceService {
    let service = json!({
        "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
        "metadata": {"name": "llama", "namespace": "demo", "uid": "u", "generation": 1},
        "spec": {
            "replicas": PODS,
            "model": {"source": "https://host/llama.gguf", "sha256": "0".repeat(64)},
            "resources": {"requests": {"cpu": "0.5"}},
        },
    });
    serde_json::from_value(service).unwrap_or_else(|error| panic!("{error}"))
}

fn defaults() -> Defaults {
    Defaults {
        engine_image: "engine:1".into(),
        image_pull_policy: None,
        operator_namespace: Some("windlass".into()),
        operator_pod_labels: Default::default(),
        monitoring_namespace: None,
        cluster_domain: "cluster.local".into(),
        scrape_active: Duration::from_secs(5),
        scrape_idle: Duration::from_secs(30),
        inspect_timeout: None,
    }
}

/// What the first plan makes, and pods of its template.
fn at_rest(service: &InferenceService) -> Observed {
    let mut observed = Observed::default();
    for step in plan(service, &observed, &defaults(), Timestamp::UNIX_EPOCH).steps {
        match step {
            Step::Apply(Object::ServiceAccount(object)) => observed.service_accounts.push(Arc::new(object)),
            Step::Apply(Object::Service(object)) => observed.services.push(Arc::new(object)),
            Step::Apply(Object::NetworkPolicy(object)) => observed.network_policies.push(Arc::new(object)),
            Step::Apply(Object::ControllerRevision(object)) => observed.revisions.push(Arc::new(object)),
            Step::Apply(Object::PodDisruptionBudget(object)) => observed.disruption_budgets.push(Arc::new(object)),
            Step::Apply(Object::Deployment(object)) => observed.deployments.push(Arc::new(*object)),
            other => panic!("a first plan only applies: {other:?}"),
        }
    }
    let template = observed.deployments[0].spec.clone().unwrap_or_default().template;
    observed.pods = (0..PODS)
        .map(|index| {
            let mut pod = Pod { metadata: template.metadata.clone().unwrap_or_default(), ..Pod::default() };
            pod.metadata.name = Some(format!("llama-{index}"));
            Arc::new(pod)
        })
        .collect();
    observed
}
