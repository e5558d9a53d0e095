//! Specs that cannot be served are told by field; nothing is touched.

use serde_json::json;

use crate::testing::cluster::Cluster;
use crate::testing::{SHA256, ServiceBuilder, service};
use crate::validate::validate;

fn refusals(spec: ServiceBuilder) -> Vec<String> {
    validate(&spec.build()).expect_err("refused").iter().map(ToString::to_string).collect()
}

#[test]
fn each_refusal_names_its_field() {
    let gpu = json!({"type": "NvidiaGPU"});
    let slice = |profile: &str, tensor: i32| {
        let slice = json!({"type": "NvidiaGPU", "nvidiaGPU": {"migProfile": profile}});
        service().with("accelerator", slice).with("parallelism", json!({"tensor": tensor}))
    };
    let both = json!({"type": "NvidiaGPU", "nvidiaGPU": {"migProfile": "1g.10gb", "resourceClaimTemplateName": "a"}});
    let cases: Vec<(ServiceBuilder, &str)> = vec![
        (service().named("Llama"), "metadata.name"),
        (service().named("3b"), "metadata.name"),
        (service().named(&"a".repeat(51)), "metadata.name"),
        (service().model("source", json!("models/llama.gguf")), "spec.model.source"),
        (service().model("source", json!("hf://a")), "spec.model.source"),
        (service().model("source", json!("hf://a/../b")), "spec.model.source"),
        (service().model("source", json!("s3://")), "spec.model.source"),
        (service().model("source", json!("gs://bucket/./a")), "spec.model.source"),
        (service().model("source", json!("oci://registry")), "spec.model.source"),
        (service().model("source", json!("oci://registry:0/name")), "spec.model.source"),
        (service().model("source", json!("hf://a/b")).model("sha256", json!(SHA256)), "spec.model.sha256"),
        (service().model("source", json!("pvc://")), "spec.model.source"),
        (service().model("source", json!("pvc://a/../b")), "spec.model.source"),
        (service().model("source", json!("pvc://a//b")), "spec.model.source"),
        (service().https().model("source", json!("https://user:secret@host/a")), "spec.model.source"),
        (service().https().model("source", json!("https://user@host/a")), "spec.model.source"),
        (service().https().model("source", json!("https://host")), "spec.model.source"),
        (service().https().model("source", json!("https://host:0/a")), "spec.model.source"),
        (service().model("source", json!("https://host/a")), "spec.model.sha256"),
        (service().https().model("sha256", json!("abc")), "spec.model.sha256"),
        (service().model("sha256", json!(SHA256)), "spec.model.sha256"),
        (service().model("secretRef", json!({"name": "a"})), "spec.model.secretRef"),
        (service().model("caConfigMapRef", json!({"name": "a"})), "spec.model.caConfigMapRef"),
        (service().model("cache", json!({"type": "EmptyDir"})), "spec.model.cache"),
        (service().https().model("cache", json!({"type": "PersistentVolumeClaim"})), "spec.model.cache.claimName"),
        (service().https().model("cache", json!({"type": "EmptyDir", "claimName": "a"})), "spec.model.cache.claimName"),
        (service().https().model("cache", json!({"type": "Node", "sizeLimit": "1Gi"})), "spec.model.cache.claimName"),
        (service().https().model("cache", json!({"type": "Node", "claimName": "a"})), "spec.model.cache.sizeLimit"),
        (
            service().https().model("cache", json!({"type": "Node", "claimName": "a", "sizeLimit": "0"})),
            "spec.model.cache.sizeLimit",
        ),
        (
            service().https().model("cache", json!({"type": "EmptyDir", "keepUnusedSeconds": 86_400})),
            "spec.model.cache.keepUnusedSeconds",
        ),
        (
            service()
                .https()
                .model("cache", json!({"type": "PersistentVolumeClaim", "claimName": "a", "keepUnusedSeconds": 60})),
            "spec.model.cache.keepUnusedSeconds",
        ),
        (slice("1g.10", 1), "spec.accelerator.nvidiaGPU.migProfile"),
        (slice("1g.10gb", 2), "spec.accelerator.nvidiaGPU.migProfile"),
        (slice("1g.10gb", 1).with("accelerator", both), "spec.accelerator.nvidiaGPU.migProfile"),
        (service().with("engine", json!({"extraArgs": ["--port=9"]})), "spec.engine.extraArgs"),
        (service().with("engine", json!({"maxModelTokens": 0})), "spec.engine.maxModelTokens"),
        (service().with("parallelism", json!({"tensor": 2})), "spec.parallelism.tensor"),
        (
            service().with("accelerator", gpu.clone()).with("parallelism", json!({"tensor": 17})),
            "spec.parallelism.tensor",
        ),
        (service().with("accelerator", json!({"type": "CPU", "nvidiaGPU": {}})), "spec.accelerator.nvidiaGPU"),
        (
            service().with("accelerator", json!({"type": "NvidiaGPU", "nvidiaGPU": {"minMemory": "much"}})),
            "spec.accelerator.nvidiaGPU.minMemory",
        ),
        (service().with("parallelism", json!({"pipeline": 17})), "spec.parallelism.pipeline"),
        (service().with("resources", json!({"limits": {"nvidia.com/gpu": "1"}})), "spec.resources.limits"),
        (service().with("resources", json!({"requests": {"nvidia.com/gpu": "1"}})), "spec.resources.requests"),
        (
            service().with("resources", json!({"requests": {"memory": "2Gi"}, "limits": {"memory": "2G"}})),
            "spec.resources.requests",
        ),
        (service().with("replicas", json!(-1)), "spec.replicas"),
        (service().with("drainTimeoutSeconds", json!(-1)), "spec.drainTimeoutSeconds"),
        (service().with("autoscaling", json!({"mode": "Builtin"})), "spec.autoscaling.maxReplicas"),
        (service().with("autoscaling", json!({"mode": "Builtin", "maxReplicas": 2})), "spec.autoscaling.targets"),
        (service().builtin(3, 2, 500), "spec.autoscaling.minReplicas"),
        (service().builtin(0, 2, 500), "spec.autoscaling.minReplicas"),
        (service().builtin(1, 2, 0), "spec.autoscaling.targets[].milliseconds"),
        (
            service()
                .builtin(1, 2, 500)
                .scaling("gpuUtilization", json!({"scaleUpPercent": 50, "scaleDownPercent": 50})),
            "spec.autoscaling.gpuUtilization.scaleDownPercent",
        ),
    ];
    for (spec, field) in cases {
        let found = refusals(spec);
        assert!(found.len() == 1 && found[0].starts_with(field), "{field}: {found:?}");
    }
}

