//! Memory that gets its addresses by mapping, and CUDA's rules on it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use windlass_kernels::cuda::DriverError;

use crate::mapped::POISON;
use crate::state::refused;

/// What bytes and addresses are multiples of: more than a page of the host, and less than a GPU's, for models of tests are
/// small.
pub(crate) const GRANULARITY: usize = 8 << 10;

/// Reserved addresses, and memory that may lie behind them.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    reserved: BTreeMap<u64, Reservation>,
    /// Memory whose handle was not released, by handle.
    physical: HashMap<u64, Arc<Physical>>,
}

/// Memory without an address: it goes when nothing names it any more.
#[derive(Debug)]
struct Physical {
    file: OwnedFd,
    bytes: usize,
    /// Counts what the device has given out.
    allocated: Arc<AtomicUsize>,
}

/// Addresses in one row.
#[derive(Debug)]
pub(crate) struct Reservation {
    bytes: usize,
    /// Distinguishes what came to lie at one address.
    pub(crate) serial: u64,
    /// By address.
    pieces: BTreeMap<u64, Piece>,
    #[expect(dead_code, reason = "held until it is dropped")]
    host: HostRange,
}

#[derive(Debug)]
struct Piece {
    memory: Arc<Physical>,
    /// Devices that may use it.
    allowed: BTreeSet<usize>,
}

impl Mappings {
    pub(crate) fn reserve(&mut self, bytes: usize, serial: u64) -> Result<u64, DriverError> {
        const CALL: &str = "cuMemAddressReserve";
        check_granular(CALL, &[bytes])?;
        let host =
            HostRange::new(bytes + GRANULARITY).ok_or_else(|| refused(CALL, "the host has no addresses left"))?;
        let at = host.address.next_multiple_of(GRANULARITY) as u64;
        self.reserved.insert(at, Reservation { bytes, serial, pieces: BTreeMap::new(), host });
        Ok(at)
    }

    pub(crate) fn unreserve(&mut self, at: u64, bytes: usize) -> Result<(), DriverError> {
        const CALL: &str = "cuMemAddressFree";
        match self.reserved.get(&at) {
            Some(found) if found.bytes != bytes => Err(refused(CALL, format!("{} bytes were reserved", found.bytes))),
            Some(found) if !found.pieces.is_empty() => Err(refused(CALL, "memory is mapped there")),
            Some(_) => {
                self.reserved.remove(&at);
                Ok(())
            }
            None => Err(refused(CALL, format!("{at:#x} was not reserved, or was given back before"))),
        }
    }

    pub(crate) fn create(
        &mut self,
        handle: u64,
        bytes: usize,
        allocated: &Arc<AtomicUsize>,
    ) -> Result<(), DriverError> {
        const CALL: &str = "cuMemCreate";
        check_granular(CALL, &[bytes])?;
        let memory = Physical::new(bytes, allocated).ok_or_else(|| refused(CALL, "the host has no room"))?;
        self.physical.insert(handle, Arc::new(memory));
        Ok(())
    }

    pub(crate) fn release(&mut self, handle: u64) -> Result<(), DriverError> {
        match self.physical.remove(&handle) {
            Some(_) => Ok(()),
            None => Err(refused("cuMemRelease", "the memory was not created, or was released before")),
        }
    }

    pub(crate) fn map(&mut self, at: u64, bytes: usize, handle: u64) -> Result<(), DriverError> {
        const CALL: &str = "cuMemMap";
        check_granular(CALL, &[at as usize, bytes])?;
        let Some(memory) = self.physical.get(&handle).cloned() else {
            return Err(refused(CALL, "the memory was not created, or was released before"));
        };
        if bytes != memory.bytes {
            return Err(refused(CALL, format!("the memory has {} bytes, not {bytes}", memory.bytes)));
        }
        let Some(reservation) = self.around_mut(at, bytes) else {
            return Err(refused(CALL, format!("{bytes} bytes at {at:#x} are not reserved, or not in one piece")));
        };
        if reservation.pieces_in(at, bytes).next().is_some() {
            return Err(refused(CALL, format!("memory is mapped at {at:#x}, or behind it")));
        }
        memory.show(at);
        reservation.pieces.insert(at, Piece { memory, allowed: BTreeSet::new() });
        Ok(())
    }

    pub(crate) fn allow(&mut self, at: u64, bytes: usize, device: usize) -> Result<(), DriverError> {
        const CALL: &str = "cuMemSetAccess";
        let nothing = || refused(CALL, format!("nothing is mapped at {at:#x}, or not in all of {bytes} bytes"));
        let reservation = self.around_mut(at, bytes).ok_or_else(nothing)?;
        if !reservation.is_covered_exactly(at, bytes) {
            return Err(nothing());
        }
        for (at, piece) in reservation.pieces.range_mut(at..at + bytes as u64) {
            piece.allowed.insert(device);
            protect(*at, piece.memory.bytes, libc::PROT_READ | libc::PROT_WRITE);
        }
        Ok(())
    }

    pub(crate) fn unmap(&mut self, at: u64, bytes: usize) -> Result<(), DriverError> {
        let nothing = || refused("cuMemUnmap", format!("what is mapped at {at:#x} has not these {bytes} bytes"));
        let reservation = self.around_mut(at, bytes).ok_or_else(nothing)?;
        if !reservation.is_covered_exactly(at, bytes) {
            return Err(nothing());
        }
        hide(at, bytes);
        reservation.pieces.retain(|place, _| !(at..at + bytes as u64).contains(place));
        Ok(())
    }

