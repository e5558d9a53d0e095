//! `FILE.fetched.json`: what the last fetch found, beside the file.

use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// What a fetch verified and how long it took.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FetchRecord {
    /// The checksum of a file, or a repository's revision.
    revision: String,
    bytes: u64,
    modified_nanoseconds: u64,
    /// Seconds of the download; 0 where the file was already there.
    pub seconds: f64,
}

impl FetchRecord {
    /// The record of the file or folder at `path`, if there is one.
    pub fn beside(path: &Path) -> Option<FetchRecord> {
        serde_json::from_slice(&std::fs::read(record_path(path)).ok()?).ok()
    }

    /// Whether `path` is unchanged since it was found to be this.
    pub fn describes(&self, path: &Path, revision: &str) -> bool {
        let unchanged = |(bytes, modified)| (bytes, modified) == (self.bytes, self.modified_nanoseconds);
        self.revision == revision && stamp(path).is_ok_and(unchanged)
    }

    /// Writes the record of what was just verified.
    pub fn write(path: &Path, revision: &str, seconds: f64) -> io::Result<()> {
        let (bytes, modified_nanoseconds) = stamp(path)?;
        let record = FetchRecord { revision: revision.to_owned(), bytes, modified_nanoseconds, seconds };
        std::fs::write(record_path(path), serde_json::to_vec(&record)?)
    }
}

fn record_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".fetched.json");
    PathBuf::from(name)
}

fn stamp(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::metadata(path)?;
    let modified = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok((metadata.len(), modified.as_nanos() as u64))
}
