//! The leaves of the resource's spec, and a valid change for each of them.

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

use crate::{kwok, workspace};

/// Kubernetes' own types, each one leaf to us.
const EMBEDDED: [&str; 5] = ["affinity", "tolerations", "topologySpreadConstraints", "allowFrom", "nodeSelector"];
/// Maps of which every entry is alike.
const MAPS: [&str; 2] = ["limits", "requests"];

/// Every leaf of `spec` in the committed definition, as `engine.maxSequences`.
///
/// # Errors
/// When there is no definition.
pub fn all() -> Result<BTreeSet<String>> {
    let file = workspace::root().join("crds/inferenceservices.windlass.dev.yaml");
    let definition: Value = serde_yaml_ng::from_str(&std::fs::read_to_string(file)?)?;
    let spec = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let mut leaves = BTreeSet::new();
    of_schema(spec, "", &mut leaves);
    leaves.first().context("the definition has no fields")?;
    Ok(leaves)
}

fn of_schema(schema: &Value, path: &str, leaves: &mut BTreeSet<String>) {
    let schema = if schema["type"] == "array" { &schema["items"] } else { schema };
    let Some(properties) = schema["properties"].as_object().filter(|_| !is_leaf(path)) else {
        leaves.insert(path.to_owned());
        return;
    };
    properties.iter().for_each(|(name, schema)| of_schema(schema, &joined(path, name), leaves));
}

/// The leaves that a spec, or a part of one, sets.
pub fn of_value(value: &Value) -> BTreeSet<String> {
    let mut leaves = BTreeSet::new();
    collect(value, "", &mut leaves);
    leaves
}

fn collect(value: &Value, path: &str, leaves: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) if !is_leaf(path) => {
            fields.iter().for_each(|(name, value)| collect(value, &joined(path, name), leaves));
        }
        Value::Array(items) if !is_leaf(path) => items.iter().for_each(|item| collect(item, path, leaves)),
        _ => drop(leaves.insert(path.to_owned())),
    }
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn is_leaf(path: &str) -> bool {
    let last = path.rsplit('.').next().unwrap_or_default();
    EMBEDDED.contains(&last) || MAPS.contains(&last)
}

/// A JSON merge patch, applied.
pub fn merge(target: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in patch {
        match value {
            Value::Null => drop(target.as_object_mut().map(|fields| fields.remove(name))),
            value => merge(&mut target[name], value),
        }
    }
}

/// The patch that brings `spec` back after `patch`.
pub fn undone(patch: &Value, spec: &Value) -> Value {
    let fields = patch.as_object().cloned().unwrap_or_default();
    let back = |(name, value): (String, Value)| {
        let before = &spec[&name];
        let value = if value.is_object() && before.is_object() { undone(&value, before) } else { before.clone() };
        (name, value)
    };
    Value::Object(fields.into_iter().map(back).collect::<Map<_, _>>())
}

