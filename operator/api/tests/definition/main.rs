//! The definition as users meet it: its files, its bounds, its rules, its examples.

mod bounds;
mod examples;
mod files;
mod formats;
mod rules;

use serde_json::Value;
use std::path::PathBuf;

/// The root of the workspace.
fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The schema of the resource.
fn schema() -> Value {
    let crd = serde_json::to_value(windlass_operator_api::crd::definition()).expect("json");
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}
