//! Values on their way to a device: one by one, or while the next ones are made.

use std::cell::RefCell;

use super::error::DriverError;
use super::memory::{Device, Element, Memory, Pinned, ViewMut, as_bytes};
use super::stream::{Event, Stream};

/// What brings values to a device.
pub trait Upload {
    /// Memory for a copy of `values`, which may change once this returns.
    fn upload<T: Element>(&self, values: &[T]) -> Result<Memory<T>, DriverError>;
}

/// Waits for each copy.
impl Upload for Device {
    fn upload<T: Element>(&self, values: &[T]) -> Result<Memory<T>, DriverError> {
        Device::upload(self, values)
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

    fn send<T: Element>(&self, values: &[T], to: ViewMut<'_, T>) -> Result<(), DriverError> {
        let mut buffers = self.buffers.borrow_mut();
        let Buffer { staging, copied } = &buffers[0];
        // Its last copy may still read it.
        copied.synchronize()?;
        staging.write(0, as_bytes(values));
        self.stream.copy_to_device(to.cast(), staging, 0)?;
        self.stream.mark(copied)?;
        buffers.swap(0, 1);
        Ok(())
    }
}

impl Upload for Uploader {
    fn upload<T: Element>(&self, values: &[T]) -> Result<Memory<T>, DriverError> {
        let (mut memory, room) = (self.device.allocate(values.len())?, self.buffer_bytes / size_of::<T>());
        for (index, part) in values.chunks(room).enumerate() {
            let first = index * room;
            self.send(part, memory.slice_mut(first..first + part.len()))?;
        }
        Ok(memory)
    }
}
