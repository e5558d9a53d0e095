//! Key files. Keys are kept as digests and compared without telling how much matched.

use crate::small_file;
use sha2::{Digest, Sha256};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Longest key, bytes.
const MAX_KEY_BYTES: usize = 4096;
/// Largest file with keys, bytes.
pub(super) const MAX_FILE_BYTES: u64 = 1 << 20;

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

/// What could be read.
#[derive(Default)]
pub struct Keys {
    /// Every key that is there.
    pub keys: Vec<Key>,
    /// What could not be read, if something could not: the first of it.
    pub trouble: Option<String>,
}

impl KeySource {
    /// All keys that can be read, and what cannot: a mistake in one line keeps nobody out whose key is in another, and
    /// keeps nobody in whose key is in none.
    pub fn read(&self) -> Keys {
        let mut read = Keys::default();
        match self {
            KeySource::File(file) => read.file(file, own_tenant),
            KeySource::Folder(folder) => match files_of(folder) {
                Ok(files) => {
                    files.iter().for_each(|file| read.file(file, |_, line| (file_name(file), line.to_owned())));
                }
                Err(error) => read.fails(error.to_string()),
            },
        }
        read
    }
}

impl Keys {
    fn file(&mut self, file: &Path, split: impl Fn(usize, &str) -> (String, String)) {
        let failed = |what: String| format!("{} {what}", file.display());
        let text = match small_file::read(file, MAX_FILE_BYTES) {
            Ok(text) => text,
            Err(error) => return self.fails(failed(format!("cannot be read: {error}"))),
        };
        let before = self.keys.len();
        let lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
        for (number, line) in (1..).zip(lines).filter(|(_, line)| !line.is_empty() && !line.starts_with(b"#")) {
            match key_of(line, number, &split) {
                Some(key) => self.keys.push(key),
                None => self.fails(failed(format!(
                    "line {number}: a key is text without spaces, of at most {MAX_KEY_BYTES} bytes"
                ))),
            }
        }
        if self.keys.len() == before {
            self.fails(failed("holds no key".to_owned()));
        }
    }

    fn fails(&mut self, why: String) {
        self.trouble.get_or_insert(why);
    }
}

fn key_of(line: &[u8], number: usize, split: impl Fn(usize, &str) -> (String, String)) -> Option<Key> {
    let (tenant, key) = split(number, str::from_utf8(line).ok()?);
    let is_key = key.len() <= MAX_KEY_BYTES && !key.contains(char::is_whitespace);
    is_key.then(|| Key { tenant, digest: digest(key.as_bytes()) })
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
