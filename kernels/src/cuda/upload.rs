//! Values on their way to a device: one by one, or while the next ones are made.

use std::cell::RefCell;
use std::slice;

use super::error::DriverError;
use super::memory::{Device, Element, Memory, Pinned, ViewMut, as_bytes, whole};
use super::stream::{Event, Stream};

/// What brings values to a device.
pub trait Upload {
    /// Memory for elements whose bytes are those of `parts`, one after the other, which may change once this returns.
    ///
    /// # Panics
    /// When these are no whole elements.
    fn upload_bytes<T: Element>(&self, parts: &[&[u8]]) -> Result<Memory<T>, DriverError>;

    /// Memory for a copy of `values`, which may change once this returns.
    fn upload<T: Element>(&self, values: &[T]) -> Result<Memory<T>, DriverError> {
        self.upload_bytes(&[as_bytes(values)])
    }
}

/// Waits for each copy.
impl Upload for Device {
    fn upload_bytes<T: Element>(&self, parts: &[&[u8]]) -> Result<Memory<T>, DriverError> {
        Device::upload_bytes(self, &parts.concat())
    }
}

/// Copies from two pinned buffers by turns, on a stream of its own: while one is copied, the next values are made and written to
/// the other. Only [`Uploader::finish`] says that they are there.
#[derive(Debug)]
pub struct Uploader {
    device: Device,
    stream: Stream,
    buffer_bytes: usize,
    /// The next one to be written first.
    buffers: RefCell<[Buffer; 2]>,
}

#[derive(Debug)]
struct Buffer {
    staging: Pinned<u8>,
    /// Marks the end of its last copy.
    copied: Event,
}

impl Buffer {
    fn new(device: &Device, bytes: usize) -> Result<Buffer, DriverError> {
        Ok(Buffer { staging: device.pinned(bytes)?, copied: Event::new(device)? })
    }
}

impl Uploader {
    /// With two buffers of so many bytes, a multiple of every element's.
    pub fn new(device: &Device, buffer_bytes: usize) -> Result<Uploader, DriverError> {
        let buffers = RefCell::new([Buffer::new(device, buffer_bytes)?, Buffer::new(device, buffer_bytes)?]);
        Ok(Uploader { device: device.clone(), stream: device.stream()?, buffer_bytes, buffers })
    }

    /// Waits until all values are where they belong; an error of their copies comes out here.
    pub fn finish(self) -> Result<(), DriverError> {
        self.stream.synchronize()
    }

    fn send(&self, source: &mut Source<'_>, to: ViewMut<'_, u8>) -> Result<(), DriverError> {
        let mut buffers = self.buffers.borrow_mut();
        let Buffer { staging, copied } = &buffers[0];
        // Its last copy may still read it.
        copied.synchronize()?;
        source.fill(staging, to.len());
        self.stream.copy_to_device(to, staging, 0)?;
        self.stream.mark(copied)?;
        buffers.swap(0, 1);
        Ok(())
    }
}

impl Upload for Uploader {
    fn upload_bytes<T: Element>(&self, parts: &[&[u8]]) -> Result<Memory<T>, DriverError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let mut memory = self.device.allocate(whole::<T>(bytes))?;
        let mut source = Source { next: &[], behind: parts.iter() };
        for first in (0..bytes).step_by(self.buffer_bytes) {
            let last = bytes.min(first + self.buffer_bytes);
            self.send(&mut source, memory.view_mut().cast().slice(first..last))?;
        }
        Ok(memory)
    }
}

/// What is left of some parts.
struct Source<'a> {
    next: &'a [u8],
    behind: slice::Iter<'a, &'a [u8]>,
}

impl Source<'_> {
    /// Writes as many bytes of it, which there are, to the begin of `to`.
    fn fill(&mut self, to: &Pinned<u8>, bytes: usize) {
        let mut at = 0;
        while at < bytes {
            let (now, later) = self.next.split_at(self.next.len().min(bytes - at));
            to.write(at, now);
            at += now.len();
            self.next = if later.is_empty() { self.behind.next().copied().unwrap_or_default() } else { later };
        }
    }
}
