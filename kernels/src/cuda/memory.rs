//! Memory of a device, and memory of the host that it copies from.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use half::bf16;

use super::driver::{DeviceFacts, DevicePointer, Driver};
use super::error::DriverError;
use super::region::Region;
use super::stream::Stream;

/// What memory consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the types' own names
pub enum ElementType {
    U8,
    Bf16,
    U32,
    U64,
    F32,
    /// Addresses of memory: of the device, or of others that it reaches.
    Address,
}

impl ElementType {
    /// Bytes of one.
    pub const fn bytes(self) -> usize {
        match self {
            ElementType::U8 => 1,
            ElementType::Bf16 => 2,
            ElementType::U32 | ElementType::F32 => 4,
            ElementType::U64 | ElementType::Address => 8,
        }
    }
}

/// A type of which any bits are a value, and which means the same to the kernels.
///
/// # Safety
/// No padding, no invalid bits.
pub unsafe trait Element: Copy + Send + Sync + fmt::Debug + 'static {
    /// Its name in the table of kernels.
    const TYPE: ElementType;
}

// SAFETY: numbers, of which any bits are a value.
unsafe impl Element for u8 {
    const TYPE: ElementType = ElementType::U8;
}
// SAFETY: as above.
unsafe impl Element for bf16 {
    const TYPE: ElementType = ElementType::Bf16;
}
// SAFETY: as above.
unsafe impl Element for u32 {
    const TYPE: ElementType = ElementType::U32;
}
// SAFETY: as above.
unsafe impl Element for u64 {
    const TYPE: ElementType = ElementType::U64;
}
// SAFETY: as above.
unsafe impl Element for f32 {
    const TYPE: ElementType = ElementType::F32;
}

// SAFETY: a number in a wrapper without padding.
unsafe impl Element for DevicePointer {
    const TYPE: ElementType = ElementType::Address;
}

/// A device: the driver that is asked for everything. Clones are the same device.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Arc<dyn Driver>,
    /// Where memory is allocated, if that is anywhere in particular.
    region: Option<Arc<Region>>,
}

impl Device {
    /// The device that a driver drives.
    pub fn new(driver: Arc<dyn Driver>) -> Device {
        Device { driver, region: None }
    }

    /// The same device, whose memory is allocated in `region`, if there is one.
    pub fn within(&self, region: Option<&Arc<Region>>) -> Device {
        Device { driver: Arc::clone(&self.driver), region: region.cloned() }
    }

    /// What it is.
    pub fn facts(&self) -> &DeviceFacts {
        self.driver.facts()
    }

    /// The driver.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Memory for `len` elements. Its contents are whatever was there.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Memory<T>, DriverError> {
        let bytes = bytes_of::<T>(len).max(1);
        let pointer = match &self.region {
            Some(region) => region.allocate(bytes)?,
            None => self.driver.allocate(bytes)?,
        };
        Ok(Memory { device: self.clone(), pointer, len, element: PhantomData })
    }

    /// Memory that holds a copy of `values`, which this waits for: for loading and for tests.
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<Memory<T>, DriverError> {
        self.upload_bytes(as_bytes(values))
    }

    /// The same of elements' bytes.
    pub(super) fn upload_bytes<T: Element>(&self, bytes: &[u8]) -> Result<Memory<T>, DriverError> {
        let mut memory = self.allocate(whole::<T>(bytes.len()))?;
        let stream = self.stream()?;
        // SAFETY: the bytes are borrowed until the copy is waited for, whether it could be issued or not.
        let issued = unsafe {
            let to = memory.view_mut().pointer();
            self.driver.copy_to_device(to, bytes.as_ptr(), bytes.len(), stream.handle())
        };
        let done = stream.synchronize();
        issued.and(done).map(|()| memory)
    }

    /// Pinned memory of the host for `len` elements. Its contents are whatever was there.
    pub fn pinned<T: Element>(&self, len: usize) -> Result<Pinned<T>, DriverError> {
        let pointer = self.driver.allocate_pinned(bytes_of::<T>(len).max(1))?;
        Ok(Pinned { device: self.clone(), pointer: pointer.cast(), len })
    }

    /// A new stream.
    pub fn stream(&self) -> Result<Stream, DriverError> {
        Stream::new(self)
    }
}

/// Bytes of `len` elements.
pub(crate) fn bytes_of<T>(len: usize) -> usize {
    len * size_of::<T>()
}

/// The bytes of values.
pub(super) fn as_bytes<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: elements have no padding, and any bytes are bytes.
    unsafe { slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Memory of a device, given back when dropped, once all work issued before is done; in a region, with the region.
#[derive(Debug)]
pub struct Memory<T: Element> {
    device: Device,
    pointer: DevicePointer,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Memory<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it, to read.
    pub fn view(&self) -> View<'_, T> {
        View { pointer: self.pointer, len: self.len, owner: PhantomData }
    }

    /// All of it, to write.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { pointer: self.pointer, len: self.len, owner: PhantomData }
    }

    /// A part, to read.
    ///
    /// # Panics
    /// When the range is outside.
    pub fn slice(&self, range: Range<usize>) -> View<'_, T> {
        self.view().slice(range)
    }

    /// A part, to write.
    ///
    /// # Panics
    /// When the range is outside.
    pub fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        self.view_mut().slice(range)
    }

    /// A copy of all of it, once `stream` has done all its work: for tests and references, not on the way of a step.
    pub fn read(&self, stream: &Stream) -> Result<Vec<T>, DriverError> {
        let staging = self.device.pinned::<T>(self.len)?;
        stream.copy_to_host(&staging, 0, self.view())?;
        stream.synchronize()?;
        Ok(staging.read(0..self.len))
    }
}

