//! `windlass-engine fetch`: a file from a URL or standard input, or a model from the hub, an object store or a registry:
//! resumed, verified, and moved into place at the end.
//!
//! It runs as a pod's init container, so it writes what it does as plain lines, ends with a structured termination
//! message, and may meet a sibling doing the same on a shared volume: a lock on the partial file lets one work at a
//! time. The checksum, not the transport, is what is trusted.

mod agent;
pub mod attempt;
mod blob;
mod checksum;
mod download;
mod hub;
pub mod listing;
mod objects;
mod oci;
mod partial;
mod progress;
pub mod range;
pub mod record;
mod room;
pub mod source;
mod web;

use crate::cli::FetchArgs;
use crate::failure::Failure;
use blob::{blob_path, missing_bytes};
use checksum::Checksum;
use download::Downloader;
use listing::{Listing, Wanted};
use partial::Partial;
use record::FetchRecord;
use room::Room;
use source::{FileSource, Repository, Source};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use tracing::info;
use windlass_engine_contract::termination::Reason;

/// Pause before a second attempt that makes sense in production; each further one is twice as long.
pub const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Does the whole job; on return the file or folder is there and is what was asked for.
pub fn run(args: &FetchArgs, first_pause: Duration) -> Result<(), Failure> {
    match Source::parse(&args.source, &args.access, first_pause)? {
        Source::File(source) => fetch_file(args, &source),
        Source::Repository(_) if args.sha256.is_some() => {
            Err(Failure::configuration("--sha256 is for one file of https:// or http://, or -"))
        }
        Source::Repository(repository) => fetch_model(args, repository.as_ref(), first_pause),
    }
}

fn fetch_file(args: &FetchArgs, source: &FileSource) -> Result<(), Failure> {
    let started = Instant::now();
    let sha256 = args.sha256.as_deref();
    let checksum = Checksum::parse(sha256.ok_or_else(|| Failure::configuration("this source needs --sha256"))?)?;
    let room = Room::enter(args)?;
    let mut partial = Partial::lock(&args.to).map_err(|error| storage(&args.to, &error))?;
    let revision = checksum.to_string();
    let is_known = FetchRecord::renew(&args.to, &revision);
    if is_known || holds(&args.to, &checksum).map_err(|error| storage(&args.to, &error))? {
        info!(file = %args.to.display(), "already there with the right checksum");
        partial.discard();
        // A record that is right says how long it took whoever fetched the file.
        if !is_known {
            keep_record(args, &revision, 0.0)?;
        }
        return room.make(0, SystemTime::now());
    }
    let more = if room.is_bounded() { source.remaining(&mut partial)? } else { 0 };
    room.make(more, SystemTime::now())?;
    source.download(&mut partial, args.max_bytes)?;
    let bytes = partial.len();
    partial.publish(&checksum)?;
    let seconds = started.elapsed().as_secs_f64();
    info!(file = %args.to.display(), bytes, seconds, "fetched and verified");
    keep_record(args, &revision, seconds)
}

fn fetch_model(args: &FetchArgs, repository: &dyn Repository, first_pause: Duration) -> Result<(), Failure> {
    let started = Instant::now();
    let room = Room::enter(args)?;
    if is_there(args) {
        info!(to = %args.to.display(), "already there");
        return room.make(0, SystemTime::now());
    }
    let listing = attempt::persist(&repository.name(), first_pause, || repository.list())?;
    check_size(args, &listing)?;
    let cache = args.cache.clone().unwrap_or_else(|| default_cache(&args.to));
    room.make(listing.files.iter().map(|file| missing_bytes(&cache, file)).sum(), SystemTime::now())?;
    let downloader =
        Downloader { agent: agent::agent(args.access.ca_file.as_deref())?, connections: args.connections, first_pause };
    let bytes = downloader.fetch(&cache, &listing.files)?;
    place(args, &cache, &listing).map_err(|error| storage(&args.to, &error))?;
    let seconds = started.elapsed().as_secs_f64();
    info!(to = %args.to.display(), revision = listing.revision, bytes, seconds, "fetched {}", repository.name());
    keep_record(args, &listing.revision, seconds)
}

/// Whether a revision that can never mean other files was fetched before.
fn is_there(args: &FetchArgs) -> bool {
    let Some(commit) = args.access.revision.as_deref().filter(|revision| hub::is_commit(revision)) else {
        return false;
    };
    FetchRecord::renew(&args.to, commit)
}

fn check_size(args: &FetchArgs, listing: &Listing) -> Result<(), Failure> {
    let bytes = listing.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.bytes));
    if bytes <= args.max_bytes {
        return Ok(());
    }
    let message = format!("the model has {bytes} bytes; --max-bytes is {}", args.max_bytes);
    Err(Failure::new(Reason::ModelInvalid, message))
}

/// Beside what is fetched, so that models that share files share them on disk.
fn default_cache(to: &Path) -> PathBuf {
    to.parent().unwrap_or(Path::new("")).join("blobs")
}

/// Links the cache's contents to where they are wanted: one file, or a folder of them.
fn place(args: &FetchArgs, cache: &Path, listing: &Listing) -> std::io::Result<()> {
    let path = args.source.split_once("://").map_or("", |(_, rest)| rest);
    let single = matches!(Wanted::of(path), Wanted::File(_));
    for file in &listing.files {
        let to = if single { args.to.clone() } else { args.to.join(&file.name) };
        std::fs::create_dir_all(to.parent().unwrap_or(Path::new(".")))?;
        let mut linking = to.clone().into_os_string();
        linking.push(".linking");
        let _ = std::fs::remove_file(&linking);
        match file.bytes {
            0 => std::fs::write(&linking, b"")?,
            _ => std::fs::hard_link(blob_path(cache, &file.identity), &linking)?,
        }
        std::fs::rename(&linking, &to)?;
    }
    Ok(())
}

/// Whether `path` holds what is wanted, by reading all of it.
fn holds(path: &Path, wanted: &Checksum) -> std::io::Result<bool> {
    Ok(path.is_file() && Checksum::of(&mut std::fs::File::open(path)?)? == *wanted)
}

/// The record spares the next fetch the reading and tells the server how long this one took.
fn keep_record(args: &FetchArgs, revision: &str, seconds: f64) -> Result<(), Failure> {
    FetchRecord::write(&args.to, revision, seconds).map_err(|error| storage(&args.to, &error))
}

fn storage(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Reason::ModelUnavailable, format!("cannot store {}: {error}", path.display()))
}
