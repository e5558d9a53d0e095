//! Packs arrays of numbers into one buffer, so that one copy brings all to the device.

use std::ops::Range;

use windlass_kernels::cuda::{Device, DriverError, Element, Memory, Pinned, Stream, View};

/// Alignment of arrays in words: 16 bytes, as kernels expect.
const ALIGNMENT: usize = 4;

/// The packed arrays.
#[derive(Debug, Default)]
pub(super) struct Words(Vec<u32>);

impl Words {
    /// Most words that arrays of these lengths take.
    pub fn room(arrays: impl IntoIterator<Item = usize>) -> usize {
        arrays.into_iter().map(|words| words.next_multiple_of(ALIGNMENT)).sum()
    }

    /// Appends an array and returns its range.
    pub fn push(&mut self, array: impl IntoIterator<Item = u32>) -> Range<usize> {
        let first = self.0.len().next_multiple_of(ALIGNMENT);
        self.0.resize(first, 0);
        self.0.extend(array);
        first..self.0.len()
    }

    /// Appends an array of floats.
    pub fn push_floats(&mut self, array: impl IntoIterator<Item = f32>) -> Range<usize> {
        self.push(array.into_iter().map(f32::to_bits))
    }

    /// Appends an array of numbers of two words.
    pub fn push_longs(&mut self, array: impl IntoIterator<Item = u64>) -> Range<usize> {
        self.push(array.into_iter().flat_map(|long| [long as u32, (long >> 32) as u32]))
    }

    /// Copies all arrays to the start of `memory`. No earlier copy from `staging` may still run.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn send(&self, staging: &Pinned<u32>, memory: &mut Memory<u32>, stream: &Stream) -> Result<(), DriverError> {
        staging.write(0, &self.0);
        stream.copy_to_device(memory.slice_mut(0..self.0.len()), staging, 0)
    }
}

/// Buffers for arrays on the host and on the device.
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

    /// The array at a range.
    pub fn view<T: Element>(&self, place: &Range<usize>) -> View<'_, T> {
        self.memory.slice(place.clone()).cast()
    }
}
