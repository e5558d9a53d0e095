//! The rules across fields, evaluated here as an API server evaluates them. Each case breaks one rule.

use kube_cel::Validator;
use serde_json::{Value, json};

use crate::schema;

/// A complete resource with these specs merged over a minimal one.
fn resource(name: &str, spec: Value) -> Value {
    let mut whole = json!({"replicas": 1, "drainTimeoutSeconds": 300, "model": {"source": "pvc://models/a.gguf"}});
    for (field, value) in spec.as_object().expect("fields") {
        whole[field] = value.clone();
    }
    json!({
        "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "demo"}, "spec": whole,
    })
}

/// Messages of the rules that the resource breaks.
fn broken(resource: &Value) -> Vec<String> {
    match Validator::new().validate(&schema(), resource, None) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.into_vec().into_iter().map(|error| error.message).collect(),
    }
}

fn https(fields: Value) -> Value {
    let mut model = json!({"source": "https://host:8443/a.gguf?x=1", "sha256": "0".repeat(64)});
    for (field, value) in fields.as_object().expect("fields") {
        model[field] = value.clone();
    }
    json!({"model": model})
}

/// On a slice of a GPU, split over so many.
fn slice(fields: Value, tensor: i32) -> Value {
    let mut gpu = json!({"migProfile": "1g.10gb"});
    for (field, value) in fields.as_object().expect("fields") {
        gpu[field] = value.clone();
    }
    json!({"accelerator": {"type": "NvidiaGPU", "nvidiaGPU": gpu}, "parallelism": {"tensor": tensor}})
}

/// An accelerator whose GPUs are claimed.
fn claiming(fields: Value) -> Value {
    let mut gpu = json!({"resourceClaimTemplateName": "two-gpus"});
    for (field, value) in fields.as_object().expect("fields") {
        gpu[field] = value.clone();
    }
    json!({"type": "NvidiaGPU", "nvidiaGPU": gpu})
}