#[test]
fn a_managed_flag_is_refused_with_the_field_that_owns_it() {
    let found = refusals(service().with("engine", json!({"extraArgs": ["--max-model-len=9"]})));
    assert!(found[0].contains("spec.engine.maxModelTokens"), "{found:?}");
}

#[test]
fn all_refusals_are_told_at_once() {
    let spec = service().model("source", json!("ftp://a")).with("parallelism", json!({"tensor": 2}));
    assert_eq!(refusals(spec).len(), 2);
}

#[test]
fn a_refused_edit_leaves_the_pods_as_they_are_and_says_so() {
    let mut cluster = Cluster::serving(service().build());
    cluster.edit(service().with("parallelism", json!({"tensor": 2})).build());
    assert_eq!(cluster.reconcile().steps, vec![]);
    assert_eq!(cluster.condition("Stalled"), ("True".into(), "InvalidSpec".into()));
    assert_eq!(cluster.condition("Ready"), ("False".into(), "InvalidSpec".into()));
    assert!(cluster.message("Ready").starts_with("spec.parallelism.tensor"));
    cluster.edit(service().build());
    cluster.converge();
    assert_eq!(cluster.condition("Ready").0, "True");
    assert_eq!(cluster.condition("Stalled").0, "False");
}

#[test]
fn an_object_of_somebody_else_s_is_never_overwritten() {
    let mut cluster = Cluster::new(service().build());
    let mut stranger = k8s_openapi::api::core::v1::Service::default();
    stranger.metadata.name = Some("llama".into());
    cluster.observed.services.push(stranger.into());
    assert_eq!(cluster.reconcile().steps, vec![]);
    assert_eq!(cluster.condition("Ready"), ("False".into(), "NameTaken".into()));
    assert!(cluster.message("Ready").contains("Service llama"));
}
