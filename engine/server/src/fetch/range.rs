//! Parts of remote files, wherever those are.

use super::agent::agent;
use super::attempt::{Interruption, persist};
use super::download::check_length;
use super::listing::{Place, RemoteFile};
use super::web::HttpSource;
use crate::failure::Failure;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;
use ureq::Agent;

/// Reads parts of files.
pub struct RangeReader {
    agent: Agent,
    first_pause: Duration,
}

impl RangeReader {
    /// Trusts the authorities of a file, or the public ones; waits for `first_pause` before a second attempt.
    pub fn new(ca_file: Option<&Path>, first_pause: Duration) -> Result<RangeReader, Failure> {
        Ok(RangeReader { agent: agent(ca_file)?, first_pause })
    }

    /// The bytes of a range that the file has.
    pub fn read(&self, file: &RemoteFile, range: &Range<u64>) -> Result<Vec<u8>, Failure> {
        persist(&file.name, self.first_pause, || match &file.place {
            Place::Web { url, authorization, .. } => {
                let source = HttpSource::at(self.agent.clone(), url, authorization.as_deref());
                let part = source.part(range.start, range.end);
                let bytes = part.map_err(|failure| Interruption::Retry(failure.message))?.bytes;
                check_length(bytes.len() as u64, range).map(|()| bytes)
            }
            Place::Object { store, path, tag } => {
                let bytes = store.read(path, tag.as_deref(), range.clone())?;
                check_length(bytes.len() as u64, range).map(|()| bytes.to_vec())
            }
        })
    }
}
