//! A resource that cannot work is refused when it is applied, with the field's name in the message.

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};
use windlass_tests::namespace::with_namespace;
use windlass_tests::service::{self, Service};

#[test]
fn a_bad_resource_is_refused_with_its_field() -> Result<()> {
    let checksum = "0".repeat(64);
    let cases: [(&str, Value, &str); 15] = [
        (
            "no source",
            json!({"model": {}}),
            "missing required field \"source\" in dev.windlass.v1alpha1.InferenceService.spec.model",
        ),
        ("unknown scheme", json!({"model": {"source": "ftp://host/model.gguf"}}), "spec.model.source"),
        ("leaves the claim", json!({"model": {"source": "pvc://models/../etc"}}), "spec.model.source"),
        ("https without checksum", json!({"model": {"source": "https://host/model.gguf"}}), "spec.model.sha256"),
        (
            "checksum without https",
            json!({"model": {"source": "pvc://models/m", "sha256": checksum}}),
            "spec.model.sha256",
        ),
        ("unknown field", with("replica", json!(2)), "unknown field \"replica\""),
        ("negative replicas", with("replicas", json!(-1)), "spec.replicas"),
        ("tensor parallel on CPU", with("parallelism", json!({"tensor": 2})), "spec.parallelism.tensor"),
        ("GPUs by hand", with("resources", json!({"limits": {"nvidia.com/gpu": "1"}})), "spec.resources.limits"),
        ("Builtin without bounds", with("autoscaling", json!({"mode": "Builtin"})), "spec.autoscaling.maxReplicas"),
        ("unknown quantization", with("engine", json!({"quantization": "Q9"})), "spec.engine.quantization"),
        ("a field's flag", with("engine", json!({"extraArgs": ["--max-model-len=9"]})), "spec.engine.maxModelTokens"),
        ("a fixed flag", with("engine", json!({"extraArgs": ["--port", "9"]})), "spec.engine.extraArgs: --port"),
        (
            "a port that is none",
            json!({"model": {"source": "https://host:70000/m", "sha256": checksum}}),
            "spec.model.source",
        ),
        ("drain without end", with("drainTimeoutSeconds", json!(1_000_000)), "spec.drainTimeoutSeconds"),
    ];
    with_namespace("refused", |namespace| {
        for (case, spec, field) in &cases {
            match Service::apply(namespace, "bad", spec) {
                Ok(_) => bail!("{case}: accepted"),
                Err(error) => ensure!(format!("{error:#}").contains(field), "{case}: no {field} in: {error:#}"),
            }
        }
        Ok(())
    })
}

/// A good spec with one top-level field replaced.
fn with(field: &str, value: Value) -> Value {
    let mut spec = service::simulated(&[]);
    spec[field] = value;
    spec
}
