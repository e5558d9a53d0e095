//! Numbers on their way to the device: arrays side by side, so that one copy brings all of them.

use std::ops::Range;

use windlass_kernels::cuda::{Device, DriverError, Element, Memory, Pinned, Stream, View};

/// Each array begins at a multiple of so many words: of 16 bytes, as kernels expect.
const ALIGNMENT: usize = 4;

/// The arrays, one behind the other.
#[derive(Debug, Default)]
pub(super) struct Words(Vec<u32>);

impl Words {
    /// Words that arrays of so many take at most.
    pub fn room(arrays: impl IntoIterator<Item = usize>) -> usize {
        arrays.into_iter().map(|words| words.next_multiple_of(ALIGNMENT)).sum()
    }

    /// Puts an array behind the others. Gives its place.
    pub fn push(&mut self, array: impl IntoIterator<Item = u32>) -> Range<usize> {
        let first = self.0.len().next_multiple_of(ALIGNMENT);
        self.0.resize(first, 0);
        self.0.extend(array);
        first..self.0.len()
    }

    /// The same of floats.
    pub fn push_floats(&mut self, array: impl IntoIterator<Item = f32>) -> Range<usize> {
        self.push(array.into_iter().map(f32::to_bits))
    }

    /// The same of numbers of two words.
    pub fn push_longs(&mut self, array: impl IntoIterator<Item = u64>) -> Range<usize> {
        self.push(array.into_iter().flat_map(|long| [long as u32, (long >> 32) as u32]))
    }

    /// Copies all of them to the beginning of `memory`. No copy from `staging` still runs.
    ///
    /// # Panics
    /// When there is no room for them.
    pub fn send(&self, staging: &Pinned<u32>, memory: &mut Memory<u32>, stream: &Stream) -> Result<(), DriverError> {
        staging.write(0, &self.0);
        stream.copy_to_device(memory.slice_mut(0..self.0.len()), staging, 0)
    }
}

/// Room for them on the host and on the device.
#[derive(Debug)]
pub(super) struct WordRoom {
    staging: Pinned<u32>,
    memory: Memory<u32>,
}

impl WordRoom {
    pub fn new(device: &Device, words: usize) -> Result<WordRoom, DriverError> {
        Ok(WordRoom { staging: device.pinned(words)?, memory: device.allocate(words)? })
    }

    /// As [`Words::send`].
    pub fn send(&mut self, words: &Words, stream: &Stream) -> Result<(), DriverError> {
        words.send(&self.staging, &mut self.memory, stream)
    }

    /// What was sent to a place.
    pub fn view<T: Element>(&self, place: &Range<usize>) -> View<'_, T> {
        self.memory.slice(place.clone()).cast()
    }
}
