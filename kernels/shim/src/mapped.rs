//! Memory that ends where a page begins that cannot be touched.

use std::ptr::NonNull;

/// Starts at a multiple of this, as CUDA's allocations do.
const ALIGNMENT: usize = 256;
const PAGE: usize = 4096;
/// What lies between the memory's end and the page.
const CANARY: u8 = 0xa5;
/// Bytes of which no float is a number.
pub(crate) const POISON: u8 = 0xff;

/// Poisoned memory with a guard behind it.
#[derive(Debug)]
pub(crate) struct Mapped {
    base: NonNull<u8>,
    mapped: usize,
    start: usize,
    bytes: usize,
}

// SAFETY: plain memory; who uses it when is the driver's business.
unsafe impl Send for Mapped {}

impl Mapped {
    pub(crate) fn new(bytes: usize) -> Option<Mapped> {
        let room = bytes.checked_next_multiple_of(PAGE)?;
        let mapped = room.checked_add(PAGE)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at no address in particular; its last page is inside.
        let base = unsafe {
            let base = libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0);
            if base == libc::MAP_FAILED {
                return None;
            }
            libc::mprotect(base.byte_add(room), PAGE, libc::PROT_NONE);
            NonNull::new(base.cast::<u8>())?
        };
        let start = (room - bytes) / ALIGNMENT * ALIGNMENT;
        let memory = Mapped { base, mapped, start, bytes };
        // SAFETY: the range from `start` to the guard is mapped and ours.
        unsafe {
            memory.pointer().write_bytes(POISON, bytes);
            memory.pointer().add(bytes).write_bytes(CANARY, room - start - bytes);
        }
        Some(memory)
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(self.start) }
    }

    pub(crate) fn address(&self) -> u64 {
        self.pointer() as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether something wrote between the end and the guard.
    pub(crate) fn overrun(&self) -> bool {
        let slack = self.mapped - PAGE - self.start - self.bytes;
        // SAFETY: inside the mapping.
        let slack = unsafe { std::slice::from_raw_parts(self.pointer().add(self.bytes), slack) };
        slack.iter().any(|&byte| byte != CANARY)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` and used by nobody any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}
