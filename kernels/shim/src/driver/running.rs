//! What was issued is carried out: when somebody waits for it, at random before, or in the device's own time.

use std::sync::Weak;
use std::thread;

use windlass_kernels::cuda::ElementType;
use windlass_kernels::cuda::launch::{Argument, Launch};

use super::machine::Kernels;
use super::{HostDriver, Turn, lock};
use crate::kernels;
use crate::state::{EventState, State, Work};

impl HostDriver {
    /// Runs the first piece of work of a stream, and what it waits for. Whether there was one.
    pub(super) fn run_one(&self, turn: &Turn<'_>, stream: u64) -> bool {
        let Some(work) = self.state().streams.get_mut(&stream).and_then(|stream| stream.pending.pop_front()) else {
            return false;
        };
        if let Work::Wait { event, version } = work {
            self.reach_event(turn, event, version);
        } else {
            self.perform(turn, &work);
        }
        self.ran.notify_all();
        true
    }

    pub(super) fn drain(&self, turn: &Turn<'_>, stream: u64) {
        while self.run_one(turn, stream) {}
    }

    pub(super) fn drain_all(&self, turn: &Turn<'_>) {
        self.streams().into_iter().for_each(|stream| self.drain(turn, stream));
    }

    fn streams(&self) -> Vec<u64> {
        self.state().streams.keys().copied().collect()
    }

    /// Runs the event's stream up to the recording of `version`.
    pub(super) fn reach_event(&self, turn: &Turn<'_>, event: u64, version: u64) {
        while let Some(EventState { done, stream, .. }) = self.event(event) {
            if done >= version || !self.run_one(turn, stream) {
                return;
            }
        }
    }

    /// Waits until the device has come to the recording of `version` in its own time, or is lost. Who takes turns with it instead
    /// may have to wait for what runs behind the event, and with that for other devices.
    pub(super) fn wait_for_event(&self, event: u64, version: u64) {
        let is_ahead = |state: &mut State| {
            state.lost.is_none() && state.events.get(&event).is_some_and(|event| event.done < version)
        };
        drop(self.ran.wait_while(self.state(), is_ahead));
    }

    fn event(&self, event: u64) -> Option<EventState> {
        self.state().events.get(&event).copied()
    }

    pub(super) fn perform(&self, _turn: &Turn<'_>, work: &Work) {
        if self.state().meet_fate().is_some() {
            return;
        }
        match work {
            // SAFETY: the ranges were checked when this was issued, and memory is freed only once all work is done.
            Work::Copy { to, from, bytes } => unsafe { std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes) },
            // SAFETY: as above.
            Work::Fill { at, byte, bytes } => unsafe { (*at as *mut u8).write_bytes(*byte, *bytes) },
            Work::Launch(launch) => {
                let failed = self.run_kernel(launch).err();
                self.state().lost = failed;
            }
            Work::Record { event, version } => {
                if let Some(event) = self.state().events.get_mut(event) {
                    event.done = *version;
                }
            }
            Work::Gather(gather) => gather.run(),
            Work::Multiply(product) => product.run(),
            Work::Wait { .. } => {}
        }
    }

    fn run_kernel(&self, launch: &Launch) -> Result<(), String> {
        self.check_addresses(launch)?;
        if self.machine.kernels == Kernels::Record {
            return Ok(());
        }
        // SAFETY: the launch was checked when issued, and its memory is still there.
        unsafe { kernels::run(launch, self.random()) }?;
        let memories = self.memories();
        for (address, bytes) in Work::Launch(Box::new(*launch)).memory() {
            if memories.holding(address, bytes).is_some_and(|allocation| allocation.memory.overrun()) {
                return Err(format!("kernel {} wrote behind an allocation", launch.kernel().spec().name));
            }
        }
        Ok(())
    }

    /// Memory that a kernel finds through other memory: a device that does not reach it is lost.
    fn check_addresses(&self, launch: &Launch) -> Result<(), String> {
        let (memories, reachable) = (self.memories(), lock(&self.reachable));
        for address in launch.arguments().iter().flat_map(addresses) {
            if memories.check((address, 1), self.facts.ordinal, &reachable).is_err() {
                let name = launch.kernel().spec().name;
                return Err(format!(
                    "CUDA_ERROR_ILLEGAL_ADDRESS: kernel {name} touches {address:#x}, which this device does not reach"
                ));
            }
        }
        Ok(())
    }
}

/// A device's own time, as long as it is there: what is pending runs whether somebody waits for it or not.
pub(super) fn run_pending(own: &Weak<HostDriver>) {
    while let Some(driver) = own.upgrade() {
        let ran = driver.streams().into_iter().any(|stream| driver.run_one(&driver.turn(), stream));
        drop(driver);
        if !ran {
            thread::park();
        }
    }
}

/// The addresses that an argument's memory holds.
fn addresses(argument: &Argument) -> Vec<u64> {
    match *argument {
        Argument::Memory { at, bytes, element: ElementType::Address, .. } => {
            // SAFETY: the memory was checked when the launch was issued, and is freed only once all work is done.
            (0..bytes / 8).map(|index| unsafe { (at.0 as *const u64).add(index).read() }).collect()
        }
        _ => Vec::new(),
    }
}
