//! A file's content in the cache while it is incomplete: locked, filled in parts in any order, remembered, verified, and
//! renamed at the end.

use super::checksum::Checksum;
use super::listing::{Identity, RemoteFile};
use super::partial::lock_file;
use super::storage;
use crate::failure::Failure;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use windlass_engine_contract::termination::Reason;

/// Bytes of a part: what a broken connection costs at most.
pub const PART_BYTES: u64 = 8 << 20;

/// A content's place in the cache: its name is its content, so that models and pods share it.
pub fn blob_path(cache: &Path, identity: &Identity) -> PathBuf {
    let name = match identity {
        Identity::Sha256(sha256) => format!("sha256-{sha256}"),
        Identity::Version(version) => format!("version-{}", Checksum::of_bytes(version.as_bytes())),
    };
    cache.join(name)
}

/// Bytes that are still to come of a file's content.
pub fn missing_bytes(cache: &Path, file: &RemoteFile) -> u64 {
    let target = blob_path(cache, &file.identity);
    if is_complete(&target, file.bytes) {
        return 0;
    }
    // As long as the whole from the beginning on, and stored as far as it has come.
    let stored = fs::metadata(target.with_extension("part")).map_or(0, |part| part.blocks() * 512);
    file.bytes.saturating_sub(stored)
}

/// An incomplete file, held by this process alone until it is dropped.
pub struct Blob {
    file: File,
    part: PathBuf,
    target: PathBuf,
    bytes: u64,
    identity: Identity,
    progress: Mutex<Progress>,
}

/// Which parts are there, and the file that remembers it.
struct Progress {
    log: File,
    done: BTreeSet<u64>,
}

impl Blob {
    /// Waits until no other process holds the content; `None` where it is complete then.
    pub fn open(cache: &Path, file: &RemoteFile) -> io::Result<Option<Blob>> {
        let target = blob_path(cache, &file.identity);
        if is_complete(&target, file.bytes) {
            return Ok(None);
        }
        fs::create_dir_all(cache)?;
        let part = target.with_extension("part");
        let held = lock_file(&part)?;
        if is_complete(&target, file.bytes) {
            let _ = fs::remove_file(&part);
            return Ok(None);
        }
        let progress = Progress::open(&target.with_extension("parts"), file.bytes, held.metadata()?.len())?;
        held.set_len(file.bytes)?;
        let (bytes, identity) = (file.bytes, file.identity.clone());
        Ok(Some(Blob { file: held, part, target, bytes, identity, progress: Mutex::new(progress) }))
    }

    /// The parts that are missing, by where they start.
    pub fn missing(&self) -> Vec<Range<u64>> {
        let progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let parts = (0..self.bytes).step_by(PART_BYTES as usize);
        let missing = parts.filter(|start| !progress.done.contains(start));
        missing.map(|start| start..self.bytes.min(start + PART_BYTES)).collect()
    }

    /// Writes some bytes of a part.
    pub fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    /// Remembers that the part from `start` on is all there.
    pub fn complete(&self, start: u64) -> io::Result<()> {
        self.file.sync_data()?;
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(progress.log, "{start}")?;
        progress.done.insert(start);
        Ok(())
    }

    /// Verifies the content and gives it its name; forgets all of it where it is another one.
    pub fn publish(self) -> Result<(), Failure> {
        self.verify()?;
        let published = self.file.sync_all().and_then(|()| fs::rename(&self.part, &self.target));
        published.map_err(|error| storage(&self.target, &error))?;
        // It is not needed, and does no harm.
        let _ = fs::remove_file(self.target.with_extension("parts"));
        Ok(())
    }

    fn verify(&self) -> Result<(), Failure> {
        let Identity::Sha256(wanted) = &self.identity else { return Ok(()) };
        let read = File::open(&self.part).and_then(|mut file| Checksum::of(&mut file));
        let found = read.map_err(|error| storage(&self.part, &error))?;
        if found == *wanted {
            return Ok(());
        }
        let forgotten = self.file.set_len(0).and_then(|()| fs::remove_file(self.target.with_extension("parts")));
        forgotten.map_err(|error| storage(&self.part, &error))?;
        let message = format!("a file of {} bytes has SHA-256 {found}; {wanted} is expected", self.bytes);
        Err(Failure::new(Reason::ChecksumMismatch, message))
    }
}

impl Progress {
    /// Reads what an earlier attempt remembered of a file of `bytes`, of which `there` are on disk.
    fn open(path: &Path, bytes: u64, there: u64) -> io::Result<Progress> {
        let text = if there == bytes { fs::read_to_string(path).unwrap_or_default() } else { String::new() };
        let starts = text.lines().filter_map(|line| line.parse().ok());
        let done: BTreeSet<u64> = starts.filter(|start| start % PART_BYTES == 0 && *start < bytes).collect();
        let log = OpenOptions::new().create(true).append(true).open(path)?;
        if done.is_empty() {
            log.set_len(0)?;
        }
        Ok(Progress { log, done })
    }
}

fn is_complete(path: &Path, bytes: u64) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == bytes)
}