impl<T: Element> Drop for Memory<T> {
    fn drop(&mut self) {
        // What lies in a region is given back with all of it.
        if self.device.region.is_none() {
            // A device that is lost has freed everything; there is nobody to tell.
            let _ = self.device.driver.free(self.pointer);
        }
    }
}

/// Device memory that may be read.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T: Element> {
    pointer: DevicePointer,
    len: usize,
    owner: PhantomData<&'a T>,
}

impl<'a, T: Element> View<'a, T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        bytes_of::<T>(self.len)
    }

    /// Its first byte.
    pub fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    /// A part.
    ///
    /// # Panics
    /// When the range is outside.
    pub fn slice(self, range: Range<usize>) -> View<'a, T> {
        let (pointer, len) = part::<T>(self.pointer, self.len, range);
        View { pointer, len, owner: PhantomData }
    }

    /// The same bytes as other elements.
    ///
    /// # Panics
    /// When they are no whole ones.
    pub fn cast<U: Element>(self) -> View<'a, U> {
        View { pointer: self.pointer, len: whole::<U>(self.bytes()), owner: PhantomData }
    }
}

/// Device memory that may be written.
#[derive(Debug)]
pub struct ViewMut<'a, T: Element> {
    pointer: DevicePointer,
    len: usize,
    owner: PhantomData<&'a mut T>,
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        bytes_of::<T>(self.len)
    }

    /// Its first byte.
    pub fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    /// A part.
    ///
    /// # Panics
    /// When the range is outside.
    pub fn slice(self, range: Range<usize>) -> ViewMut<'a, T> {
        let (pointer, len) = part::<T>(self.pointer, self.len, range);
        ViewMut { pointer, len, owner: PhantomData }
    }

    /// The same bytes as other elements.
    ///
    /// # Panics
    /// When they are no whole ones.
    pub fn cast<U: Element>(self) -> ViewMut<'a, U> {
        ViewMut { pointer: self.pointer, len: whole::<U>(self.bytes()), owner: PhantomData }
    }

    /// The same memory, borrowed for a while.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { pointer: self.pointer, len: self.len, owner: PhantomData }
    }

    /// The same memory, to read.
    pub fn as_view(&self) -> View<'_, T> {
        View { pointer: self.pointer, len: self.len, owner: PhantomData }
    }
}

/// How many elements so many bytes are.
///
/// # Panics
/// When they are no whole ones.
pub(super) fn whole<T>(bytes: usize) -> usize {
    assert!(bytes.is_multiple_of(size_of::<T>()), "{bytes} bytes of elements of {}", size_of::<T>());
    bytes / size_of::<T>()
}

fn part<T>(pointer: DevicePointer, len: usize, range: Range<usize>) -> (DevicePointer, usize) {
    assert!(range.start <= range.end && range.end <= len, "{range:?} of {len} elements");
    (pointer.plus(bytes_of::<T>(range.start)), range.len())
}

/// Pinned memory of the host, which copies run to and from while the program goes on.
///
/// It is read and written by copying, never by reference: a copy that still runs may change it. What is read before that copy is
/// waited for means nothing, and nothing is written that a copy still reads; single words are told to kernels that run by
/// [`Pinned::set`].
pub struct Pinned<T: Element> {
    device: Device,
    pointer: NonNull<T>,
    len: usize,
}

// SAFETY: the memory is reached through raw copies of plain numbers alone.
unsafe impl<T: Element> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Pinned<T> {}

impl<T: Element> Pinned<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes `values` from element `at` on.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn write(&self, at: usize, values: &[T]) {
        let at = self.at(at..at + values.len());
        // SAFETY: `at` has room for the values, which lie elsewhere: nobody has this memory as a slice.
        unsafe { at.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }

    /// Writes one element, which kernels may be reading.
    ///
    /// # Panics
    /// When it is outside.
    pub fn set(&self, at: usize, value: T) {
        // SAFETY: the place is inside, and elements are plain numbers.
        unsafe { self.at(at..at + 1).write_volatile(value) };
    }

    /// All of it as kernels read it where it is: addresses of the host and of all devices are unified.
    pub fn on_device(&self) -> View<'_, T> {
        View { pointer: DevicePointer(self.pointer.as_ptr() as u64), len: self.len, owner: PhantomData }
    }

    /// The same as kernels write it.
    pub fn on_device_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { pointer: DevicePointer(self.pointer.as_ptr() as u64), len: self.len, owner: PhantomData }
    }

    /// A copy of a part.
    ///
    /// # Panics
    /// When the range is outside.
    pub fn read(&self, range: Range<usize>) -> Vec<T> {
        let (at, len) = (self.at(range.clone()), range.len());
        let mut values = Vec::with_capacity(len);
        // SAFETY: the range is inside, there is room for as many, and any bits are a value.
        unsafe {
            at.copy_to_nonoverlapping(values.as_mut_ptr(), len);
            values.set_len(len);
        }
        values
    }

    /// Where a part lies.
    pub(crate) fn at(&self, range: Range<usize>) -> *mut T {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: the start is inside.
        unsafe { self.pointer.as_ptr().add(range.start) }
    }
}

impl<T: Element> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} {:?})", self.len, T::TYPE)
    }
}

impl<T: Element> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: it is ours, the driver waits for the copies that use it, and nobody else knows it.
        let _ = unsafe { self.device.driver.free_pinned(self.pointer.cast()) };
    }
}
