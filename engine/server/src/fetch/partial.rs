//! The file while it is incomplete: locked, hashed as it grows, and renamed only when its checksum is right.

use super::checksum::Checksum;
use super::storage;
use crate::failure::Failure;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use windlass_engine_contract::termination::Reason;

/// `FILE.part`, held by this process alone until it is dropped.
pub struct Partial {
    file: File,
    path: PathBuf,
    target: PathBuf,
    hasher: Sha256,
    bytes: u64,
    read_back: bool,
}

impl Partial {
    /// Opens or makes the partial file of `target` and waits until no other process holds it.
    pub fn lock(target: &Path) -> io::Result<Partial> {
        if let Some(folder) = target.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder)?;
        }
        let mut name = target.as_os_str().to_owned();
        name.push(".part");
        let path = PathBuf::from(name);
        let file = lock_file(&path)?;
        Ok(Partial { file, path, target: target.to_owned(), hasher: Sha256::new(), bytes: 0, read_back: false })
    }

    /// Bytes that an earlier attempt left, read and hashed once.
    pub fn resume(&mut self) -> io::Result<u64> {
        if !self.read_back {
            self.read_back = true;
            let mut chunk = vec![0; 1 << 18];
            self.file.seek(SeekFrom::Start(0))?;
            loop {
                match self.file.read(&mut chunk)? {
                    0 => break,
                    read => {
                        self.hasher.update(&chunk[..read]);
                        self.bytes += read as u64;
                    }
                }
            }
        }
        Ok(self.bytes)
    }

    /// Starts again from nothing.
    pub fn restart(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.hasher = Sha256::new();
        (self.bytes, self.read_back) = (0, true);
        Ok(())
    }

    /// Bytes so far.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Adds the next bytes.
    pub fn append(&mut self, chunk: &[u8]) -> io::Result<()> {
        self.file.write_all(chunk)?;
        self.hasher.update(chunk);
        self.bytes += chunk.len() as u64;
        Ok(())
    }

    /// Gives the file its name if it has the checksum; empties it otherwise.
    pub fn publish(mut self, wanted: &Checksum) -> Result<(), Failure> {
        let found = Checksum::finish(std::mem::take(&mut self.hasher));
        if found != *wanted {
            let bytes = self.bytes;
            self.restart().map_err(|error| storage(&self.path, &error))?;
            let message =
                format!("{} has SHA-256 {found} ({bytes} bytes); {wanted} is expected", self.target.display());
            return Err(Failure::new(Reason::ChecksumMismatch, message));
        }
        let published = self.file.sync_all().and_then(|()| fs::rename(&self.path, &self.target));
        published.map_err(|error| storage(&self.target, &error))
    }

    /// The file is not needed.
    pub fn discard(self) {
        // A failure leaves an empty or unneeded file behind, which does no harm.
        let _ = fs::remove_file(&self.path);
    }
}

/// Opens or makes a file and waits until no other process holds it.
pub fn lock_file(path: &Path) -> io::Result<File> {
    loop {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        file.lock()?;
        // Whoever held it may have renamed it meanwhile; then this handle is the finished file, not a partial one.
        let opened = file.metadata()?;
        if fs::metadata(path).is_ok_and(|named| named.ino() == opened.ino() && named.dev() == opened.dev()) {
            return Ok(file);
        }
    }
}
