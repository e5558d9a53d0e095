//! The bytes of a file, mapped.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::sync::Arc;

use memmap2::{Mmap, UncheckedAdvice};

use crate::data::{Arrival, Data};

/// Bytes that are awaited first of a file that is on its way, for its header.
const FIRST_BYTES: usize = 1 << 20;
/// No header is longer; one that is not understood by then is damaged.
const MOST_HEADER_BYTES: usize = 256 << 20;

/// A checkpoint's bytes.
#[derive(Debug)]
pub(crate) struct Bytes {
    place: Place,
    /// Who writes them, where they are not all there.
    arrival: Option<Arc<dyn Arrival>>,
}

#[derive(Debug)]
enum Place {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps the whole file, read-only; `arrival` knows how much of it is there.
    pub fn map(file: &File, arrival: Option<Arc<dyn Arrival>>) -> io::Result<Bytes> {
        if file.metadata()?.len() == 0 {
            return Ok(Bytes::from(Vec::new()));
        }
        // SAFETY: the mapping is read-only and private to this process. Its bytes stay as they are only while nobody
        // writes or truncates the file: that is what a checkpoint in service means (caches replace files by rename),
        // and the mapping lives only until the weights are packed. No reader relies on a string staying valid UTF-8:
        // each is checked again where it becomes a `str`. A file that is on its way is written once from its beginning
        // on, and nothing of it is read before `Arrival::wait` has said that it is there.
        let place = unsafe { Mmap::map(file) }.map(Place::Mapped)?;
        Ok(Bytes { place, arrival })
    }

    /// Has `read` look at the beginning of the file: at all of it or, where it is on its way, at as much as it takes.
    pub fn read_beginning<T, E>(&self, read: impl Fn(&[u8]) -> Result<T, E>) -> Result<T, E> {
        let mut end = if self.arrival.is_some() { FIRST_BYTES.min(self.len()) } else { self.len() };
        loop {
            match read(self.data(0..end).get()) {
                Err(_) if end < self.len().min(MOST_HEADER_BYTES) => end = self.len().min(4 * end),
                done => return done,
            }
        }
    }

    /// Some of the bytes.
    pub fn data(&self, range: Range<usize>) -> Data<'_> {
        Data::of(self, range, self.arrival.as_deref())
    }

    /// Gives the memory of `part` back to the system; whoever reads it again has it from the file. Does nothing for bytes
    /// in memory, or for those of others.
    pub fn release(&self, part: &[u8]) {
        let Place::Mapped(map) = &self.place else { return };
        let offset = part.as_ptr().addr().checked_sub(map.as_ptr().addr());
        let Some(offset) = offset.filter(|offset| offset + part.len() <= map.len()) else { return };
        // SAFETY: pages of a file that nobody has written to hold the same when they are read in again.
        let advised = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, part.len()) };
        // Memory that is not given back is held until the map ends: no reason not to load.
        let _ = advised;
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.place {
            Place::Mapped(map) => map,
            Place::Owned(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes { place: Place::Owned(bytes), arrival: None }
    }
}
