//! What is linked into a program: the third-party crates, as cargo resolves them.

use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, PackageId, TargetKind};
use std::collections::BTreeSet;
use std::process::Command;

use crate::{command, workspace};

/// Third-party crates in `program`, by name.
///
/// # Errors
/// When cargo cannot describe the workspace, or there is no such program.
pub fn crates(program: &str) -> Result<Vec<Package>> {
    let metadata = metadata()?;
    reachable(&metadata, program).map(|packages| packages.into_iter().cloned().collect())
}

/// Dependencies of the whole workspace for this machine's target.
fn metadata() -> Result<Metadata> {
    let version = command::output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc -vV names no host")?;
    let mut command = MetadataCommand::new();
    command.current_dir(workspace::root()).other_options(["--filter-platform".to_owned(), host.to_owned()]);
    command.exec().context("cargo metadata failed")
}

/// Third-party crates reachable from `program` by normal dependencies. Procedural macros run at build time and leave
/// nothing of theirs in the program.
fn reachable<'a>(metadata: &'a Metadata, program: &str) -> Result<Vec<&'a Package>> {
    let resolve = metadata.resolve.as_ref().context("cargo metadata resolved nothing")?;
    let root = metadata.workspace_packages().into_iter().find(|package| package.name.as_str() == program);
    let mut pending = vec![&root.with_context(|| format!("no package {program} in this workspace"))?.id];
    let mut seen: BTreeSet<&PackageId> = pending.iter().copied().collect();
    while let Some(id) = pending.pop() {
        let node = resolve.nodes.iter().find(|node| node.id == *id).context("a package was not resolved")?;
        let normal =
            node.deps.iter().filter(|dep| dep.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal));
        pending.extend(normal.map(|dep| &dep.pkg).filter(|id| !is_macro(&metadata[id]) && seen.insert(id)));
    }
    let packages = seen.into_iter().map(|id| &metadata[id]);
    Ok(packages.filter(|package| package.source.is_some()).collect())
}

fn is_macro(package: &Package) -> bool {
    package.targets.iter().any(|target| target.kind.contains(&TargetKind::ProcMacro))
}
