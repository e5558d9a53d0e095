//! Memory of a device that is given back for a while and keeps its addresses: pointers and graphs that name it stay right.
//!
//! Addresses are reserved once, for as much as the device has. What is allocated lies side by side behind them, and memory is
//! mapped there as it is needed, so that however many matrices round up to the device's granularity once. A piece's handle
//! is released as soon as it is mapped: from then on unmapping gives the memory back.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::DevicePointer;
use super::error::DriverError;
use super::memory::{Device, Pinned};
use super::stream::Stream;

/// What is allocated starts at multiples of this, as the driver's own allocations do.
const ALIGNMENT: usize = 256;

/// Memory that comes and goes at the same addresses. What is allocated in it ([`Device::within`]) goes with it at last.
pub struct Region {
    device: Device,
    base: DevicePointer,
    reserved: usize,
    granularity: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes that were allocated, side by side.
    used: usize,
    /// Bytes of each piece of memory, side by side.
    pieces: Vec<usize>,
    /// How many of them are there: all, or none.
    there: usize,
    /// What each of them held when it was kept.
    kept: Option<Vec<Pinned<u8>>>,
}

impl State {
    fn bytes(&self) -> usize {
        self.pieces.iter().sum()
    }

    fn is_held(&self) -> bool {
        self.there == self.pieces.len()
    }

    /// Where pieces begin and end, from the start of the region.
    fn places(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let place = |bytes: &usize| {
            end += bytes;
            end - bytes..end
        };
        self.pieces.iter().map(place).collect()
    }
}

impl Region {
    /// A region with nothing in it; none where the device maps no memory.
    pub fn of(device: &Device) -> Result<Option<Arc<Region>>, DriverError> {
        let Some(granularity) = device.facts().map_granularity else { return Ok(None) };
        let (device, reserved) = (device.within(None), device.facts().memory_bytes.next_multiple_of(granularity));
        let base = device.driver().reserve(reserved)?;
        Ok(Some(Arc::new(Region { device, base, reserved, granularity, state: Mutex::default() })))
    }

    /// Bytes of memory that it takes while it is held.
    pub fn bytes(&self) -> usize {
        self.state().bytes()
    }

    /// Bytes of the host that [`Region::keep`] will take.
    pub fn bytes_to_keep(&self) -> usize {
        let state = self.state();
        if state.kept.is_some() { 0 } else { state.bytes() }
    }

    /// Whether its memory is there. What is allocated in it may be used only then.
    pub fn is_held(&self) -> bool {
        self.state().is_held()
    }

    /// Copies what it holds to pinned memory of the host, from where it comes back whenever memory is taken again. It is
    /// copied once: nobody writes to the region after that, and the copy stays until the region goes.
    pub fn keep(&self) -> Result<(), DriverError> {
        let mut state = self.state();
        if state.kept.is_none() {
            let stream = self.device.stream()?;
            let copied = state.places().into_iter().map(|place| self.copied(place, &stream));
            let kept: Vec<_> = copied.collect::<Result<_, _>>()?;
            stream.synchronize()?;
            state.kept = Some(kept);
        }
        Ok(())
    }

    /// Gives the memory back, once all work issued so far is done.
    pub fn give_back(&self) -> Result<(), DriverError> {
        self.unmap(&mut self.state())
    }

    /// Takes memory again, at the same addresses: with what was kept, or with whatever was there. After an error there is
    /// none, and it may be tried again.
    pub fn take_back(&self) -> Result<(), DriverError> {
        let (mut state, stream) = (self.state(), self.device.stream()?);
        let taken = self.take(&mut state, &stream);
        let taken = taken.and(stream.synchronize());
        taken.inspect_err(|_| drop(self.unmap(&mut state)))
    }

    /// Memory for so many bytes.
    pub(super) fn allocate(&self, bytes: usize) -> Result<DevicePointer, DriverError> {
        let mut state = self.state();
        if !state.is_held() {
            return Err(DriverError::refused("an allocation", "the region's memory was given back"));
        }
        let (start, there) = (state.used.next_multiple_of(ALIGNMENT), state.bytes());
        let missing = (start + bytes).saturating_sub(there).next_multiple_of(self.granularity);
        if there + missing > self.reserved {
            let (free, total) = (self.reserved - there, self.reserved);
            return Err(DriverError::OutOfMemory { bytes, free, total });
        }
        if missing > 0 {
            self.map(there..there + missing)?;
            state.pieces.push(missing);
            state.there += 1;
        }
        state.used = start + bytes;
        // What was kept lacks what will be written here.
        state.kept = None;
        Ok(self.base.plus(start))
    }

    /// Takes pieces one after the other: while one is filled, the next is mapped.
    fn take(&self, state: &mut State, stream: &Stream) -> Result<(), DriverError> {
        for (index, place) in state.places().into_iter().enumerate().skip(state.there) {
            let (at, bytes) = (self.base.plus(place.start), place.len());
            self.map(place)?;
            state.there += 1;
            if let Some(kept) = &state.kept {
                let from = kept[index].at(0..bytes).cast();
                // SAFETY: pinned memory is given back only after the work that was issued before.
                unsafe { self.device.driver().copy_to_device(at, from, bytes, stream.handle()) }?;
            }
        }
        Ok(())
    }

    /// Pinned memory to which a piece is being copied.
    fn copied(&self, place: Range<usize>, stream: &Stream) -> Result<Pinned<u8>, DriverError> {
        let (at, bytes) = (self.base.plus(place.start), place.len());
        let kept = self.device.pinned(bytes)?;
        // SAFETY: as above; nobody reads it before the copy is done.
        unsafe { self.device.driver().copy_to_host(kept.at(0..bytes), at, bytes, stream.handle()) }?;
        Ok(kept)
    }

    /// New memory at a piece's addresses.
    fn map(&self, place: Range<usize>) -> Result<(), DriverError> {
        let (driver, at, bytes) = (self.device.driver(), self.base.plus(place.start), place.len());
        let memory = driver.create_physical(bytes)?;
        let mapped = driver.map(at, bytes, memory);
        // What is mapped stays without its handle, and what is not goes with it.
        let released = driver.release_physical(memory);
        mapped?;
        let usable = released.and_then(|()| driver.allow(at, bytes));
        usable.inspect_err(|_| drop(driver.unmap(at, bytes)))
    }

    fn unmap(&self, state: &mut State) -> Result<(), DriverError> {
        for place in state.places().drain(..state.there).rev() {
            self.device.driver().unmap(self.base.plus(place.start), place.len())?;
            state.there -= 1;
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No panic leaves it otherwise than it was.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes at {:#x})", self.bytes(), self.base.0)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // A device that is lost has freed everything; there is nobody to tell.
        let _ = self.give_back();
        let _ = self.device.driver().unreserve(self.base, self.reserved);
    }
}
