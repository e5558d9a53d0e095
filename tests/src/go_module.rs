//! Go modules, of which some hold the definitions of other projects.

use anyhow::{Context, Result};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

use crate::{command, workspace};

/// The folder of a module, downloaded if it is not there. Without `@VERSION` it is the one that Argo CD is built from here.
///
/// # Errors
/// When Go is missing, or the module cannot be downloaded; its own words.
pub fn folder(name: &str) -> Result<PathBuf> {
    let mut download = Command::new("go");
    download.current_dir(workspace::root().join("tests/argocd/server")).args(["mod", "download", "-json", name]);
    let said: Value = serde_json::from_str(&command::output(&mut download)?)?;
    Ok(said["Dir"].as_str().with_context(|| format!("go names no folder of {name}"))?.into())
}
