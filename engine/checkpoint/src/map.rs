//! The bytes of a file, mapped. The only unsafe code outside the kernels.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Deref;

use memmap2::Mmap;

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
