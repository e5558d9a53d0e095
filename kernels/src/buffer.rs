//! Large zeroed arrays on huge pages.

#![allow(unsafe_code)]

use crate::refused;
use std::alloc::{Layout, handle_alloc_error};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

/// Numbers, and arrays of them: any bytes are a value, zero bytes are zeros, and there are no gaps.
///
/// # Safety
/// Every pattern of bits is a value of the type, and all of its bytes belong to it.
pub(crate) unsafe trait Zeroable: Copy {}

// SAFETY: every pattern of bits is a number.
unsafe impl Zeroable for f32 {}
// SAFETY: every pattern of bits is a number.
unsafe impl Zeroable for u8 {}
// SAFETY: every pattern of bits is a number.
unsafe impl Zeroable for i8 {}
// SAFETY: every pattern of bits is a number.
unsafe impl Zeroable for half::f16 {}
// SAFETY: every pattern of bits is a number.
unsafe impl Zeroable for half::bf16 {}
// SAFETY: an array of such values has no gaps.
unsafe impl<T: Zeroable, const N: usize> Zeroable for [T; N] {}

/// A zeroed array in its own anonymous mapping, page-aligned, on huge pages where the system has them: a weight matrix
/// or a layer of the cache is read end to end, and small pages would cost a table walk every 4 KiB. Pages take memory
/// when they are first written.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: the buffer owns its mapping, like a Vec.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: shared access only reads, like a Vec.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Zeroable> Buffer<T> {
    /// `len` zeros. Ends the process when the system refuses the memory, as `Vec` does.
    pub(crate) fn zeroed(len: usize) -> Self {
        const { assert!(align_of::<T>() <= 4096 && size_of::<T>() > 0) };
        let Ok(layout) = Layout::array::<T>(len) else { panic!("{len} values overflow the address space") };
        if len == 0 {
            return Buffer { start: NonNull::dangling(), len };
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping touches no existing memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), layout.size(), protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            refuse(layout);
        }
        #[cfg(target_os = "linux")]
        // SAFETY: advice on the mapping just made; a refusal changes nothing.
        unsafe {
            libc::madvise(start, layout.size(), libc::MADV_HUGEPAGE);
        }
        match NonNull::new(start.cast()) {
            Some(start) => Buffer { start, len },
            None => refuse(layout),
        }
    }
}

/// Ends the process for want of memory like this.
fn refuse(layout: Layout) -> ! {
    refused::note(layout.size());
    handle_alloc_error(layout)
}

impl<T: Zeroable> Buffer<T> {
    /// The bytes of some values.
    ///
    /// # Panics
    /// If there are no such values.
    pub(crate) fn bytes(&self, values: Range<usize>) -> &[u8] {
        let values = &self[values];
        // SAFETY: numbers are their bytes, without gaps.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
    }

    /// The same, to be written: any bytes are numbers.
    pub(crate) fn bytes_mut(&mut self, values: Range<usize>) -> &mut [u8] {
        let values = &mut self[values];
        // SAFETY: as for `bytes`; every pattern of bits is a number of these types, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
    }
}

impl Buffer<u8> {
    /// The bytes as values of another type.
    ///
    /// # Panics
    /// If they are no whole number of these.
    pub(crate) fn of<V: Zeroable>(&self) -> &[V] {
        let (start, count) = self.start_of::<V>();
        // SAFETY: `start_of` says where so many such values lie.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), count) }
    }

    /// The same, to be written.
    pub(crate) fn of_mut<V: Zeroable>(&mut self) -> &mut [V] {
        let (start, count) = self.start_of::<V>();
        // SAFETY: as for `of`; any such values are bytes, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), count) }
    }

    /// Where the bytes lie as values of another type, which any bytes are, and how many they are: the mapping begins at
    /// a page.
    fn start_of<V: Zeroable>(&self) -> (NonNull<V>, usize) {
        const { assert!(align_of::<V>() <= 4096 && size_of::<V>() > 0) };
        assert!(self.len.is_multiple_of(size_of::<V>()), "{} bytes of values of {}", self.len, size_of::<V>());
        let start = if self.len == 0 { NonNull::dangling() } else { self.start.cast() };
        (start, self.len / size_of::<V>())
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` zeroable values lie from `start` on, mapped until drop.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: exactly the mapping that `zeroed` made, which no reference outlives.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len * size_of::<T>()) };
        }
    }
}
