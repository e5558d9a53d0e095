//! `windlass-engine fetch`: a file from a URL or standard input, or a model from the hub, an object store or a registry:
//! resumed, verified, and moved into place at the end.
//!
//! It runs as a pod's init container, so it writes what it does as plain lines, ends with a structured termination
//! message, and may meet a sibling doing the same on a shared volume: a lock on the partial file lets one work at a
//! time. The checksum, not the transport, is what is trusted. `serve` does the same with an address, and loads meanwhile
//! ([`incoming`]).

mod agent;
pub mod attempt;
mod blob;
mod checksum;
mod download;
mod hub;
pub mod incoming;
mod layers;
pub mod listing;
mod objects;
mod oci;
mod partial;
mod progress;
mod proof;
pub mod range;
pub mod record;
mod redirect;
mod room;
pub mod source;
mod transfer;
mod web;
mod web_part;
mod zstd;

use crate::cli::FetchArgs;
use crate::failure::Failure;
use checksum::Checksum;
use partial::Partial;
use record::FetchRecord;
use room::Room;
use source::{FileSource, Source};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use tracing::info;
use transfer::Transfer;
use windlass_engine_contract::termination::Reason;

/// Pause before a second attempt that makes sense in production; each further one is twice as long.
pub const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Does the whole job; on return the file or folder is there and is what was asked for.
pub fn run(args: &FetchArgs, first_pause: Duration) -> Result<(), Failure> {
    prepare(args, first_pause)?.map_or(Ok(()), Transfer::run)
}

/// All that comes before the transfer of files of known lengths; `None` where the model is there then: it was before, or it
/// came as one stream.
fn prepare(args: &FetchArgs, first_pause: Duration) -> Result<Option<Transfer>, Failure> {
    match Source::parse(&args.source, &args.download.access, first_pause)? {
        Source::File(source) => prepare_file(args, &source, first_pause),
        Source::Repository(_) if args.download.sha256.is_some() => {
            Err(Failure::configuration("--sha256 is for one file of https:// or http://, or -"))
        }
        Source::Repository(repository) => Transfer::prepare(args, repository.as_ref(), first_pause),
    }
}

fn prepare_file(args: &FetchArgs, source: &FileSource, first_pause: Duration) -> Result<Option<Transfer>, Failure> {
    let sha256 = args.download.sha256.as_deref();
    let checksum = Checksum::parse(sha256.ok_or_else(|| Failure::configuration("this source needs --sha256"))?)?;
    let room = Room::enter(args)?;
    let mut partial = Partial::lock(&args.to).map_err(|error| storage(&args.to, &error))?;
    if is_there(args, &checksum)? {
        partial.discard();
        room.make(0, SystemTime::now())?;
        return Ok(None);
    }
    // What an earlier stream has left goes on as one.
    let has_begun = partial.resume().map_err(|error| storage(&args.to, &error))? > 0;
    let listing = match source {
        FileSource::Http(source) if !has_begun => source.in_parts(&checksum)?,
        _ => None,
    };
    match listing {
        Some(listing) => {
            Transfer::of(args, source.name(), listing, room, first_pause).map(|it| Some(it.in_turn(partial)))
        }
        None => stream(args, source, &checksum, &room, partial).map(|()| None),
    }
}

/// Whether the file is there with the right checksum.
fn is_there(args: &FetchArgs, checksum: &Checksum) -> Result<bool, Failure> {
    let revision = checksum.to_string();
    let is_known = FetchRecord::renew(&args.to, &revision);
    let is_there = is_known || holds(&args.to, checksum).map_err(|error| storage(&args.to, &error))?;
    if is_there {
        info!(file = %args.to.display(), "already there with the right checksum");
    }
    // A record that is right says how long it took whoever fetched the file.
    if is_there && !is_known {
        keep_record(args, &revision, 0.0)?;
    }
    Ok(is_there)
}

/// Brings a file as one stream: its server hands out no parts, or a stream was begun.
fn stream(
    args: &FetchArgs,
    source: &FileSource,
    checksum: &Checksum,
    room: &Room,
    mut partial: Partial,
) -> Result<(), Failure> {
    let started = Instant::now();
    let more = if room.is_bounded() { source.remaining(&mut partial)? } else { 0 };
    room.make(more, SystemTime::now())?;
    source.download(&mut partial, args.download.max_bytes)?;
    let bytes = partial.len();
    partial.publish(checksum)?;
    let seconds = started.elapsed().as_secs_f64();
    info!(file = %args.to.display(), bytes, seconds, "fetched and verified");
    keep_record(args, &checksum.to_string(), seconds)
}

/// Where contents lie: beside what is fetched, so that models that share files share them on disk.
fn cache(args: &FetchArgs) -> PathBuf {
    let beside = || args.to.parent().unwrap_or(Path::new("")).join("blobs");
    args.download.cache.clone().unwrap_or_else(beside)
}

/// Whether `path` holds what is wanted, by reading all of it.
fn holds(path: &Path, wanted: &Checksum) -> std::io::Result<bool> {
    Ok(path.is_file() && Checksum::of(&mut std::fs::File::open(path)?)? == *wanted)
}

/// The record spares the next fetch the reading and tells the server how long this one took.
fn keep_record(args: &FetchArgs, revision: &str, seconds: f64) -> Result<(), Failure> {
    FetchRecord::write(&args.to, revision, seconds, Vec::new()).map_err(|error| storage(&args.to, &error))
}

fn storage(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Reason::ModelUnavailable, format!("cannot store {}: {error}", path.display()))
}
