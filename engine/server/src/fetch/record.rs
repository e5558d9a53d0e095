//! `FILE.fetched.json`: what the last fetch found, beside the file. When it was written is when the file was last used, and
//! who serves the file holds it locked.

use super::listing::is_of_a_model;
use crate::machine::host_name;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const SUFFIX: &str = ".fetched.json";

/// What a fetch verified and how long it took.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FetchRecord {
    /// The checksum of a file, or a repository's revision.
    revision: String,
    bytes: u64,
    modified_nanoseconds: u64,
    /// Seconds of the download; 0 where the file was already there.
    seconds: f64,
    /// Host that wrote this: on a volume that pods share, the pod that downloaded.
    #[serde(default)]
    host: String,
    /// Names of the files of a folder.
    #[serde(default)]
    files: Vec<String>,
}

/// Seconds that this pod, or machine, spent on the download of the model at `path`: 0 where it was already there, or was
/// not fetched.
pub fn download_seconds(path: &Path) -> f64 {
    FetchRecord::beside(path).map_or(0.0, |record| record.seconds_on(&host_name()))
}

impl FetchRecord {
    /// The record of the file or folder at `path`, if there is one.
    fn beside(path: &Path) -> Option<FetchRecord> {
        serde_json::from_slice(&std::fs::read(record_path(path)).ok()?).ok()
    }

    /// Whether `path` is unchanged since it was found to be this; then it is used from now on.
    pub fn renew(path: &Path, revision: &str) -> bool {
        let Ok(file) = File::options().read(true).write(true).open(record_path(path)) else { return false };
        // Whoever clears it away holds it alone. Where nothing can be locked, nothing is cleared away either.
        let _ = file.lock_shared();
        let is_it = FetchRecord::beside(path).is_some_and(|record| record.describes(path, revision));
        is_it && file.set_modified(SystemTime::now()).is_ok()
    }

    fn seconds_on(&self, host: &str) -> f64 {
        if self.host == host { self.seconds } else { 0.0 }
    }

    fn describes(&self, path: &Path, revision: &str) -> bool {
        let unchanged = |(bytes, modified)| (bytes, modified) == (self.bytes, self.modified_nanoseconds);
        self.revision == revision && stamp(path).is_ok_and(unchanged)
    }

    /// Writes the record of what was just verified: of a folder, with the names of its files.
    pub fn write(path: &Path, revision: &str, seconds: f64, files: Vec<String>) -> io::Result<()> {
        let (bytes, modified_nanoseconds) = stamp(path)?;
        let (revision, host) = (revision.to_owned(), host_name());
        let record = FetchRecord { revision, bytes, modified_nanoseconds, seconds, host, files };
        std::fs::write(record_path(path), serde_json::to_vec(&record)?)
    }
}

/// Names of the files that the last fetch put into the folder at `path`.
pub fn files_of(path: &Path) -> Vec<String> {
    let files = FetchRecord::beside(path).map(|record| record.files).unwrap_or_default();
    // Whoever else writes to the volume may have written the record.
    files.into_iter().filter(|name| is_of_a_model(name)).collect()
}

/// Keeps the model at `path` from being cleared away until the process ends.
pub fn hold(path: &Path) {
    // Closed, and by that given up, when the process ends: until then it may load the model again.
    std::mem::forget(hold_until(path));
}

/// Keeps the model at `path` from being cleared away until the file is closed; `None` for one that was not fetched.
pub fn hold_until(path: &Path) -> Option<File> {
    let file = File::open(record_path(path)).ok()?;
    file.lock_shared().ok().map(|()| file)
}

/// The model that a record is of.
pub fn model_of(record: &Path) -> Option<PathBuf> {
    Some(record.with_file_name(record.file_name()?.to_str()?.strip_suffix(SUFFIX)?))
}

/// The record of a model.
pub fn record_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(SUFFIX);
    PathBuf::from(name)
}

fn stamp(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::metadata(path)?;
    let modified = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok((metadata.len(), modified.as_nanos() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pods that share a volume: one downloads, the others find what it left.
    #[test]
    fn a_download_took_time_where_it_was_done_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("a.gguf");
        std::fs::write(&model, b"weights").expect("written");
        assert_eq!(download_seconds(&model), 0.0, "nothing was fetched");
        FetchRecord::write(&model, "1", 12.5, Vec::new()).expect("a record");
        assert_eq!(download_seconds(&model), 12.5);
        assert!(FetchRecord::renew(&model, "1"));
        assert_eq!(download_seconds(&model), 12.5, "whoever finds it later leaves the figure");
        let elsewhere = FetchRecord::beside(&model).map(|record| record.seconds_on("another-pod"));
        assert_eq!(elsewhere, Some(0.0));
    }

    #[test]
    fn a_record_names_no_file_outside_its_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let names = ["config.json", "../other/config.json", "/etc/a.json", "..", "model.safetensors"];
        let names = names.map(str::to_owned).to_vec();
        FetchRecord::write(folder.path(), "1", 0.0, names).expect("a record");
        assert_eq!(files_of(folder.path()), ["config.json", "model.safetensors"]);
        std::fs::remove_file(record_path(folder.path())).expect("a record");
    }
}
