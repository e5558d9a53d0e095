//! Memory that was refused: how much a thread asked for last, for the last word of a process that ends of it.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;

thread_local! {
    /// Constant and without a destructor: reading it allocates nothing, even in a signal handler.
    static REFUSED: Cell<usize> = const { Cell::new(0) };
}

/// Bytes that this thread asked for when it was refused memory last; 0 where it never was. May be called in a signal handler.
pub fn refused_bytes() -> usize {
    REFUSED.get()
}

/// Notes that so many bytes were refused.
pub(crate) fn note(bytes: usize) {
    REFUSED.set(bytes);
}

/// An allocator that notes what it refuses. Who can do without is still told of it and goes on; who cannot ends the process by SIGABRT.
#[derive(Debug)]
pub struct Noting<A>(pub A);

impl<A> Noting<A> {
    fn noted(memory: *mut u8, bytes: usize) -> *mut u8 {
        if memory.is_null() {
            note(bytes);
        }
        memory
    }
}

// SAFETY: every call is the inner allocator's, with what the caller promises and what it gives.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Noting<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises what the inner allocator asks for.
        Self::noted(unsafe { self.0.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises what the inner allocator asks for.
        Self::noted(unsafe { self.0.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller promises what the inner allocator asks for.
        Self::noted(unsafe { self.0.realloc(memory, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller promises what the inner allocator asks for.
        unsafe { self.0.dealloc(memory, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::alloc::System;

    #[test]
    fn what_is_refused_is_noted_and_told() {
        let (allocator, bytes) = (Noting(System), isize::MAX as usize - 63);
        let layout = Layout::from_size_align(bytes, 64).unwrap();
        assert_eq!(refused_bytes(), 0);
        // SAFETY: the layout has a size, and nothing is done with what is given.
        assert!(unsafe { allocator.alloc(layout) }.is_null());
        assert_eq!(refused_bytes(), bytes);
    }
}
