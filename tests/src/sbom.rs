//! The bill of materials of an image, as CycloneDX 1.6: crates with the checksums of the lock file, and every file with
//! its own.

use anyhow::{Context, Result};
use cargo_metadata::Package;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{linked, workspace};

/// Of the image of `program`, whose files are these, each with the path that it has there.
///
/// # Errors
/// When cargo cannot describe the workspace, or a file cannot be read.
pub fn cyclonedx(program: &str, files: &[(PathBuf, &Path)]) -> Result<String> {
    let checksums = checksums()?;
    let crates = linked::crates(program)?;
    let crates = crates.iter().map(|package| component(package, &checksums));
    let files: Vec<Value> = files.iter().map(|(found, inside)| file(found, inside)).collect::<Result<_>>()?;
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": program, "version": env!("CARGO_PKG_VERSION")}},
        "components": crates.chain(files).collect::<Vec<Value>>(),
    });
    Ok(serde_json::to_string_pretty(&bill)? + "\n")
}

fn component(package: &Package, checksums: &BTreeMap<(String, String), String>) -> Value {
    let (name, version) = (package.name.to_string(), package.version.to_string());
    let mut component = json!({
        "type": "library", "name": name, "version": version, "purl": format!("pkg:cargo/{name}@{version}"),
    });
    if let Some(licence) = &package.license {
        // What crates wrote before there were expressions.
        component["licenses"] = json!([{"expression": licence.replace('/', " OR ")}]);
    }
    if let Some(checksum) = checksums.get(&(name, version)) {
        component["hashes"] = sha256(checksum);
    }
    component
}

fn file(found: &Path, inside: &Path) -> Result<Value> {
    let bytes = fs::read(found).with_context(|| format!("cannot read {}", found.display()))?;
    let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(json!({"type": "file", "name": inside.display().to_string(), "hashes": sha256(&digest)}))
}

fn sha256(digest: &str) -> Value {
    json!([{"alg": "SHA-256", "content": digest}])
}

/// Checksums of the lock file, by name and version.
fn checksums() -> Result<BTreeMap<(String, String), String>> {
    let lock = fs::read_to_string(workspace::root().join("Cargo.lock")).context("no Cargo.lock")?;
    let field = |package: &str, name: &str| {
        let value = package.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""))?;
        value.strip_suffix('"').map(str::to_owned)
    };
    let entry = |package| Some(((field(package, "name")?, field(package, "version")?), field(package, "checksum")?));
    Ok(lock.split("[[package]]").filter_map(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_linked_crate_and_file_is_there_with_its_checksum() {
        let this = std::env::current_exe().expect("this test");
        let text = cyclonedx("windlass-operator", &[(this, Path::new("/usr/bin/test"))]).expect("a bill");
        let bill: Value = serde_json::from_str(&text).expect("json");
        let components = bill["components"].as_array().expect("components");
        let named = |name: &str| components.iter().find(|component| component["name"] == name);
        for component in components {
            let checksum = component["hashes"][0]["content"].as_str().unwrap_or_default();
            assert_eq!(checksum.len(), 64, "{component}");
        }
        let kube = named("kube").expect("it is linked");
        assert_eq!(kube["purl"], format!("pkg:cargo/kube@{}", kube["version"].as_str().expect("a version")));
        assert_eq!(named("/usr/bin/test").expect("the file")["type"], "file");
        assert!(named("serde_derive").is_none(), "a macro leaves nothing in the program");
        assert!(named("tempfile").is_none(), "tests are not in the program");
    }
}
