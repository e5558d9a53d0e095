//! A tensor's data, which may still be on its way into its file.

use std::fmt::{self, Debug, Formatter};
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

/// A file that is read while it is being written: whoever writes it says how far it has come.
pub trait Arrival: Debug + Send + Sync {
    /// Waits until the file's first `end` bytes are there, or will never be. What is read then is what the file holds:
    /// whether that is what it should, whoever writes it knows in the end, and until then nothing made of it may be used.
    fn wait(&self, end: u64);
}

/// Who writes the file at a path; `None` for one that is whole.
pub type Arrivals<'a> = &'a dyn Fn(&Path) -> Option<Arc<dyn Arrival>>;

/// Some bytes of a file. Reading them waits until they are there; their number is known before.
#[derive(Clone, Copy, Default)]
pub struct Data<'a> {
    bytes: &'a [u8],
    /// Who writes the file, and where in it the bytes end; `None` for a file that is whole.
    arrival: Option<(&'a dyn Arrival, u64)>,
}

impl<'a> Data<'a> {
    /// The bytes at `range` of a file.
    pub(crate) fn of(file: &'a [u8], range: Range<usize>, arrival: Option<&'a dyn Arrival>) -> Data<'a> {
        let arrival = arrival.map(|arrival| (arrival, range.end as u64));
        Data { bytes: &file[range], arrival }
    }

    /// How many there are. Waits for none.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are none. Waits for none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Some of them. Waits for none.
    ///
    /// # Panics
    /// When they are not all among these.
    pub fn slice(&self, range: Range<usize>) -> Data<'a> {
        let after = (self.bytes.len() - range.end) as u64;
        Data { bytes: &self.bytes[range], arrival: self.arrival.map(|(arrival, end)| (arrival, end - after)) }
    }

    /// The bytes, as soon as they are there.
    pub fn get(&self) -> &'a [u8] {
        if let Some((arrival, end)) = self.arrival {
            arrival.wait(end);
        }
        self.bytes
    }

    /// Where they are in memory, for an order of what lies in one file. Waits for none.
    pub fn address(&self) -> usize {
        self.bytes.as_ptr().addr()
    }
}

impl Deref for Data<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.get()
    }
}

impl Debug for Data<'_> {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes", self.len())
    }
}
