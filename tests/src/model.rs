//! The model that everything runs on: SmolLM2-135M-Instruct, four bits a weight. `tests/setup` fetches and checks it.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::namespace::Namespace;
use crate::wait::{self, Look};
use crate::{operator, workspace};

/// Name of the file.
pub const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// SHA-256 of the file.
pub const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
/// Claim that holds the file in a namespace that was given it.
pub const CLAIM: &str = "models";
/// `spec.model.source` of a service in such a namespace.
pub const SOURCE: &str = "pvc://models/SmolLM2-135M-Instruct.Q4_1.gguf";

/// The file on this machine.
///
/// # Errors
/// When `tests/setup` has not fetched it.
pub fn file() -> Result<PathBuf> {
    let file = workspace::cache()?.join("models").join(FILE);
    ensure!(file.is_file(), "{} is not there; run tests/setup", file.display());
    Ok(file)
}

/// Puts the file into a new claim [`CLAIM`] of `namespace`, through a pod that has it on standard input: that works on
/// any cluster, whatever its storage.
///
/// # Errors
/// When the claim is not bound or the pod fails; the message quotes its log.
pub fn upload(namespace: &Namespace, file: &Path) -> Result<()> {
    let image = operator::engine_image(namespace.cluster())?;
    namespace.apply(&[claim(), loader(&image)])?;
    wait::until("the loader pod runs", Duration::from_secs(120), || {
        let phase = phase(namespace)?;
        Ok(Look::when(phase == "Running" || phase == "Succeeded", (), phase))
    })?;
    let file = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    namespace.run_with_file(&["attach", "-i", LOADER], file)?;
    wait::until("the loader pod has written the file", Duration::from_secs(60), || {
        let phase = phase(namespace)?;
        ensure!(phase != "Failed", "the loader failed: {}", namespace.run(&["logs", LOADER])?);
        Ok(Look::when(phase == "Succeeded", (), phase))
    })?;
    namespace.run(&["delete", "pod", LOADER, "--wait=false"]).map(drop)
}

const LOADER: &str = "model-loader";

fn phase(namespace: &Namespace) -> Result<String> {
    let pod: Pod = namespace.get(&["get", "pod", LOADER])?;
    Ok(pod.status.and_then(|status| status.phase).unwrap_or_default())
}

fn claim() -> serde_json::Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    })
}

fn loader(image: &str) -> serde_json::Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": LOADER},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": 65_532, "fsGroup": 65_532, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "fetch", "image": image, "stdin": true, "stdinOnce": true,
                "args": ["fetch", "-", "--to", format!("/models/{FILE}"), "--sha256", SHA256],
                "securityContext": {
                    "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": true,
                },
                "volumeMounts": [{"name": "models", "mountPath": "/models"}],
            }],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    })
}

/// A claim [`CLAIM`] in `namespace` of our own cluster, on the very file on this machine: nothing is copied.
///
/// # Errors
/// The API server's own words.
pub fn share(namespace: &Namespace, file: &Path) -> Result<()> {
    let volume = format!("{}-models", namespace.name());
    let folder = file.parent().context("the model is in no folder")?;
    let shared = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "shared",
            "hostPath": {"path": folder, "type": "Directory"},
            "claimRef": {"namespace": namespace.name(), "name": CLAIM},
        },
    });
    let mut claim = claim();
    claim["spec"]["storageClassName"] = json!("shared");
    namespace.apply(&[shared, claim]).map(drop)
}
