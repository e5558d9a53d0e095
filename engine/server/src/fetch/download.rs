//! Brings all missing parts of a listing's files, several at a time.

use super::agent::{redact, refused, unavailable};
use super::attempt::{Interruption, persist};
use super::blob::{Blob, blob_path};
use super::listing::{Place, RemoteFile};
use super::progress::Progress;
use super::storage;
use super::web::{content_length, range_start};
use crate::failure::Failure;
use std::io::Read;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use ureq::Agent;
use ureq::http::{StatusCode, header};

/// Bytes read at a time.
const CHUNK_BYTES: usize = 1 << 18;

/// How downloads are made.
pub struct Downloader {
    /// Reads URLs.
    pub agent: Agent,
    /// Parts at a time.
    pub connections: usize,
    /// Before a part's second attempt; each further one is twice as long.
    pub first_pause: Duration,
}

/// A part of one of the files.
struct Part<'a> {
    file: &'a RemoteFile,
    blob: &'a Blob,
    range: Range<u64>,
}

impl Downloader {
    /// Fetches what is missing of the files into the cache; how many bytes that was.
    pub fn fetch(&self, cache: &Path, files: &[RemoteFile]) -> Result<u64, Failure> {
        let blobs = open(cache, files)?;
        let parts = blobs
            .iter()
            .flat_map(|(file, blob)| blob.missing().into_iter().map(move |range| Part { file, blob, range }));
        let parts: Vec<Part<'_>> = parts.collect();
        let missing: u64 = parts.iter().map(|part| part.range.end - part.range.start).sum();
        let total: u64 = blobs.iter().map(|(file, _)| file.bytes).sum();
        self.run(&parts, Progress::start(total - missing, Some(total)), total - missing)?;
        blobs.into_iter().try_for_each(|(_, blob)| blob.publish())?;
        Ok(missing)
    }

    /// Takes parts in order until all are there or one cannot be had.
    fn run(&self, parts: &[Part<'_>], progress: Progress, done: u64) -> Result<(), Failure> {
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
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
            Place::Web { url, authorization } => self.web(url, authorization.as_deref(), range, blob),
            Place::Object { store, path } => {
                let bytes = store.read(path, range.clone())?;
                check_length(bytes.len() as u64, range)?;
                keep(blob.write(&bytes, range.start))
            }
        })?;
        blob.complete(range.start).map_err(|error| storage(Path::new(&file.name), &error))
    }

    fn web(&self, url: &str, authorization: Option<&str>, range: &Range<u64>, blob: &Blob) -> Result<(), Interruption> {
        let mut request = self.agent.get(url).header(header::ACCEPT_ENCODING, "identity");
        request = request.header(header::RANGE, format!("bytes={}-{}", range.start, range.end - 1));
        if let Some(authorization) = authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let response = request.call().map_err(|error| Interruption::Retry(error.to_string()))?;
        let length = range.end - range.start;
        match response.status() {
            StatusCode::PARTIAL_CONTENT if range_start(&response) == Some(range.start) => (),
            // A server without ranges will do for a file of one part.
            StatusCode::OK if range.start == 0 && content_length(&response) == Some(length) => (),
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => {
                let cause = "the server does not send the part of the file that was asked for";
                return Err(Interruption::Fatal(unavailable(&redact(url), cause)));
            }
            status => return Err(refused(url, status)),
        }
        let mut reader = response.into_body().into_reader().take(length);
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut at = range.start;
        loop {
            let read = reader.read(&mut chunk).map_err(|error| Interruption::Retry(error.to_string()))?;
            if read == 0 {
                return check_length(at - range.start, range);
            }
            keep(blob.write(&chunk[..read], at))?;
            at += read as u64;
        }
    }
}

/// The incomplete files, in an order that is the same for all who share the cache: they wait for each other in turn.
fn open<'a>(cache: &Path, files: &'a [RemoteFile]) -> Result<Vec<(&'a RemoteFile, Blob)>, Failure> {
    let mut files: Vec<&RemoteFile> = files.iter().filter(|file| file.bytes > 0).collect();
    files.sort_by_key(|file| blob_path(cache, &file.identity));
    files.dedup_by_key(|file| file.identity.clone());
    let mut blobs = Vec::new();
    for file in files {
        let opened = Blob::open(cache, file).map_err(|error| storage(cache, &error))?;
        blobs.extend(opened.map(|blob| (file, blob)));
    }
    Ok(blobs)
}

fn check_length(found: u64, range: &Range<u64>) -> Result<(), Interruption> {
    let expected = range.end - range.start;
    match found == expected {
        true => Ok(()),
        false => Err(Interruption::Retry(format!("the connection ended after {found} of {expected} bytes"))),
    }
}

fn keep(written: std::io::Result<()>) -> Result<(), Interruption> {
    written.map_err(|error| Interruption::Fatal(storage(Path::new("the file"), &error)))
}