/// Changes that between them set every leaf; each is valid on a service of a claim on CPU, and finds a node of KWOK's.
pub fn changes() -> Vec<(&'static str, Value)> {
    let https = |more: Value| {
        let mut model = json!({"source": "https://models.example.com/m.gguf", "sha256": "0".repeat(64)});
        merge(&mut model, &more);
        json!({"model": model})
    };
    let target = |metric: &str| json!({"metric": metric, "percentile": 95, "milliseconds": 500});
    let builtin = |more: Value| {
        let mut scaling = json!({"mode": "Builtin", "maxReplicas": 3, "targets": [target("TimeToFirstToken")]});
        merge(&mut scaling, &more);
        json!({"replicas": 1, "autoscaling": scaling})
    };
    let toleration = json!([{"key": "a", "operator": "Exists"}]);
    vec![
        ("replicas", json!({"replicas": 2})),
        ("no replicas", json!({"replicas": 0})),
        ("revision", json!({"model": {"revision": "2"}})),
        ("another file", json!({"model": {"source": "pvc://models/m.gguf"}})),
        ("https", https(json!({}))),
        ("https with a secret", https(json!({"secretRef": {"name": "token"}}))),
        ("https with authorities", https(json!({"caConfigMapRef": {"name": "ca"}}))),
        ("https into a claim", https(json!({"cache": {"type": "PersistentVolumeClaim", "claimName": "models"}}))),
        ("https with a limit", https(json!({"cache": {"type": "EmptyDir", "sizeLimit": "1Gi"}}))),
        (
            "https into a node's volume",
            https(json!({"cache": {
                "type": "Node", "claimName": "models", "sizeLimit": "1Gi", "keepUnusedSeconds": 86_400,
            }})),
        ),
        ("names", json!({"model": {"servedNames": ["shared", "other"]}})),
        ("image", json!({"engine": {"image": "other:2"}})),
        ("quantization", json!({"engine": {"quantization": "Q4_1"}})),
        ("KV format", json!({"engine": {"kvCacheDataType": "BF16"}})),
        ("length", json!({"engine": {"maxModelTokens": 4096}})),
        ("sequences", json!({"engine": {"maxSequences": 8}})),
        ("flags", json!({"engine": {"extraArgs": ["--executor=sim", "--sim-step-us=5000"]}})),
        ("GPU", json!({"accelerator": {"type": "NvidiaGPU"}})),
        (
            "certain GPUs",
            json!({
                "accelerator": {"type": "NvidiaGPU", "nvidiaGPU": {"products": ["NVIDIA-H200"], "minMemory": "80Gi"}},
            }),
        ),
        ("a slice", json!({"accelerator": {"type": "NvidiaGPU", "nvidiaGPU": {"migProfile": "1g.10gb"}}})),
        ("several GPUs", json!({"accelerator": {"type": "NvidiaGPU"}, "parallelism": {"tensor": 2}})),
        ("limits", json!({"resources": {"limits": {"memory": "1Gi"}}})),
        ("requests", json!({"resources": {"requests": {"cpu": "20m"}}})),
        (
            "affinity",
            json!({"scheduling": {"affinity": {"nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}},
            ]}}}}),
        ),
        ("node labels", json!({"scheduling": {"nodeSelector": {"pool": "spot"}}})),
        ("priority", json!({"scheduling": {"priorityClassName": "system-cluster-critical"}})),
        ("runtime", json!({"scheduling": {"runtimeClassName": kwok::RUNTIME}})),
        (
            "spread",
            json!({"scheduling": {"topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"},
            ]}}),
        ),
        ("account", json!({"serviceAccountName": "default"})),
        ("pull secrets", json!({"imagePullSecrets": [{"name": "registry"}]})),
        ("keys", json!({"auth": {"apiKeysSecretRef": {"name": "keys"}}})),
        ("peers", json!({"network": {"allowFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}]}})),
        ("Builtin", builtin(json!({}))),
        ("Builtin with bounds", builtin(json!({"minReplicas": 2}))),
        ("Builtin with more targets", builtin(json!({"targets": [target("InterToken"), target("EndToEnd")]}))),
        ("Builtin by utilization", builtin(json!({"gpuUtilization": {"scaleUpPercent": 90, "scaleDownPercent": 20}}))),
        (
            "Builtin with a pace",
            builtin(json!({"behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 30, "maxStep": 2}, "scaleDown": {"stabilizationWindowSeconds": 60},
            }})),
        ),
        ("shadow", builtin(json!({"shadow": true}))),
        ("standby", builtin(json!({"standbyReplicas": 1}))),
        ("HPA", json!({"autoscaling": {"mode": "HPA", "maxReplicas": 3, "targets": [target("TimeToFirstToken")]}})),
        ("External", json!({"autoscaling": {"mode": "External"}})),
        (
            "spot first",
            json!({"replicas": 3, "spot": {"mode": "Prefer", "onDemandBase": 1, "maxPercentAboveBase": 50}}),
        ),
        (
            "spot alone",
            json!({"spot": {"mode": "Require", "nodeSelector": {"pool": "spot"}, "tolerations": toleration}}),
        ),
        ("no spot", json!({"spot": {"mode": "Never", "nodeSelector": {"pool": "spot"}}})),
        (
            "spot with a fallback",
            json!({"replicas": 2, "spot": {"mode": "Prefer", "onDemandBase": 1, "fallbackAfterSeconds": 3600}}),
        ),
        ("pace of rollouts", json!({"rollout": {"strategy": "Drain", "progressDeadlineSeconds": 120}})),
        ("restart", json!({"rollout": {"restartedAt": "2026-01-01T00:00:00Z"}})),
        ("paused", json!({"rollout": {"paused": false}})),
        ("history", json!({"rollout": {"revisionHistoryLimit": 3, "engineUpgrade": "Automatic"}})),
        ("pinned to nothing", json!({"rollout": {"pinnedRevision": "nothing"}})),
        ("drain", json!({"drainTimeoutSeconds": 61})),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_is_undone_field_by_field() {
        let spec = json!({"a": {"b": 1, "c": 2}, "d": 3});
        let patch = json!({"a": {"b": 7, "e": 8}, "f": {"g": 9}});
        let mut changed = spec.clone();
        merge(&mut changed, &patch);
        assert_eq!(changed, json!({"a": {"b": 7, "c": 2, "e": 8}, "d": 3, "f": {"g": 9}}));
        merge(&mut changed, &undone(&patch, &spec));
        assert_eq!(changed, spec);
    }

    #[test]
    fn leaves_are_named_by_their_path() {
        let spec = json!({"a": {"b": [{"c": 1}]}, "nodeSelector": {"x": "y"}, "d": ["e"]});
        assert_eq!(of_value(&spec).into_iter().collect::<Vec<_>>(), ["a.b.c", "d", "nodeSelector"]);
    }

    #[test]
    fn every_leaf_of_the_definition_has_a_change() {
        let changed: BTreeSet<String> = changes().iter().flat_map(|(_, patch)| of_value(patch)).collect();
        let missing: Vec<_> = all().expect("a definition").difference(&changed).cloned().collect();
        // Those of the spec that every change starts from; a claim, with which no pod finds a node without a driver; and
        // several nodes, which engines of KWOK's never tell that they have.
        let unchanged =
            ["scheduling.tolerations", "accelerator.nvidiaGPU.resourceClaimTemplateName", "parallelism.pipeline"];
        let is_known = |leaf: &String| unchanged.iter().any(|known| leaf.starts_with(*known));
        assert!(missing.iter().all(is_known), "{missing:?}");
    }
}
