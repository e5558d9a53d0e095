//! `windlass-engine fetch`: a file from a URL or standard input, resumed, verified, and moved into place at the end.
//!
//! It runs as a pod's init container, so it writes what it does as plain lines, ends with a structured termination
//! message, and may meet a sibling doing the same on a shared volume: a lock on the partial file lets one work at a
//! time. The checksum, not the transport, is what is trusted.

mod checksum;
mod partial;
mod progress;
pub mod record;
pub mod source;

use crate::cli::FetchArgs;
use crate::failure::Failure;
use checksum::Checksum;
use partial::Partial;
use record::FetchRecord;
use source::Source;
use std::path::Path;
use std::time::{Duration, Instant};
use tracing::info;
use windlass_engine_contract::termination::Reason;

/// Pause before a second attempt that makes sense in production; each further one is twice as long.
pub const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Does the whole job; on return the file is there and has the checksum.
pub fn run(args: &FetchArgs, first_pause: Duration) -> Result<(), Failure> {
    let started = Instant::now();
    let checksum = Checksum::parse(&args.sha256)?;
    let source = Source::parse(args, first_pause)?;
    let mut partial = Partial::lock(&args.to).map_err(|error| storage(&args.to, &error))?;
    if present(&args.to, &checksum).map_err(|error| storage(&args.to, &error))? {
        info!(file = %args.to.display(), "already there with the right checksum");
        partial.discard();
        return keep_record(args, &checksum, 0.0);
    }
    source.download(&mut partial, args.max_bytes)?;
    let bytes = partial.len();
    partial.publish(&checksum)?;
    let seconds = started.elapsed().as_secs_f64();
    info!(file = %args.to.display(), bytes, seconds, "fetched and verified");
    keep_record(args, &checksum, seconds)
}

/// Whether `path` already holds what is wanted: by the record of an earlier fetch, or by reading all of it.
fn present(path: &Path, wanted: &Checksum) -> std::io::Result<bool> {
    if !path.is_file() {
        return Ok(false);
    }
    if FetchRecord::beside(path).is_some_and(|record| record.describes(path, &wanted.to_string())) {
        return Ok(true);
    }
    Ok(Checksum::of(&mut std::fs::File::open(path)?)? == *wanted)
}

/// The record spares the next fetch the reading and tells the server how long this one took.
fn keep_record(args: &FetchArgs, checksum: &Checksum, seconds: f64) -> Result<(), Failure> {
    FetchRecord::write(&args.to, &checksum.to_string(), seconds).map_err(|error| storage(&args.to, &error))
}

fn storage(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Reason::ModelUnavailable, format!("cannot store {}: {error}", path.display()))
}
