//! The bytes of a body, copied together as its chunks come.

use memmap2::MmapMut;
use std::ops::Deref;

/// From here on a body has pages of its own, which the system has back at once when it goes. An allocator keeps what a long
/// body leaves for a while, and so does a buffer that grows by copies.
const LONG_BYTES: usize = 1 << 20;

/// Those that have come so far.
#[derive(Debug, Default)]
pub struct BodyBytes {
    short: Vec<u8>,
    /// Addresses for the longest body; memory is taken as it is written.
    long: Option<MmapMut>,
    length: usize,
}

impl BodyBytes {
    /// Adds a chunk of a body that has at most so many bytes.
    ///
    /// # Panics
    /// When it has more.
    pub fn push(&mut self, chunk: &[u8], most_bytes: usize) {
        let length = self.length + chunk.len();
        if length > LONG_BYTES && self.long.is_none() {
            // Where the system has no pages it stays where it is, and grows.
            self.long = MmapMut::map_anon(most_bytes).ok();
            if let Some(pages) = &mut self.long {
                pages[..self.length].copy_from_slice(&self.short);
                self.short = Vec::new();
            }
        }
        match &mut self.long {
            Some(pages) => pages[self.length..length].copy_from_slice(chunk),
            None => self.short.extend_from_slice(chunk),
        }
        self.length = length;
    }
}

impl Deref for BodyBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.long.as_ref().map_or(&self.short, |pages| &pages[..self.length])
    }
}

impl From<&str> for BodyBytes {
    fn from(text: &str) -> BodyBytes {
        BodyBytes { short: text.into(), long: None, length: text.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_together_in_order_however_long_they_are() {
        for (chunk, count) in [(7, 100), (4096, 600), (LONG_BYTES, 3), (3 * LONG_BYTES, 1)] {
            let mut bytes = BodyBytes::default();
            let all: Vec<u8> = (0..chunk * count).map(|at| (at % 251) as u8).collect();
            all.chunks(chunk).for_each(|chunk| bytes.push(chunk, all.len()));
            assert!(*bytes == all[..], "{chunk} × {count}");
            assert_eq!(bytes.long.is_some(), all.len() > LONG_BYTES);
        }
    }
}
