//! API keys: from files only, read again when they change, compared without telling how much matched.

use super::api::Api;
use super::error::ApiError;
use crate::failure::Failure;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use sha2::{Digest, Sha256};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};
use tracing::warn;

/// A refresh time that lets a changed Secret count soon and reads it rarely.
pub const REFRESH_EVERY: Duration = Duration::from_secs(10);
/// Longest key, bytes.
const MAX_KEY_BYTES: usize = 4096;

/// Where keys are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// One key.
    File(PathBuf),
    /// One key per file.
    Folder(PathBuf),
}

/// The keys that are valid now, as digests: equally long, and of no use to a reader of memory.
pub struct Keys {
    source: KeySource,
    refresh_every: Duration,
    known: RwLock<Known>,
}

struct Known {
    digests: Vec<[u8; 32]>,
    read_at: Instant,
}

impl Keys {
    /// Reads the keys; there must be one. A request that finds them older than `refresh_every` reads them again.
    pub fn read(source: KeySource, refresh_every: Duration) -> Result<Keys, Failure> {
        let digests = read_digests(&source).map_err(|error| Failure::configuration(format!("API keys: {error}")))?;
        Ok(Keys { source, refresh_every, known: RwLock::new(Known { digests, read_at: Instant::now() }) })
    }

    /// Whether `key` is one of them. The time taken depends on their number only.
    pub fn accept(&self, key: &str) -> bool {
        self.refresh();
        let digest = digest(key.as_bytes());
        let known = self.known.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        known.digests.iter().fold(false, |found, candidate| found | same(candidate, &digest))
    }

    /// Reads the files again if the last reading is old. Unreadable ones leave the keys as they were.
    fn refresh(&self) {
        let old = |known: &Known| known.read_at.elapsed() >= self.refresh_every;
        if !old(&self.known.read().unwrap_or_else(std::sync::PoisonError::into_inner)) {
            return;
        }
        let mut known = self.known.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if old(&known) {
            known.read_at = Instant::now();
            match read_digests(&self.source) {
                Ok(digests) => known.digests = digests,
                Err(error) => warn!("API keys could not be read again, the old ones stay: {error}"),
            }
        }
    }
}

/// Lets a request through if there are no keys or it carries one. `/health` needs none.
pub async fn authenticate(State(api): State<Arc<Api>>, request: Request, next: Next) -> Result<Response, ApiError> {
    let Some(keys) = api.keys.as_ref().filter(|_| request.uri().path() != super::api::HEALTH) else {
        return Ok(next.run(request).await);
    };
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let key = given.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    match key {
        Some((_, key)) if keys.accept(key.trim()) => Ok(next.run(request).await),
        Some(_) => Err(unauthorized("the API key is not valid")),
        None => Err(unauthorized("an API key is required: send `Authorization: Bearer KEY`")),
    }
}

fn unauthorized(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn same(left: &[u8; 32], right: &[u8; 32]) -> bool {
    left.iter().zip(right).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

fn read_digests(source: &KeySource) -> io::Result<Vec<[u8; 32]>> {
    let files = match source {
        KeySource::File(file) => vec![file.clone()],
        KeySource::Folder(folder) => key_files(folder)?,
    };
    if files.is_empty() {
        return Err(io::Error::other(format!("{source:?} holds no file")));
    }
    files.iter().map(|file| read_digest(file)).collect()
}

/// Files of a folder. A mounted Secret has its own bookkeeping in entries that begin with two dots.
fn key_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let named = |error: io::Error| io::Error::other(format!("{}: {error}", folder.display()));
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(named)? {
        let entry = entry.map_err(named)?;
        if !entry.file_name().to_string_lossy().starts_with("..") && entry.path().is_file() {
            files.push(entry.path());
        }
    }
    Ok(files)
}

fn read_digest(file: &Path) -> io::Result<[u8; 32]> {
    let text = fs::read_to_string(file).map_err(|error| io::Error::other(format!("{}: {error}", file.display())))?;
    match text.trim() {
        "" => Err(io::Error::other(format!("{} is empty", file.display()))),
        key if key.len() > MAX_KEY_BYTES => {
            Err(io::Error::other(format!("{} is longer than {MAX_KEY_BYTES} bytes", file.display())))
        }
        key => Ok(digest(key.as_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_a_folder_is_a_key() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("alice"), "key-a\n").unwrap();
        fs::write(folder.path().join("bob"), "key-b").unwrap();
        fs::write(folder.path().join("..data"), "not a key").unwrap();
        let keys = Keys::read(KeySource::Folder(folder.path().to_owned()), REFRESH_EVERY).unwrap();
        assert!(keys.accept("key-a") && keys.accept("key-b"));
        assert!(!keys.accept("key-") && !keys.accept("") && !keys.accept("not a key"));
    }

    #[test]
    fn a_changed_folder_counts_and_an_unreadable_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        fs::write(&file, "old").unwrap();
        let keys = Keys::read(KeySource::Folder(folder.path().to_owned()), Duration::ZERO).unwrap();
        assert!(keys.accept("old"));
        fs::write(&file, "new").unwrap();
        assert!(keys.accept("new") && !keys.accept("old"));
        fs::remove_file(&file).unwrap();
        assert!(keys.accept("new"), "no key at all is a mistake, not a decision");
    }

    #[test]
    fn a_missing_or_empty_key_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let empty = Keys::read(KeySource::Folder(folder.path().to_owned()), REFRESH_EVERY).err().unwrap();
        assert!(empty.message.contains("holds no file"), "{empty}");
        fs::write(folder.path().join("blank"), " \n").unwrap();
        let blank = Keys::read(KeySource::Folder(folder.path().to_owned()), REFRESH_EVERY).err().unwrap();
        assert!(blank.message.contains("blank is empty"), "{blank}");
    }
}
