//! Brings all missing parts of a listing's files, several at a time, and verifies files while others still come.

use super::attempt::{Interruption, persist};
use super::blob::{Blob, blob_path};
use super::listing::{Place, RemoteFile, is_weights};
use super::progress::Progress;
use super::storage;
use super::web_part::WebPart;
use crate::failure::Failure;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use ureq::Agent;

/// How downloads are made.
pub struct Downloader {
    /// Reads URLs.
    pub agent: Agent,
    /// Parts at a time.
    pub connections: usize,
    /// Before a part's second attempt; each further one is twice as long.
    pub first_pause: Duration,
}

/// A file whose content is incomplete.
pub type Missing = (RemoteFile, Arc<Blob>);

/// A part of one of the files.
struct Part<'a> {
    file: &'a RemoteFile,
    blob: &'a Blob,
    range: Range<u64>,
}

impl Downloader {
    /// Fetches what is missing of the files; how many bytes that was. Each is verified while it and others still come.
    pub fn fetch(&self, files: &[Missing]) -> Result<u64, Failure> {
        let parts = parts(files);
        let missing: u64 = parts.iter().map(|part| part.range.end - part.range.start).sum();
        let total: u64 = files.iter().map(|(file, _)| file.bytes).sum();
        let failed = AtomicBool::new(false);
        let abandon = |_: &Failure| {
            failed.store(true, Ordering::Relaxed);
            files.iter().for_each(|(_, blob)| blob.abandon());
        };
        let publish = || files.iter().try_for_each(|(_, blob)| blob.publish()).inspect_err(abandon);
        let (fetched, published) = std::thread::scope(|scope| {
            let published = scope.spawn(publish);
            let progress = Progress::start(total - missing, Some(total));
            let fetched = self.run(&parts, &failed, progress, total - missing).inspect_err(abandon);
            (fetched, published.join())
        });
        fetched.and(published.unwrap_or_else(|_| Err(Failure::internal("verifying a download panicked"))))?;
        Ok(missing)
    }

    /// Takes parts in order until all are there or one cannot be had.
    fn run(&self, parts: &[Part<'_>], failed: &AtomicBool, progress: Progress, done: u64) -> Result<(), Failure> {
        let next = AtomicUsize::new(0);
        let progress = Mutex::new((progress, done));
        let work = || -> Result<(), Failure> {
            while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                if failed.load(Ordering::Relaxed) {
                    break;
                }
                self.part(part).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
                let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                let (bar, done) = &mut *progress;
                *done += part.range.end - part.range.start;
                bar.at(*done);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers = self.connections.clamp(1, parts.len().max(1));
            let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            let mut results = workers.into_iter().map(|worker| worker.join());
            results.try_for_each(|result| result.unwrap_or_else(|_| Err(Failure::internal("a download panicked"))))
        })
    }

    fn part(&self, Part { file, blob, range }: &Part<'_>) -> Result<(), Failure> {
        persist(&file.name, self.first_pause, || match &file.place {
            Place::Web { url, authorization, tag } => {
                let part = WebPart { url, authorization: authorization.as_deref(), version: tag.as_deref(), range };
                part.fetch(&self.agent, blob)
            }
            Place::Object { store, path, tag } => {
                let bytes = store.read(path, tag.as_deref(), range.clone())?;
                check_length(bytes.len() as u64, range)?;
                keep(blob.write(&bytes, range.start))
            }
        })?;
        blob.complete(range.start).map_err(|error| storage(Path::new(&file.name), &error))
    }
}

/// The incomplete files: first those that describe the model. They are opened in an order that is the same for all who
/// share the cache, who wait for each other in turn.
pub fn open(cache: &Path, files: &[RemoteFile]) -> Result<Vec<Missing>, Failure> {
    let mut files: Vec<&RemoteFile> = files.iter().filter(|file| file.bytes > 0).collect();
    files.sort_by_key(|file| blob_path(cache, &file.identity));
    files.dedup_by_key(|file| file.identity.clone());
    let mut missing = Vec::new();
    for file in files {
        let opened = Blob::open(cache, file).map_err(|error| storage(cache, &error))?;
        missing.extend(opened.map(|blob| (file.clone(), Arc::new(blob))));
    }
    missing.sort_by_key(|(file, _)| (is_weights(&file.name), file.name.clone()));
    Ok(missing)
}

/// What is missing, in the order in which a model is loaded: descriptions, headers, the rest.
fn parts(files: &[Missing]) -> Vec<Part<'_>> {
    let parts =
        files.iter().flat_map(|(file, blob)| blob.missing().into_iter().map(move |range| Part { file, blob, range }));
    let mut parts: Vec<Part<'_>> = parts.collect();
    parts.sort_by_key(|part| is_weights(&part.file.name) && part.range.start > 0);
    parts
}

/// Whether a part is all there.
pub(super) fn check_length(found: u64, range: &Range<u64>) -> Result<(), Interruption> {
    let expected = range.end - range.start;
    match found == expected {
        true => Ok(()),
        false => Err(Interruption::Retry(format!("the connection ended after {found} of {expected} bytes"))),
    }
}

/// What could not be written is not asked for again.
pub(super) fn keep(written: std::io::Result<()>) -> Result<(), Interruption> {
    written.map_err(|error| Interruption::Fatal(storage(Path::new("the file"), &error)))
}
