//! What the operator holds of a service and of a pod, by resident memory:
//! `cargo run --release -p windlass-operator-core --example held_bytes`.
//!
//! Objects are parsed from what an API server answers, so many of each kind that pages of memory do not blur a figure.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use windlass_engine_contract::fixture;
use windlass_engine_contract::stats::Stats;
use windlass_operator_api::InferenceService;
use windlass_operator_core::observed::{Defaults, Observed};
use windlass_operator_core::plan;
use windlass_operator_core::plan::{Object, Step};
use windlass_operator_core::pod::Pod;
use windlass_operator_core::window::LoadWindow;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Pods of a service.
const PODS: usize = 10;
/// Objects of one kind.
const OBJECTS: usize = 10_000;

fn main() {
    let service = service();
    let children = children(&service);
    let template = children.iter().find_map(|child| child.pointer("/spec/template")).expect("a workload").clone();
    let pod = pod(&template);
    tell::<Pod>("pod", &pod);
    readings("readings of a pod, idle", &|_| fixture::idle());
    readings("readings of a pod with traffic", &busy);
    tell::<InferenceService>("InferenceService", &serde_json::to_value(&service).expect("JSON"));
    for child in &children {
        tell_kind(child);
    }
}

/// Prints what one object of these takes once it is parsed.
fn tell<K: DeserializeOwned>(what: &str, object: &Value) {
    let text = object.to_string();
    let each = resident_each(|_| Arc::new(serde_json::from_str::<K>(&text).expect("an object")));
    println!("{what:32} {each:6} bytes, {:6} as JSON, {:5} the type itself", text.len(), size_of::<K>());
}

fn tell_kind(child: &Value) {
    use k8s_openapi::api::{apps::v1 as apps, core::v1 as core, networking::v1 as networking, policy::v1 as policy};
    match child["kind"].as_str().unwrap_or_default() {
        kind @ "Deployment" => tell::<apps::Deployment>(kind, child),
        kind @ "ControllerRevision" => tell::<apps::ControllerRevision>(kind, child),
        kind @ "Service" => tell::<core::Service>(kind, child),
        kind @ "ServiceAccount" => tell::<core::ServiceAccount>(kind, child),
        kind @ "NetworkPolicy" => tell::<networking::NetworkPolicy>(kind, child),
        kind @ "PodDisruptionBudget" => tell::<policy::PodDisruptionBudget>(kind, child),
        kind => panic!("a {kind}"),
    }
}

/// Prints what two minutes of readings of one pod take.
fn readings(what: &str, stats: &dyn Fn(i64) -> Stats) {
    let each = resident_each(|_| {
        let mut window = LoadWindow::default();
        for pod in 0..PODS {
            for second in (0..=120).step_by(5) {
                let at = Timestamp::from_second(second).expect("in range");
                window.record(&format!("llama-6d5f7c9b8-{pod:05}"), at, stats(second));
            }
        }
        window
    });
    println!("{what:32} {:6} bytes", each / PODS);
}

fn busy(second: i64) -> Stats {
    let mut stats = fixture::idle();
    stats.uptime_seconds += second as f64;
    for histogram in [&mut stats.time_to_first_token, &mut stats.inter_token, &mut stats.end_to_end] {
        (0..second).for_each(|_| histogram.observe(100.0));
    }
    stats
}

/// Growth of resident memory for each of [`OBJECTS`], bytes. They are not given back: what follows would grow into their
/// place.
fn resident_each<T>(make: impl Fn(usize) -> T) -> usize {
    let before = resident();
    let held: Vec<T> = (0..OBJECTS).map(make).collect();
    let grown = resident().saturating_sub(before);
    std::mem::forget(held);
    grown / OBJECTS
}

fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") * 1024
}

