//! The bytes of a file, mapped. The only unsafe code outside the kernels.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Deref;

use memmap2::{Mmap, UncheckedAdvice};

/// A checkpoint's bytes: mapped from a file, or in memory.
#[derive(Debug)]
pub(crate) enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps the whole file, read-only.
    pub fn map(file: &File) -> io::Result<Bytes> {
        if file.metadata()?.len() == 0 {
            return Ok(Bytes::Owned(Vec::new()));
        }
        // SAFETY: the mapping is read-only and private to this process. Its bytes stay as they are only while nobody
        // writes or truncates the file: that is what a checkpoint in service means (caches replace files by rename),
        // and the mapping lives only until the weights are packed. No reader relies on a string staying valid UTF-8:
        // each is checked again where it becomes a `str`.
        unsafe { Mmap::map(file) }.map(Bytes::Mapped)
    }

    /// Gives the memory of `part` back to the system; whoever reads it again has it from the file. Does nothing for bytes
    /// in memory, or for those of others.
    pub fn release(&self, part: &[u8]) {
        let Bytes::Mapped(map) = self else { return };
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
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}
