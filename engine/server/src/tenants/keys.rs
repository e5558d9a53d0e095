//! Key files. Keys are kept as digests and compared without telling how much matched.

use sha2::{Digest, Sha256};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Longest key, bytes.
const MAX_KEY_BYTES: usize = 4096;
/// Largest file with keys, bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Where keys are kept. Lines that are empty or begin with `#` are no keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A line is `KEY`, a tenant of its own, or `TENANT KEY`.
    File(PathBuf),
    /// Every file is a tenant of that name, and every line in it one of its keys.
    Folder(PathBuf),
}

/// A key and whose it is.
pub struct Key {
    /// Name of the tenant.
    pub tenant: String,
    /// SHA-256 of the key.
    pub digest: [u8; 32],
}

impl KeySource {
    /// All keys; at least one in every file.
    pub fn read(&self) -> io::Result<Vec<Key>> {
        match self {
            KeySource::File(file) => read_keys(file, own_tenant),
            KeySource::Folder(folder) => {
                let files = files_of(folder)?;
                let keys = files.iter().map(|file| read_keys(file, |_, line| (file_name(file), line.to_owned())));
                Ok(keys.collect::<io::Result<Vec<_>>>()?.into_iter().flatten().collect())
            }
        }
    }
}

/// SHA-256.
pub fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Equality in a time that does not depend on the content.
pub fn same(left: &[u8; 32], right: &[u8; 32]) -> bool {
    left.iter().zip(right).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

/// Tenant and key of a line in a file of many tenants.
fn own_tenant(number: usize, line: &str) -> (String, String) {
    match line.split_once(char::is_whitespace) {
        Some((tenant, key)) => (tenant.to_owned(), key.trim().to_owned()),
        None => (format!("key-{number}"), line.to_owned()),
    }
}

fn file_name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Files of a folder. A mounted Secret has its own bookkeeping in entries that begin with two dots.
fn files_of(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let named = |error: io::Error| io::Error::other(format!("{}: {error}", folder.display()));
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(named)? {
        let entry = entry.map_err(named)?;
        if !entry.file_name().to_string_lossy().starts_with("..") && entry.path().is_file() {
            files.push(entry.path());
        }
    }
    files.sort_unstable();
    match files.is_empty() {
        true => Err(io::Error::other(format!("{} holds no file", folder.display()))),
        false => Ok(files),
    }
}

fn read_keys(file: &Path, split: impl Fn(usize, &str) -> (String, String)) -> io::Result<Vec<Key>> {
    let failed = |what: String| io::Error::other(format!("{} {what}", file.display()));
    let text = read_bounded(file).map_err(|error| failed(format!("cannot be read: {error}")))?;
    let lines = (1..).zip(text.lines().map(str::trim)).filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let mut keys = Vec::new();
    for (number, line) in lines {
        let (tenant, key) = split(number, line);
        if key.len() > MAX_KEY_BYTES || key.contains(char::is_whitespace) {
            return Err(failed(format!("line {number}: a key has no spaces and at most {MAX_KEY_BYTES} bytes")));
        }
        keys.push(Key { tenant, digest: digest(key.as_bytes()) });
    }
    if keys.is_empty() { Err(failed("holds no key".to_owned())) } else { Ok(keys) }
}

/// A file of moderate size as text.
pub fn read_bounded(file: &Path) -> io::Result<String> {
    let bytes = fs::metadata(file)?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("it has {bytes} bytes, more than {MAX_FILE_BYTES}")));
    }
    fs::read_to_string(file)
}
