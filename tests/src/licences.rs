//! Notices of everything that is linked into a program: crates, Rust's standard library, the C library.
//!
//! Texts that many crates share appear once, under the list of those crates.

use anyhow::{Context, Result, ensure};
use cargo_metadata::Package;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{command, linked};

/// Folders below a crate's own that are searched: C sources are vendored with their licence beside them.
const DEPTH: usize = 4;
/// Beginnings of the names of files that hold a licence or a notice.
const NAMES: [&str; 6] = ["license", "licence", "copying", "notice", "copyright", "unlicense"];

/// All notices for `program`, one text.
///
/// # Errors
/// When cargo cannot describe the workspace, or when the C library's or the standard library's notices are not found.
pub fn notices(program: &str, libraries: &[PathBuf]) -> Result<String> {
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut summary = format!("Third-party software in {program}\n\n");
    for package in &linked::crates(program)? {
        let name = format!("{} {}", package.name, package.version);
        let licence = package.license.as_deref().unwrap_or("see below");
        writeln!(summary, "{name}: {licence}{}", repository(package))?;
        let folder = package.manifest_path.parent().map_or(Path::new("."), |folder| folder.as_std_path());
        for text in texts_in(folder, DEPTH)? {
            texts.entry(text).or_default().insert(name.clone());
        }
    }
    for (name, text) in standard_library()?.into_iter().chain(system_libraries(libraries)?) {
        writeln!(summary, "{name}: see below")?;
        texts.entry(text).or_default().insert(name);
    }
    Ok(summary + &texts.iter().map(section).collect::<String>())
}

fn section((text, names): (&String, &BTreeSet<String>)) -> String {
    let names = names.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    format!("\n{}\n{names}\n\n{}\n", "=".repeat(100), text.trim_end())
}

fn repository(package: &Package) -> String {
    package.repository.as_ref().map(|url| format!(", {url}")).unwrap_or_default()
}

/// Contents of every licence file in `folder` and, `depth` levels down, in its subfolders.
fn texts_in(folder: &Path, depth: usize) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() && depth > 0 {
            texts.extend(texts_in(&path, depth - 1)?);
        } else if path.is_file() && is_licence(&path) {
            texts.push(String::from_utf8_lossy(&std::fs::read(&path)?).into_owned());
        }
    }
    Ok(texts)
}

fn is_licence(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    NAMES.iter().any(|start| name.starts_with(start)) && !name.ends_with(".rs")
}

fn standard_library() -> Result<Vec<(String, String)>> {
    let sysroot = command::output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let folder = Path::new(sysroot.trim()).join("share/doc/rust");
    let candidates = ["COPYRIGHT", "COPYRIGHT-library.html", "COPYRIGHT.html", "LICENSE-MIT", "LICENSE-APACHE"];
    let texts = candidates.iter().filter_map(|name| std::fs::read_to_string(folder.join(name)).ok());
    let texts: Vec<_> = texts.take(1).map(|text| ("Rust standard library".to_owned(), text)).collect();
    ensure!(!texts.is_empty(), "no licence of Rust's standard library in {}", folder.display());
    Ok(texts)
}

/// The notices of the packages that the shared libraries come from, as the system's distribution keeps them.
fn system_libraries(libraries: &[PathBuf]) -> Result<Vec<(String, String)>> {
    let needed = [("libc.so", &["libc6", "glibc"][..]), ("libgcc_s.so", &["libgcc-s1", "gcc-libs", "libgcc"][..])];
    let used =
        needed.iter().filter(|(library, _)| libraries.iter().any(|path| path.to_string_lossy().contains(library)));
    used.map(|(library, packages)| {
        let found = packages.iter().find_map(|package| package_notice(package));
        Ok(((*library).to_owned(), found.with_context(|| format!("no licence of {library} on this system"))?))
    })
    .collect()
}

fn package_notice(package: &str) -> Option<String> {
    std::fs::read_to_string(format!("/usr/share/doc/{package}/copyright")).ok().or_else(|| {
        let texts = texts_in(Path::new(&format!("/usr/share/licenses/{package}")), 0).ok()?;
        (!texts.is_empty()).then(|| texts.join("\n\n"))
    })
}
