//! A file's content in the cache while it is incomplete: locked, filled in parts in any order, remembered, verified while
//! it comes, and renamed at the end. Whoever wants to read it meanwhile waits for its beginning to be long enough.

use super::checksum::Checksum;
use super::listing::{Identity, RemoteFile};
use super::partial::lock_file;
use super::proof::Proof;
use super::storage;
use crate::failure::Failure;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use windlass_checkpoint::Arrival;
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

/// An incomplete file, held by this process alone until it is published or dropped.
#[derive(Debug)]
pub struct Blob {
    file: File,
    part: PathBuf,
    target: PathBuf,
    bytes: u64,
    proof: Option<Proof>,
    progress: Mutex<Progress>,
    /// Bytes from the beginning on without a gap.
    beginning: AtomicU64,
    /// Told of every part, and of the end.
    news: Condvar,
}

/// Which parts are there, and the file that remembers it.
#[derive(Debug)]
struct Progress {
    log: File,
    done: BTreeSet<u64>,
    /// Nothing more will come.
    has_ended: bool,
    /// It is of another content, and has no names any more.
    is_forgotten: bool,
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
        let beginning = AtomicU64::new(progress.beginning(file.bytes));
        let (bytes, proof, progress) = (file.bytes, file.proof(), Mutex::new(progress));
        Ok(Some(Blob { file: held, part, target, bytes, proof, progress, beginning, news: Condvar::new() }))
    }

    /// The file, under whatever name.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its length once it is complete.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parts that are missing, by where they start.
    pub fn missing(&self) -> Vec<Range<u64>> {
        let progress = self.progress();
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
        let mut progress = self.progress();
        writeln!(progress.log, "{start}")?;
        progress.done.insert(start);
        self.beginning.store(progress.beginning(self.bytes), Ordering::Release);
        self.news.notify_all();
        Ok(())
    }

    /// Nothing more will come: whoever waits need not.
    pub fn abandon(&self) {
        self.progress().has_ended = true;
        self.news.notify_all();
    }

    /// Whether nothing more will come, though some of it is missing.
    pub fn is_abandoned(&self) -> bool {
        self.progress().has_ended
    }

    /// Waits for the first `end` bytes; whether they came.
    pub fn wait_for(&self, end: u64) -> bool {
        let is_there = || self.beginning.load(Ordering::Acquire) >= end.min(self.bytes);
        if is_there() {
            return true;
        }
        let waits = |progress: &mut Progress| !is_there() && !progress.has_ended;
        drop(self.news.wait_while(self.progress(), waits).unwrap_or_else(PoisonError::into_inner));
        is_there()
    }

    /// Verifies the content as it comes and gives it its name; forgets all of it where it is another one.
    pub fn publish(&self) -> Result<(), Failure> {
        self.verify()?;
        let published = self.file.sync_all().and_then(|()| fs::rename(&self.part, &self.target));
        published.map_err(|error| storage(&self.target, &error))?;
        // It is not needed, and does no harm.
        let _ = fs::remove_file(self.target.with_extension("parts"));
        self.file.unlock().map_err(|error| storage(&self.target, &error))
    }

    fn verify(&self) -> Result<(), Failure> {
        let Some(wanted) = &self.proof else {
            return self.wait_for(self.bytes).then_some(()).ok_or_else(|| storage(&self.part, &ended()));
        };
        let checked = wanted.check(&mut Coming { blob: self, at: 0 }).map_err(|error| storage(&self.part, &error))?;
        checked.map_err(|found| {
            self.forget();
            let message = format!("a file of {} bytes has {found}; {wanted} is expected", self.bytes);
            Failure::new(Reason::ChecksumMismatch, message)
        })
    }

    /// The next attempt begins anew. The file is not cut short: it may be mapped.
    pub fn forget(&self) {
        // Once forgotten the names are another process's, which has begun anew.
        if std::mem::replace(&mut self.progress().is_forgotten, true) {
            return;
        }
        // What is left behind is found to be wrong once more.
        let _ = fs::remove_file(self.target.with_extension("parts"));
        let _ = fs::remove_file(&self.part);
    }
}

impl Arrival for Blob {
    fn wait(&self, end: u64) {
        self.wait_for(end);
    }
}

/// Reads a content as it comes.
struct Coming<'a> {
    blob: &'a Blob,
    at: u64,
}

impl Read for Coming<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let end = self.blob.bytes.min(self.at + buffer.len() as u64);
        if !self.blob.wait_for(end) {
            return Err(ended());
        }
        let read = self.blob.file.read_at(&mut buffer[..(end - self.at) as usize], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

fn ended() -> io::Error {
    io::Error::other("the download ended early")
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
        Ok(Progress { log, done, has_ended: false, is_forgotten: false })
    }

    /// Bytes of a file of `bytes` that are there from the beginning on.
    fn beginning(&self, bytes: u64) -> u64 {
        let parts = (0..bytes).step_by(PART_BYTES as usize);
        let gap = parts.zip(&self.done).find(|(start, done)| start != *done).map(|(start, _)| start);
        gap.unwrap_or((self.done.len() as u64 * PART_BYTES).min(bytes))
    }
}

fn is_complete(path: &Path, bytes: u64) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == bytes)
}

#[cfg(test)]
mod tests {
    use super::super::listing::Place;
    use super::*;

    #[test]
    fn what_was_forgotten_is_not_taken_from_whoever_begins_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = Place::Web { url: String::new(), authorization: None, tag: None };
        let identity = Identity::Version("1".to_owned());
        let file = RemoteFile { name: "m.gguf".to_owned(), bytes: 3, identity, place, told: None };
        let first = Blob::open(folder.path(), &file).expect("opened").expect("incomplete");
        first.forget();
        let second = Blob::open(folder.path(), &file).expect("opened").expect("incomplete");
        first.forget();
        second.write(b"abc", 0).expect("written");
        second.complete(0).expect("remembered");
        second.publish().expect("published");
        let content = blob_path(folder.path(), &file.identity);
        assert_eq!(fs::read(&content).expect("a content"), b"abc");
        File::open(content).expect("opened").try_lock().expect("nobody waits for what is complete");
    }
}
