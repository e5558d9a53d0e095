//! Dependencies point one way. Reads cargo's own description of the workspace and fails on a forbidden edge.

use anyhow::{Context, Result, ensure};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, PackageId, TargetKind};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use windlass_tests::workspace;

/// Our crates, and which of our crates each may name. An edge that is not listed is forbidden.
const EDGES: [(&str, &[&str]); 13] = [
    (
        "windlass-operator",
        &["windlass-operator-core", "windlass-operator-replay", "windlass-operator-api", "windlass-engine-contract"],
    ),
    ("windlass-operator-replay", &["windlass-operator-core", "windlass-operator-api", "windlass-engine-contract"]),
    ("windlass-operator-core", &["windlass-operator-api", "windlass-engine-contract"]),
    ("windlass-operator-api", &["windlass-engine-contract"]),
    (
        "windlass-engine",
        &[
            "windlass-engine-api",
            "windlass-engine-core",
            "windlass-engine-model",
            "windlass-engine-contract",
            "windlass-checkpoint",
        ],
    ),
    (
        "windlass-engine-model",
        &["windlass-engine-core", "windlass-engine-contract", "windlass-checkpoint", "windlass-kernels"],
    ),
    ("windlass-engine-core", &["windlass-engine-contract"]),
    ("windlass-engine-api", &[]),
    ("windlass-engine-contract", &[]),
    ("windlass-checkpoint", &[]),
    ("windlass-kernels", &[]),
    // For tests alone: no program may name it.
    ("windlass-cuda-shim", &["windlass-kernels"]),
    ("windlass-tests", &["windlass-operator-api", "windlass-engine-contract"]),
];

/// Crates that compute and decide, without a client, a runtime, a server, a tensor library or a clock.
const PURE: [&str; 6] = [
    "windlass-operator-core",
    "windlass-operator-replay",
    "windlass-operator-api",
    "windlass-engine-core",
    "windlass-engine-api",
    "windlass-engine-contract",
];
/// What none of the pure crates may reach, directly or through others.
const IMPURE: [&str; 14] = [
    "kube",
    "kube-client",
    "kube-runtime",
    "tokio",
    "hyper",
    "axum",
    "ureq",
    "reqwest",
    "candle-core",
    "cudarc",
    "windlass-kernels",
    "tokenizers",
    "rand",
    "chrono",
];
/// Crates that hold data only, and all they may name.
const DATA_ONLY: [(&str, &[&str]); 2] =
    [("windlass-engine-api", &["serde", "serde_json"]), ("windlass-engine-contract", &["serde", "serde_json"])];
/// Ways to read a clock. Time is a parameter of the pure crates.
const CLOCKS: [&str; 4] = ["Instant::now", "SystemTime::now", "Timestamp::now", "Zoned::now"];
/// Files that may hold `unsafe`: everything below these.
const UNSAFE: [&str; 3] = ["kernels/", "engine/checkpoint/src/last_word.rs", "engine/checkpoint/src/map.rs"];

/// Crates whose top-level modules form no circle.
const WITHOUT_CIRCLES: [&str; 1] = ["windlass-engine-model"];
/// What the walk over a decoder's layers may not name: it is written once for all devices.
const DEVICES: [&str; 2] = ["crate::cpu", "crate::cuda"];

#[test]
fn our_crates_name_only_those_below_them() -> Result<()> {
    let metadata = metadata()?;
    let allowed: BTreeMap<_, _> = EDGES.into_iter().collect();
    for package in metadata.workspace_packages() {
        let below = allowed.get(package.name.as_str()).with_context(|| format!("{} is not in EDGES", package.name))?;
        let named = normal(package).filter(|name| allowed.contains_key(name));
        let forbidden: Vec<_> = named.filter(|name| !below.contains(name)).collect();
        ensure!(forbidden.is_empty(), "{} must not name {forbidden:?}", package.name);
    }
    Ok(())
}

#[test]
fn pure_crates_reach_no_client_runtime_server_or_tensor() -> Result<()> {
    let metadata = metadata()?;
    for name in PURE {
        let found = impure(&metadata, name)?;
        ensure!(found.is_empty(), "{name} reaches {found:?}");
    }
    // The look itself can see: the programs do reach these.
    ensure!(impure(&metadata, "windlass-operator")?.contains("kube-client"), "the operator has no kube client?");
    ensure!(impure(&metadata, "windlass-engine")?.contains("axum"), "the engine has no axum?");
    Ok(())
}

#[test]
fn data_crates_name_serde_alone() -> Result<()> {
    let metadata = metadata()?;
    for (name, allowed) in DATA_ONLY {
        let others: Vec<_> = normal(package(&metadata, name)?).filter(|name| !allowed.contains(name)).collect();
        ensure!(others.is_empty(), "{name} must not name {others:?}");
    }
    Ok(())
}

#[test]
fn pure_crates_read_no_clock() -> Result<()> {
    let metadata = metadata()?;
    for name in PURE {
        let folder = package(&metadata, name)?.manifest_path.parent().context("a manifest in no folder")?.join("src");
        for (file, text) in sources(folder.as_std_path())? {
            let found: Vec<_> = CLOCKS.iter().filter(|clock| text.contains(**clock)).collect();
            ensure!(found.is_empty(), "{file} reads a clock: {found:?}");
        }
    }
    Ok(())
}

