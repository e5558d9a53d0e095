//! Fixtures: short, chaining, real. Specs go through deserialization as users' specs do; [`Cluster`] does to objects
//! what an API server and the workload controllers do, as far as planning can see.

pub mod cluster;
pub mod restricted;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};
use windlass_engine_contract::fixture;
pub use windlass_engine_contract::fixture::{effective, idle as stats};
use windlass_engine_contract::inspection::Inspection;
use windlass_operator_api::InferenceService;

use crate::observed::Defaults;
use crate::validate::{ValidatedService, validate};

/// UID of the fixture service.
pub const UID: &str = "11111111-2222-3333-4444-555555555555";
/// An https source's checksum.
pub const SHA256: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A point in time, seconds since the epoch.
pub fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("in range")
}

/// What the operator gives to every service.
pub fn defaults() -> Defaults {
    Defaults {
        engine_image: "windlass-engine:1".into(),
        image_pull_policy: None,
        operator_namespace: Some("windlass".into()),
        operator_pod_labels: [("app".to_owned(), "windlass-operator".to_owned())].into(),
        monitoring_namespace: None,
        cluster_domain: "cluster.local".into(),
        scrape_active: Duration::from_secs(5),
        scrape_idle: Duration::from_secs(30),
        inspect_timeout: None,
    }
}

/// A minimal service: a file in a claim, on CPU.
pub fn service() -> ServiceBuilder {
    ServiceBuilder(json!({
        "apiVersion": "windlass.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "llama", "namespace": "demo", "uid": UID, "generation": 1},
        "spec": {"model": {"source": "pvc://models/llama.gguf"}},
    }))
}

/// A service in the making.
#[derive(Clone, Debug)]
pub struct ServiceBuilder(Value);

impl ServiceBuilder {
    /// Sets a field of the spec.
    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.0["spec"][field] = value;
        self
    }

    /// Sets a field of `spec.model`.
    pub fn model(mut self, field: &str, value: Value) -> Self {
        self.0["spec"]["model"][field] = value;
        self
    }

    /// An https source with its checksum.
    pub fn https(self) -> Self {
        self.model("source", json!("https://models.example:8443/llama.gguf?x=1")).model("sha256", json!(SHA256))
    }

    /// Mode Builtin between these bounds, with a target for the 95th percentile of the time to first token.
    pub fn builtin(self, min: i32, max: i32, milliseconds: i32) -> Self {
        let target = json!({"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": milliseconds});
        let bounds = json!({"mode": "Builtin", "minReplicas": min, "maxReplicas": max, "targets": [target]});
        self.with("autoscaling", bounds)
    }

    /// Sets a field of `spec.autoscaling`, after [`ServiceBuilder::builtin`].
    pub fn scaling(mut self, field: &str, value: Value) -> Self {
        self.0["spec"]["autoscaling"][field] = value;
        self
    }

    /// So many replicas to spare.
    pub fn standby(self, replicas: i32) -> Self {
        self.scaling("standbyReplicas", json!(replicas))
    }

    /// Sets the name.
    pub fn named(mut self, name: &str) -> Self {
        self.0["metadata"]["name"] = json!(name);
        self
    }

    /// The service.
    pub fn build(self) -> InferenceService {
        serde_json::from_value(self.0).expect("a service")
    }

    /// The service, validated.
    pub fn valid(self) -> ValidatedService {
        validate(&self.build()).expect("valid")
    }
}

/// A node with so many GPUs of so many MiB, labelled as feature discovery does, and 64 GiB of its own.
pub fn gpu_node(product: &str, mebibytes: u64, count: u32) -> Arc<Node> {
    let node = json!({
        "metadata": {
            "name": format!("{product}-{count}").to_lowercase(),
            "labels": {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": mebibytes.to_string()},
        },
        "status": {"allocatable": {"nvidia.com/gpu": count.to_string(), "memory": "64Gi"}},
    });
    Arc::new(serde_json::from_value(node).expect("a node"))
}

/// What the header of Llama-3.1-8B in bf16 says: 128 KiB of KV cache a token, 15.0 GiB of weights.
pub fn llama_8b() -> Inspection {
    Inspection {
        shape: fixture::llama_8b(),
        kv_bytes_per_token: 131_072,
        weight_type: "bf16".into(),
        int8_bytes: Some(8_532_152_576),
        fp8_bytes: Some(8_532_152_576),
        int4_bytes: Some(5_480_000_000),
        gpu_bytes: None,
        revision: None,
    }
}