    /// The addresses among which these are.
    pub(crate) fn around(&self, at: u64, bytes: usize) -> Option<&Reservation> {
        let (start, found) = self.reserved.range(..=at).next_back()?;
        (at + bytes as u64 <= start + found.bytes as u64).then_some(found)
    }

    fn around_mut(&mut self, at: u64, bytes: usize) -> Option<&mut Reservation> {
        let (start, found) = self.reserved.range_mut(..=at).next_back()?;
        (at + bytes as u64 <= start + found.bytes as u64).then_some(found)
    }
}

impl Reservation {
    /// Why `device` may not use these addresses.
    pub(crate) fn check(&self, at: u64, bytes: usize, device: usize) -> Result<(), String> {
        let end = at + bytes as u64;
        let mut reached = at;
        for (start, piece) in self.pieces_in(at, bytes) {
            if start > reached {
                break;
            }
            if !piece.allowed.contains(&device) {
                return Err(format!("memory is mapped at {start:#x}, which this device was not allowed to use"));
            }
            reached = start + piece.memory.bytes as u64;
        }
        if reached >= end { Ok(()) } else { Err(format!("{reached:#x} is reserved, and nothing is mapped there")) }
    }

    /// Pieces that share an address with these, in their order.
    fn pieces_in(&self, at: u64, bytes: usize) -> impl Iterator<Item = (u64, &Piece)> {
        let pieces = self.pieces.range(..at + bytes as u64).map(|(start, piece)| (*start, piece));
        pieces.filter(move |(start, piece)| start + piece.memory.bytes as u64 > at)
    }

    /// Whether whole pieces lie there, side by side, and nothing is left over of any.
    fn is_covered_exactly(&self, at: u64, bytes: usize) -> bool {
        let mut reached = at;
        for (start, piece) in self.pieces_in(at, bytes) {
            if start != reached {
                return false;
            }
            reached += piece.memory.bytes as u64;
        }
        reached == at + bytes as u64
    }
}

fn check_granular(call: &'static str, numbers: &[usize]) -> Result<(), DriverError> {
    match numbers.iter().find(|&&number| number == 0 || !number.is_multiple_of(GRANULARITY)) {
        Some(odd) => Err(refused(call, format!("{odd:#x} is no multiple of {GRANULARITY:#x}"))),
        None => Ok(()),
    }
}

impl Physical {
    /// Poisoned.
    fn new(bytes: usize, allocated: &Arc<AtomicUsize>) -> Option<Physical> {
        // SAFETY: the name ends with a zero, and a descriptor that is not negative is new and ours.
        let file = unsafe {
            let file = libc::memfd_create(c"device memory".as_ptr(), libc::MFD_CLOEXEC);
            (file >= 0).then(|| OwnedFd::from_raw_fd(file))?
        };
        // SAFETY: the file is ours.
        let sized = unsafe { libc::ftruncate(file.as_raw_fd(), bytes as libc::off_t) };
        allocated.fetch_add(bytes, Ordering::Relaxed);
        let memory = Physical { file, bytes, allocated: Arc::clone(allocated) };
        (sized == 0 && memory.poison()).then_some(memory)
    }

    fn poison(&self) -> bool {
        let (protection, file) = (libc::PROT_READ | libc::PROT_WRITE, self.file.as_raw_fd());
        // SAFETY: a new mapping of the whole file, written inside its bounds and taken away.
        unsafe {
            let at = libc::mmap(null_mut(), self.bytes, protection, libc::MAP_SHARED, file, 0);
            if at == libc::MAP_FAILED {
                return false;
            }
            at.cast::<u8>().write_bytes(POISON, self.bytes);
            libc::munmap(at, self.bytes) == 0
        }
    }

    /// Puts it at addresses that are reserved. Who touches it there before it is allowed to ends the process.
    fn show(&self, at: u64) {
        let (flags, file) = (libc::MAP_SHARED | libc::MAP_FIXED, self.file.as_raw_fd());
        // SAFETY: the addresses are of a reservation's range, in which nothing else lies.
        let shown = unsafe { libc::mmap(at as *mut _, self.bytes, libc::PROT_NONE, flags, file, 0) };
        assert_ne!(shown, libc::MAP_FAILED, "memory of this process cannot be mapped");
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        self.allocated.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Addresses of this process with nothing behind them.
#[derive(Debug)]
struct HostRange {
    address: usize,
    bytes: usize,
}

const NOTHING: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

impl HostRange {
    fn new(bytes: usize) -> Option<HostRange> {
        // SAFETY: a new mapping, at no address in particular, that nobody can touch.
        let at = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_NONE, NOTHING, -1, 0) };
        (at != libc::MAP_FAILED).then_some(HostRange { address: at as usize, bytes })
    }
}

impl Drop for HostRange {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and what was shown there since is of no use without the reservation.
        unsafe { libc::munmap(self.address as *mut _, self.bytes) };
    }
}

fn hide(at: u64, bytes: usize) {
    // SAFETY: whole pieces of a reservation, over which nobody has work left.
    let hidden = unsafe { libc::mmap(at as *mut _, bytes, libc::PROT_NONE, NOTHING | libc::MAP_FIXED, -1, 0) };
    assert_ne!(hidden, libc::MAP_FAILED, "memory of this process cannot be taken away");
}

fn protect(at: u64, bytes: usize, protection: i32) {
    // SAFETY: a piece of a reservation.
    let done = unsafe { libc::mprotect(at as *mut _, bytes, protection) };
    assert_eq!(done, 0, "memory of this process cannot be shown");
}
