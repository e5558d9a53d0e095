//! Every example in `crds/examples` is accepted by an API server, strictly.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::PathBuf;
use windlass_tests::namespace::{Namespace, with_namespace};
use windlass_tests::{operator, workspace};

/// Kinds that a cluster has only with other projects on it: `tests/campaigns/others.rs` holds these to their definitions.
const FOREIGN: [&str; 2] = ["ScaledObject", "Application"];

fn folder() -> PathBuf {
    workspace::root().join("crds/examples")
}

#[test]
fn every_example_is_accepted() -> Result<()> {
    with_namespace("examples", |namespace| {
        let entries = std::fs::read_dir(folder()).context("there are no examples")?;
        let files: Vec<_> =
            entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_file()).collect();
        ensure!(files.len() > 8, "only {} examples", files.len());
        for file in &files {
            let objects = operator::objects(&std::fs::read_to_string(file)?)?;
            let known = |object: &&Value| !FOREIGN.iter().any(|kind| object["kind"] == *kind);
            for object in objects.iter().filter(known) {
                accepted(namespace, object).with_context(|| file.display().to_string())?;
            }
        }
        Ok(())
    })
}

#[test]
fn the_overlay_is_accepted_and_names_what_it_makes() -> Result<()> {
    with_namespace("kustomize", |namespace| {
        let overlay = folder().join("kustomize");
        let built = namespace.cluster().kubectl().run(&["kustomize", overlay.to_str().context("no text")?])?;
        let objects = operator::objects(&built)?;
        objects.iter().try_for_each(|object| accepted(namespace, object))?;
        let find =
            |kind: &str| objects.iter().find(|object| object["kind"] == kind).with_context(|| format!("no {kind}"));
        let (service, secret) = (find("InferenceService")?, find("Secret")?);
        ensure!(service["metadata"]["name"] == "production-smollm2", "{service}");
        ensure!(
            service["spec"]["auth"]["apiKeysSecretRef"]["name"] == secret["metadata"]["name"],
            "{service}, {secret}"
        );
        Ok(())
    })
}

fn accepted(namespace: &Namespace, object: &Value) -> Result<()> {
    let apply = ["apply", "--dry-run=server", "--validate=strict", "--namespace", namespace.name(), "-f", "-"];
    namespace.cluster().kubectl().run_with_input(&apply, &object.to_string()).map(drop)
}