fn service() -> InferenceService {
    let condition = |kind: &str| {
        json!({
            "type": kind, "status": "True", "reason": "Serving", "observedGeneration": 1,
            "message": "10 of 10 replicas serve what the spec asks for", "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    };
    let kinds = ["Ready", "Fits", "ScalingActive", "Progressing", "Reconciling", "Stalled"];
    let service = json!({
        "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
        "metadata": metadata("llama"),
        "spec": {
            "replicas": PODS,
            "model": {"source": "https://host/llama.gguf", "sha256": "0".repeat(64)},
            "resources": {"requests": {"cpu": "0.5"}},
        },
        "status": {"conditions": kinds.map(condition)},
    });
    serde_json::from_value(service).expect("a service")
}

fn metadata(name: &str) -> Value {
    json!({
        "name": name, "namespace": "demo", "uid": "11111111-2222-3333-4444-555555555555", "generation": 1,
        "resourceVersion": "123456", "creationTimestamp": "2026-01-01T00:00:00Z",
    })
}

/// What the first plan makes, each as the API server answers it.
fn children(service: &InferenceService) -> Vec<Value> {
    let defaults = Defaults {
        engine_image: "registry.example/windlass-engine:1.0.0".into(),
        image_pull_policy: None,
        operator_namespace: Some("windlass".into()),
        operator_pod_labels: [("app.kubernetes.io/name".to_owned(), "windlass-operator".to_owned())].into(),
        monitoring_namespace: None,
        cluster_domain: "cluster.local".into(),
        scrape_active: Duration::from_secs(5),
        scrape_idle: Duration::from_secs(30),
        inspect_timeout: None,
    };
    let steps = plan(service, &Observed::default(), &defaults, Timestamp::UNIX_EPOCH).steps;
    steps.iter().map(answered).collect()
}

fn answered(step: &Step) -> Value {
    match step {
        Step::Apply(Object::ServiceAccount(object)) => stamped(object),
        Step::Apply(Object::Service(object)) => stamped(object),
        Step::Apply(Object::NetworkPolicy(object)) => stamped(object),
        Step::Apply(Object::ControllerRevision(object)) => stamped(object),
        Step::Apply(Object::PodDisruptionBudget(object)) => stamped(object),
        Step::Apply(Object::Deployment(object)) => stamped(object.as_ref()),
        other => panic!("a first plan only applies: {other:?}"),
    }
}

fn stamped(object: &impl Serialize) -> Value {
    let mut object = serde_json::to_value(object).expect("JSON");
    for (field, value) in metadata("").as_object().expect("an object") {
        if field != "name" {
            object["metadata"][field] = value.clone();
        }
    }
    object
}

/// A pod of this template that serves.
fn pod(template: &Value) -> Value {
    let mut metadata = stamped(template)["metadata"].clone();
    metadata["name"] = json!("llama-6d5f7c9b8-x2x4z");
    metadata["generateName"] = json!("llama-6d5f7c9b8-");
    metadata["labels"]["pod-template-hash"] = json!("6d5f7c9b8");
    metadata["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "llama-6d5f7c9b8", "controller": true,
        "uid": "11111111-2222-3333-4444-555555555555", "blockOwnerDeletion": true,
    }]);
    metadata["managedFields"] = json!([
        {"manager": "kube-controller-manager", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
         "fieldsV1": {"f:metadata": {"f:labels": {".": {}, "f:app": {}}}, "f:spec": {"f:containers": {}}}},
        {"manager": "kubelet", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
         "fieldsV1": {"f:status": {"f:conditions": {}, "f:containerStatuses": {}, "f:phase": {}, "f:podIP": {}}}},
    ]);
    let mut spec = template["spec"].clone();
    spec["nodeName"] = json!("node-1.eu-central-1.compute.internal");
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status()})
}

fn status() -> Value {
    let since = "2026-01-01T00:00:09Z";
    let condition = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": since});
    let kinds = ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"];
    let container = |name: &str, state: Value| {
        json!({
            "name": name, "image": "registry.example/windlass-engine:1.0.0", "ready": true, "started": true,
            "imageID": format!("registry.example/windlass-engine@sha256:{}", "0".repeat(64)), "restartCount": 0,
            "containerID": format!("containerd://{}", "0".repeat(64)), "state": state, "lastState": {},
            "resources": {"requests": {"cpu": "500m"}},
        })
    };
    let fetched =
        json!({"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": since, "finishedAt": since}});
    json!({
        "phase": "Running", "podIP": "10.0.0.123", "podIPs": [{"ip": "10.0.0.123"}], "hostIP": "10.1.0.7",
        "hostIPs": [{"ip": "10.1.0.7"}], "qosClass": "Burstable", "startTime": since,
        "conditions": kinds.map(condition),
        "initContainerStatuses": [container("fetch", fetched)],
        "containerStatuses": [container("engine", json!({"running": {"startedAt": since}}))],
    })
}