fn builtin(fields: Value) -> Value {
    let target = json!({"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500});
    let mut autoscaling = json!({"mode": "Builtin", "maxReplicas": 4, "targets": [target]});
    for (field, value) in fields.as_object().expect("fields") {
        autoscaling[field] = value.clone();
    }
    json!({"autoscaling": autoscaling})
}

#[test]
fn good_resources_break_no_rule() {
    let gpu = json!({"type": "NvidiaGPU", "nvidiaGPU": {"products": ["H200"], "minMemory": "80Gi"}});
    for spec in [
        json!({}),
        json!({"model": {"source": "pvc://my.claim/a/b-c/d.gguf"}}),
        json!({"model": {"source": "pvc://models/..hidden/a..b"}}),
        json!({"model": {"source": "pvc://models"}}),
        https(json!({})),
        json!({"model": {"source": "hf://org/name", "revision": "main", "secretRef": {"name": "a"}}}),
        json!({"model": {"source": "hf://org/na.me_1/folder/a.gguf", "cache": {"type": "EmptyDir"}}}),
        json!({"model": {"source": "s3://my-bucket/models/llama", "caConfigMapRef": {"name": "a"}}}),
        json!({"model": {"source": "gs://bucket"}}),
        json!({"model": {"source": "az://container/a.gguf"}}),
        json!({"model": {"source": "oci://registry.example:5000/team/llama:8b"}}),
        json!({"model": {"source": format!("oci://ghcr.io/team/llama@sha256:{}", "0".repeat(64))}}),
        https(json!({"source": "https://[::1]:65535/a.gguf"})),
        https(json!({"source": "https://host:443/a:70000"})),
        json!({"engine": {"extraArgs": ["--executor=sim", "--portable", "--max-model-lens=1"]}}),
        https(json!({"secretRef": {"name": "a"}, "caConfigMapRef": {"name": "b"}})),
        https(json!({"cache": {"type": "EmptyDir", "sizeLimit": "10Gi"}})),
        https(json!({"cache": {"type": "PersistentVolumeClaim", "claimName": "a"}})),
        https(json!({"cache": {"type": "PersistentVolumeClaim", "claimName": "a", "sizeLimit": "1Ti"}})),
        https(json!({"cache": {
            "type": "Node", "claimName": "a", "sizeLimit": "200Gi", "keepUnusedSeconds": 604_800,
        }})),
        json!({"parallelism": {"tensor": 1}}),
        json!({"accelerator": gpu, "parallelism": {"tensor": 4}}),
        json!({"parallelism": {"pipeline": 3}}),
        json!({"parallelism": {"pipeline": 2}, "accelerator": {"type": "CPU"}}),
        json!({"parallelism": {"tensor": 2, "pipeline": 2}, "accelerator": {"type": "NvidiaGPU"}}),
        json!({"accelerator": claiming(json!({})), "parallelism": {"tensor": 2}}),
        slice(json!({"products": ["H200"]}), 1),
        json!({"accelerator": {"type": "CPU"}, "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "1Gi"}}}),
        builtin(json!({})),
        builtin(json!({"minReplicas": 4, "gpuUtilization": {"scaleUpPercent": 31}})),
        json!({"autoscaling": {"mode": "Manual"}}),
        builtin(json!({"mode": "HPA", "gpuUtilization": {"scaleUpPercent": 70}})),
        json!({"rollout": {"pinnedRevision": "a-1", "revisionHistoryLimit": 0, "engineUpgrade": "Automatic"}}),
        json!({"engine": {"quantization": "INT4"}}),
        json!({"scheduling": {"nodeSelector": {"a/b": "", "c": "d_e.f-1"}}}),
        json!({"spot": {"mode": "Never", "nodeSelector": {"a": "b"}}}),
        json!({"spot": {"mode": "Prefer", "onDemandBase": 1, "maxPercentAboveBase": 50}}),
    ] {
        let resource = resource("llama", spec);
        assert_eq!(broken(&resource), Vec::<String>::new(), "{resource}");
    }
}

#[test]
fn each_bad_resource_breaks_the_rule_that_names_its_field() {
    let pvc = |field: &str, value: Value| json!({"model": {"source": "pvc://models/a.gguf", field: value}});
    let source = |source: &str| json!({"model": {"source": source}});
    let cases = [
        (source("ftp://host/a"), "spec.model.source"),
        (source("hf://org"), "spec.model.source"),
        (source("hf://org/"), "spec.model.source"),
        (source("hf://org/.."), "spec.model.source"),
        (source("hf://org/name@main"), "spec.model.source"),
        (source("s3://"), "spec.model.source"),
        (source("s3:///path"), "spec.model.source"),
        (source("s3://key:secret@bucket/path"), "spec.model.source"),
        (source("gs://bucket//a"), "spec.model.source"),
        (source("az://container/../a"), "spec.model.source"),
        (source("oci://registry"), "spec.model.source"),
        (source("oci://registry:70000/name"), "spec.model.source"),
        (source("oci://registry/name:"), "spec.model.source"),
        (source("oci://registry/name@sha256:00"), "spec.model.source"),
        (json!({"model": {"source": "hf://org/name", "sha256": "0".repeat(64)}}), "spec.model.sha256"),
        (source("pvc://"), "spec.model.source"),
        (source("pvc://models/../a"), "spec.model.source"),
        (source("pvc://models/./a"), "spec.model.source"),
        (source("pvc://models//a"), "spec.model.source"),
        (source("pvc://models/a b"), "spec.model.source"),
        (https(json!({"source": "https://host"})), "spec.model.source"),
        (https(json!({"source": "https://user:word@host/a"})), "spec.model.source"),
        (https(json!({"source": "https://host/a#b"})), "spec.model.source"),
        (https(json!({"source": "https://host:0/a"})), "spec.model.source"),
        (https(json!({"source": "https://host:65536/a"})), "spec.model.source"),
        (https(json!({"source": "https://host:port/a"})), "spec.model.source"),
        (https(json!({"source": "https://[::1/a"})), "spec.model.source"),
        (source("https://host/a"), "spec.model.sha256"),
        (pvc("sha256", json!("0".repeat(64))), "spec.model.sha256"),
        (pvc("secretRef", json!({"name": "a"})), "spec.model.secretRef"),
        (pvc("caConfigMapRef", json!({"name": "a"})), "spec.model.caConfigMapRef"),
        (pvc("cache", json!({"type": "EmptyDir"})), "spec.model.cache"),
        (https(json!({"cache": {"type": "PersistentVolumeClaim"}})), "spec.model.cache.claimName"),
        (https(json!({"cache": {"type": "EmptyDir", "claimName": "a"}})), "spec.model.cache.claimName"),
        (https(json!({"cache": {"type": "Node", "sizeLimit": "1Gi"}})), "spec.model.cache.claimName"),
        (https(json!({"cache": {"type": "Node", "claimName": "a"}})), "spec.model.cache.sizeLimit"),
        (
            https(json!({"cache": {"type": "EmptyDir", "keepUnusedSeconds": 86_400}})),
            "spec.model.cache.keepUnusedSeconds",
        ),
        (json!({"parallelism": {"tensor": 2}}), "spec.parallelism.tensor"),
        (json!({"parallelism": {"tensor": 2}, "accelerator": {"type": "CPU"}}), "spec.parallelism.tensor"),
        (json!({"accelerator": {"type": "CPU", "nvidiaGPU": {}}}), "spec.accelerator.nvidiaGPU"),
        (json!({"accelerator": claiming(json!({}))}), "spec.parallelism.tensor"),
        (
            json!({"accelerator": claiming(json!({"products": ["H200"]})), "parallelism": {"tensor": 1}}),
            "spec.accelerator.nvidiaGPU.resourceClaimTemplateName",
        ),
        (
            json!({"accelerator": claiming(json!({"minMemory": "1Gi"})), "parallelism": {"tensor": 1}}),
            "spec.accelerator.nvidiaGPU.resourceClaimTemplateName",
        ),
        (slice(json!({"minMemory": "1Gi"}), 1), "spec.accelerator.nvidiaGPU.migProfile"),
        (slice(json!({"resourceClaimTemplateName": "a"}), 1), "spec.accelerator.nvidiaGPU.migProfile"),
        (slice(json!({}), 2), "spec.parallelism.tensor"),
        (json!({"resources": {"requests": {"nvidia.com/gpu": "1"}}}), "spec.resources.requests"),
        (json!({"resources": {"limits": {"nvidia.com/mig-1g.5gb": "1"}}}), "spec.resources.limits"),
        (
            json!({"autoscaling": {"mode": "Builtin", "targets": builtin(json!({}))["autoscaling"]["targets"]}}),
            "spec.autoscaling.maxReplicas",
        ),
        (json!({"autoscaling": {"mode": "Builtin", "maxReplicas": 2}}), "spec.autoscaling.targets"),
        (builtin(json!({"minReplicas": 5})), "spec.autoscaling.minReplicas"),
        (json!({"autoscaling": {"mode": "HPA", "maxReplicas": 2}}), "spec.autoscaling.targets"),
        (builtin(json!({"mode": "HPA", "shadow": true})), "spec.autoscaling"),
        (builtin(json!({"mode": "HPA", "gpuUtilization": {"scaleDownPercent": 20}})), "spec.autoscaling"),
        (json!({"autoscaling": {"mode": "Manual", "maxReplicas": 2}}), "spec.autoscaling"),
        (
            builtin(json!({"gpuUtilization": {"scaleUpPercent": 30}})),
            "spec.autoscaling.gpuUtilization.scaleDownPercent",
        ),
        (json!({"spot": {"mode": "Never", "onDemandBase": 1}}), "spec.spot"),
        (json!({"spot": {"mode": "Prefer", "nodeSelector": {"a": "-b"}}}), "spec.spot.nodeSelector"),
        (json!({"scheduling": {"nodeSelector": {"a": "b", "c": "d e"}}}), "spec.scheduling.nodeSelector"),
    ];
    for (spec, field) in cases {
        let resource = resource("llama", spec);
        let found = broken(&resource);
        assert!(found.len() == 1 && found[0].starts_with(field), "{field}: {found:?} {resource}");
    }
}

#[test]
fn each_managed_flag_is_refused_in_both_spellings_with_its_field() {
    for managed in windlass_engine_contract::flags::MANAGED {
        for argument in [managed.flag.to_owned(), format!("{}=1", managed.flag)] {
            let found = broken(&resource("llama", json!({"engine": {"extraArgs": ["--seed=1", argument]}})));
            assert_eq!(found, [format!("spec.engine.extraArgs: {}", managed.refusal())]);
        }
    }
}

/// Whether an API server's regular expressions find `pattern` in `text`.
fn matches(pattern: &str, text: &str) -> bool {
    let rule = json!({"rule": format!("self.text.matches(r'{pattern}')"), "message": "no"});
    let schema = json!({
        "type": "object", "properties": {"text": {"type": "string"}}, "x-kubernetes-validations": [rule],
    });
    Validator::new().validate(&schema, &json!({"text": text}), None).is_ok()
}

#[test]
fn tolerations_and_amounts_are_bounded_by_what_kubernetes_takes() {
    let spec = schema()["properties"]["spec"]["properties"].clone();
    for list in [&spec["scheduling"]["properties"]["tolerations"], &spec["spot"]["properties"]["tolerations"]] {
        let toleration = &list["items"]["properties"];
        assert_eq!(toleration["operator"]["enum"], json!(["", "Exists", "Equal", "Lt", "Gt"]));
        assert_eq!(toleration["effect"]["enum"], json!(["", "NoSchedule", "PreferNoSchedule", "NoExecute"]));
    }
    let resources = &spec["resources"]["properties"];
    for amount in [&resources["requests"]["additionalProperties"], &resources["limits"]["additionalProperties"]] {
        assert_eq!(amount["minimum"].as_f64(), Some(0.0), "a number is held to no pattern");
    }
    let minimum = &spec["accelerator"]["properties"]["nvidiaGPU"]["properties"]["minMemory"];
    for amount in [minimum, &spec["model"]["properties"]["cache"]["properties"]["sizeLimit"]] {
        assert_eq!(amount["minimum"].as_f64(), Some(1.0), "{amount}");
        let takes = |text: &str| matches(amount["pattern"].as_str().expect("a pattern"), text);
        for (text, is_taken) in [
            ("80Gi", true),
            ("0.5Gi", true),
            ("+.01Gi", true),
            ("1e3", true),
            ("10.0", true),
            ("0", false),
            ("0.0Gi", false),
            ("0e9", false),
            ("-1Gi", false),
            ("Gi", false),
        ] {
            assert_eq!(takes(text), is_taken, "{text}");
        }
    }
}

#[test]
fn names_are_those_that_a_service_can_have() {
    for name in ["Llama", "3b", "a.b", "a-", &"a".repeat(51)] {
        let found = broken(&resource(name, json!({})));
        assert!(found.len() == 1 && found[0].starts_with("metadata.name"), "{name}: {found:?}");
    }
    assert_eq!(broken(&resource(&"a".repeat(50), json!({}))), Vec::<String>::new());
}

#[test]
fn every_rule_has_a_message_that_names_its_field() {
    fn walk(node: &Value, count: &mut usize) {
        for rule in node["x-kubernetes-validations"].as_array().into_iter().flatten() {
            let message = rule["message"].as_str().unwrap_or_default();
            assert!(message.starts_with("spec.") || message.starts_with("metadata."), "{rule}");
            *count += 1;
        }
        node["properties"].as_object().into_iter().flatten().for_each(|(_, property)| walk(property, count));
    }
    let mut count = 0;
    walk(&schema(), &mut count);
    assert!(count >= 20, "{count}");
}