#[test]
fn modules_form_no_circle() -> Result<()> {
    let metadata = metadata()?;
    for name in WITHOUT_CIRCLES {
        let mut modules = module_graph(&metadata, name)?;
        ensure!(modules.values().any(|named| !named.is_empty()), "{name}: the look sees nothing");
        // Whoever names none of those that are left is in no circle.
        while let Some(leaf) = modules.iter().find(|(_, named)| named.is_empty()).map(|(module, _)| module.clone()) {
            modules.remove(&leaf);
            modules.values_mut().for_each(|named| _ = named.remove(&leaf));
        }
        ensure!(modules.is_empty(), "{name}: modules in a circle, or behind one, with what they name: {modules:?}");
    }
    Ok(())
}

#[test]
fn the_walk_over_layers_names_no_device() -> Result<()> {
    let folder = workspace::root().join("engine/model/src");
    let walk = sources(&folder)?.into_iter().filter(|(file, _)| file.contains("/src/decoder"));
    let naming = walk.filter(|(_, text)| DEVICES.iter().any(|device| text.contains(device)));
    let naming: Vec<String> = naming.map(|(file, _)| file).collect();
    ensure!(naming.is_empty(), "{naming:?} name a device");
    Ok(())
}

/// The top-level modules of a crate, and which of them each names outside of its tests.
fn module_graph(metadata: &Metadata, name: &str) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let folder = package(metadata, name)?.manifest_path.parent().context("a manifest in no folder")?.join("src");
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (file, text) in sources(folder.as_std_path())? {
        let within = file.split_once("/src/").map_or(file.as_str(), |(_, within)| within);
        let module = within.split(['/', '.']).next().unwrap_or(within).to_owned();
        modules.entry(module).or_default().extend(named_modules(&text));
    }
    let known: BTreeSet<String> = modules.keys().filter(|module| *module != "lib").cloned().collect();
    modules.remove("lib");
    for (module, named) in &mut modules {
        named.retain(|name| name != module && known.contains(name));
    }
    Ok(modules)
}

/// What follows `crate::` in a file, tests and comments left out.
fn named_modules(text: &str) -> impl Iterator<Item = String> {
    let code = text.split("#[cfg(test)]").next().unwrap_or(text).lines();
    let code = code.map(|line| line.split("//").next().unwrap_or(line)).collect::<Vec<_>>().join("\n");
    let named =
        |rest: &str| rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().map(str::to_owned);
    code.split("crate::").skip(1).filter_map(named).collect::<Vec<_>>().into_iter()
}

#[test]
fn candle_never_gets_its_cuda_feature() -> Result<()> {
    let metadata = metadata()?;
    let resolve = metadata.resolve.as_ref().context("nothing was resolved")?;
    for node in resolve.nodes.iter().filter(|node| metadata[&node.id].name.starts_with("candle-")) {
        let cuda: Vec<_> =
            node.features.iter().filter(|feature| ["cuda", "cudnn", "nccl"].contains(&feature.as_str())).collect();
        ensure!(cuda.is_empty(), "{} has features {cuda:?}, which link CUDA at build time", metadata[&node.id].name);
    }
    Ok(())
}

#[test]
fn every_crate_takes_the_workspace_lints_and_unsafe_stays_in_its_place() -> Result<()> {
    for package in metadata()?.workspace_packages() {
        let manifest = std::fs::read_to_string(&package.manifest_path)?;
        ensure!(manifest.contains("[lints]\nworkspace = true"), "{} has lints of its own", package.name);
        let folder = package.manifest_path.parent().context("a manifest in no folder")?;
        for (file, text) in sources(folder.as_std_path())? {
            let in_place = UNSAFE.iter().any(|place| file.starts_with(place));
            // Spelled in two parts, so that this file does not name it.
            let permits = text.contains(concat!("(unsafe", "_code)"));
            ensure!(in_place || !permits, "{file} permits unsafe code; only {UNSAFE:?} may");
        }
    }
    Ok(())
}

fn metadata() -> Result<Metadata> {
    MetadataCommand::new().current_dir(workspace::root()).exec().context("cargo metadata failed")
}

fn package<'a>(metadata: &'a Metadata, name: &str) -> Result<&'a Package> {
    metadata
        .workspace_packages()
        .into_iter()
        .find(|package| package.name.as_str() == name)
        .with_context(|| format!("no crate {name}"))
}

/// Names of the normal dependencies of a crate, build and test dependencies left out.
fn normal(package: &Package) -> impl Iterator<Item = &str> {
    package.dependencies.iter().filter(|dep| dep.kind == DependencyKind::Normal).map(|dep| dep.name.as_str())
}

/// Those of [`IMPURE`] that `name` reaches by normal dependencies. What a procedural macro needs runs at build time.
fn impure(metadata: &Metadata, name: &str) -> Result<BTreeSet<String>> {
    let resolve = metadata.resolve.as_ref().context("nothing was resolved")?;
    let nodes: BTreeMap<&PackageId, _> = resolve.nodes.iter().map(|node| (&node.id, node)).collect();
    let is_macro =
        |id: &PackageId| metadata[id].targets.iter().any(|target| target.kind.contains(&TargetKind::ProcMacro));
    let mut pending = vec![&package(metadata, name)?.id];
    let mut seen: BTreeSet<&PackageId> = BTreeSet::new();
    while let Some(id) = pending.pop() {
        let deps =
            nodes[id].deps.iter().filter(|dep| dep.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal));
        pending.extend(deps.map(|dep| &dep.pkg).filter(|id| !is_macro(id) && seen.insert(id)));
    }
    let names = seen.into_iter().map(|id| metadata[id].name.to_string());
    Ok(names.filter(|name| IMPURE.contains(&name.as_str())).collect())
}

/// Every Rust file below `folder`, by its path in the checkout, with its text.
fn sources(folder: &Path) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.strip_prefix(workspace::root()).unwrap_or(&path).display().to_string();
            found.push((name, std::fs::read_to_string(&path)?));
        }
    }
    Ok(found)
}
