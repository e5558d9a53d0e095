//! Where things are: the checkout, what it builds, and the cache outside of it.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Root of the checkout.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Folder of release binaries: that of the running program, or its parent for a test.
///
/// # Errors
/// When the running program's path cannot be read.
pub fn binaries() -> Result<PathBuf> {
    let program = std::env::current_exe().context("cannot read the path of this program")?;
    let folder = program.parent().context("this program is in no folder")?;
    let folder = if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder };
    Ok(folder.to_owned())
}

/// Where downloads and builds are kept between runs, outside of the checkout.
///
/// # Errors
/// When neither `XDG_CACHE_HOME` nor `HOME` is set.
pub fn cache() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        Some(base) => PathBuf::from(base),
        None => {
            PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache")
        }
    };
    Ok(base.join("windlass"))
}
