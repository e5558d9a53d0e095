//! Fixtures: short, chaining, real. Specs go through deserialization as users' specs do; [`Cluster`] does to objects
//! what an API server and the workload controllers do, as far as planning can see.

pub mod cluster;
pub mod restricted;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};
use windlass_engine_contract::inspection::Inspection;
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::stats::{EffectiveConfig, Histogram, Phase, StartPhases, Stats};
use windlass_operator_api::InferenceService;

use crate::observed::Defaults;

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

    /// Sets the name.
    pub fn named(mut self, name: &str) -> Self {
        self.0["metadata"]["name"] = json!(name);
        self
    }

    /// The service.
    pub fn build(self) -> InferenceService {
        serde_json::from_value(self.0).expect("a service")
    }
}

/// What an idle engine says, a thousand seconds after its start.
pub fn stats() -> Stats {
    Stats {
        uptime_seconds: 1000.0,
        phase: Phase::Ready,
        simulated: false,
        running: 0,
        waiting: 0,
        oldest_queue_age_seconds: 0.0,
        queued_tokens: 0,
        remaining_tokens: 0,
        kv_usage: 0.0,
        cached_blocks: 0,
        utilization: Some(0.0),
        finished: 0,
        rejected: 0,
        prompt_tokens: 0,
        generation_tokens: 0,
        time_to_first_token: Histogram::default(),
        inter_token: Histogram::default(),
        end_to_end: Histogram::default(),
        effective: Some(effective()),
        start: Some(StartPhases { download_seconds: 0.0, load_seconds: 0.25, warm_seconds: 0.5 }),
        fingerprint: None,
    }
}

/// What an engine built for [`service`].
pub fn effective() -> EffectiveConfig {
    EffectiveConfig {
        device: "cpu".into(),
        tensor_parallel: 1,
        quantization: "q4_1".into(),
        kv_cache_data_type: "bf16".into(),
        max_model_tokens: 4096,
        max_sequences: 64,
        kv_blocks: 1000,
        block_tokens: 16,
        served_names: vec!["llama".into()],
        kernels: "avx2".into(),
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
        shape: ModelShape {
            architecture: "llama".into(),
            layers: 32,
            hidden: 4096,
            feed_forward: 14_336,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocabulary: 128_256,
            context_tokens: 131_072,
            weight_bytes: 16_060_522_496,
        },
        kv_bytes_per_token: 131_072,
        weight_type: "bf16".into(),
        int8_bytes: Some(8_532_152_576),
        int4_bytes: Some(5_480_000_000),
        revision: None,
    }
}
