//! Reads little-endian fields off a byte slice and never past its end.

use std::ops::Range;

use crate::error::GgufError;

/// A position in the file's bytes. Every read names what it is for, so that a truncated file's error can say it.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub fn position(&self) -> usize {
        self.at
    }

    /// Bytes left to read.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Takes `count` bytes and returns where they lie.
    pub fn range(&mut self, count: u64, field: &'static str) -> Result<Range<usize>, GgufError> {
        match usize::try_from(count) {
            Ok(length) if length <= self.remaining() => {
                let start = self.at;
                self.at += length;
                Ok(start..self.at)
            }
            _ => Err(GgufError::Truncated { field, offset: self.at, needed: count, remaining: self.remaining() }),
        }
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], GgufError> {
        let range = self.range(N as u64, field)?;
        let mut array = [0; N];
        array.copy_from_slice(&self.bytes[range]);
        Ok(array)
    }

    pub fn u32(&mut self, field: &'static str) -> Result<u32, GgufError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, field: &'static str) -> Result<u64, GgufError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// Takes a number of `width` bytes (1, 2, 4 or 8), its bits in the low end.
    pub fn bits(&mut self, width: usize, field: &'static str) -> Result<u64, GgufError> {
        let range = self.range(width as u64, field)?;
        let mut bits = [0; 8];
        bits[..width].copy_from_slice(&self.bytes[range]);
        Ok(u64::from_le_bytes(bits))
    }

    /// Takes a string: its length in 8 bytes, then UTF-8.
    pub fn string(&mut self, field: &'static str) -> Result<Range<usize>, GgufError> {
        let length = self.u64(field)?;
        let range = self.range(length, field)?;
        match std::str::from_utf8(&self.bytes[range.clone()]) {
            Ok(_) => Ok(range),
            Err(_) => Err(GgufError::NotUtf8 { field, offset: range.start }),
        }
    }
}
