//! The driver: each call is checked, remembered, and carried out when its time comes.

mod machine;
mod running;

use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::thread::{self, Thread};

use windlass_kernels::cuda::driver::{
    Carrier, DeviceFacts, DevicePointer, Driver, EventHandle, GraphHandle, MemoryFacts, PhysicalHandle, Products,
    StreamHandle,
};
use windlass_kernels::cuda::launch::Launch;
use windlass_kernels::cuda::{Device, DriverError};

use crate::carrier::{Gather, HostCarrier};
use crate::mapped::Mapped;
use crate::products::{HostProducts, Multiplied};
use crate::state::{EventState, GraphState, Issued, Memories, State, StreamState, Work, refused};
pub use machine::{HostMachine, Kernels};
use running::run_pending;

/// Free memory without which no graph is made of what was captured. How much a real driver takes, it does not say.
const GRAPH_BYTES: usize = 1 << 16;

/// A thread's right to make a device compute.
struct Turn<'a>(#[expect(dead_code, reason = "held until it is dropped")] MutexGuard<'a, ()>);

/// The driver of one device.
#[derive(Debug)]
pub struct HostDriver {
    facts: DeviceFacts,
    machine: HostMachine,
    /// Ordinals of devices whose memory may be used.
    reachable: Mutex<BTreeSet<usize>>,
    random: AtomicU64,
    state: Mutex<State>,
    /// Held by who makes the device compute: one thing after the other, while more is issued.
    turn: Mutex<()>,
    own: Weak<HostDriver>,
    /// Runs what is pending once there are peers: their kernels may wait for this device's.
    runner: OnceLock<Thread>,
    /// Told whenever a piece of work has run.
    ran: Condvar,
}

impl Drop for HostDriver {
    fn drop(&mut self) {
        self.wake();
    }
}

impl HostDriver {
    /// All that was issued so far, in order, that work within graphs left out.
    pub fn issued(&self) -> Vec<Issued> {
        self.state().issued.clone()
    }

    /// Pieces of work that were issued and have not run yet.
    pub fn pending(&self) -> usize {
        self.state().streams.values().map(|stream| stream.pending.len()).sum()
    }

    /// A device that this drives.
    pub fn device(self: &Arc<Self>) -> Device {
        Device::new(self.clone())
    }

    /// Loses the device, for this reason, once so many more pieces of work have run.
    pub fn lose_after(&self, pieces: usize, reason: &str) {
        self.state().fate = Some((pieces, reason.to_owned()));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Waits until the device computes nothing. Taken before the state.
    fn turn(&self) -> Turn<'_> {
        Turn(lock(&self.turn))
    }

    fn wake(&self) {
        if let Some(runner) = self.runner.get() {
            runner.unpark();
        }
    }

    fn memories(&self) -> MutexGuard<'_, Memories> {
        lock(&self.machine.memories)
    }

    /// The state, unless the device is lost.
    fn sound(&self, call: &'static str) -> Result<MutexGuard<'_, State>, DriverError> {
        let state = self.state();
        match &state.lost {
            Some(reason) => Err(DriverError::Call { call, reason: reason.clone(), device_lost: true }),
            None => Ok(state),
        }
    }

    /// Refuses a call in a capture, or of a device that maps no memory, or of one that is lost unless it waits for it.
    fn mapping(&self, call: &'static str, waits: bool) -> Result<(), DriverError> {
        let mut state = if waits { self.state() } else { self.sound(call)? };
        state.not_while_capturing(call, waits)?;
        match self.facts.map_granularity {
            Some(_) => Ok(()),
            None => Err(refused(call, "CUDA_ERROR_NOT_SUPPORTED: the device maps no memory")),
        }
    }

    fn memory_left(&self, state: &State) -> MemoryFacts {
        let total_bytes = self.facts.memory_bytes;
        MemoryFacts { free_bytes: total_bytes - state.taken_bytes(), total_bytes }
    }

    /// Refuses more memory than there is.
    fn check_room(&self, state: &State, bytes: usize) -> Result<(), DriverError> {
        let MemoryFacts { free_bytes: free, total_bytes: total } = self.memory_left(state);
        if bytes <= free { Ok(()) } else { Err(DriverError::OutOfMemory { bytes, free, total }) }
    }

    fn random(&self) -> u64 {
        // Weyl sequence; the launches' generators mix it.
        self.random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed)
    }

    /// Memory that this device may use, all of it in one piece.
    fn check_memory(&self, call: &'static str, memory: &[(u64, usize)]) -> Result<(), DriverError> {
        let (memories, reachable) = (self.memories(), lock(&self.reachable));
        let mut used = memory.iter().filter(|(_, bytes)| *bytes > 0);
        let checked = used.try_for_each(|memory| memories.check(*memory, self.facts.ordinal, &reachable));
        checked.map_err(|why| refused(call, why))
    }

    fn is_pinned(&self, address: u64, bytes: usize) -> bool {
        self.memories().holding(address, bytes).is_some_and(|allocation| allocation.device.is_none())
    }

    /// Checks and issues work; perhaps some of what is pending runs.
    fn issue(&self, call: &'static str, stream: StreamHandle, work: Work, issued: Issued) -> Result<(), DriverError> {
        let mut state = self.sound(call)?;
        self.check_memory(call, &work.memory())?;
        state.issue(call, stream.0, work)?;
        state.issued.push(issued);
        drop(state);
        match self.runner.get() {
            // What runs may wait for a peer, who issues does not.
            Some(runner) => runner.unpark(),
            None if self.random() >> 40 & 1 == 0 => drop(self.run_one(&self.turn(), stream.0)),
            None => {}
        }
        Ok(())
    }

    /// Copies between host and device. What is not pinned is copied now, as CUDA stages it.
    fn copy(
        &self,
        call: &'static str,
        to: u64,
        from: u64,
        bytes: usize,
        host: u64,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        let work = Work::Copy { to, from, bytes };
        if self.is_pinned(host, bytes) {
            return self.issue(call, stream, work, Issued::Copy(bytes));
        }
        let mut state = self.sound(call)?;
        if state.stream(call, stream.0)?.capture.is_some() {
            return Err(refused(call, "a captured copy needs pinned memory"));
        }
        let device = if host == to { from } else { to };
        self.check_memory(call, &[(device, bytes)])?;
        state.issued.push(Issued::Copy(bytes));
        drop(state);
        let turn = self.turn();
        self.drain(&turn, stream.0);
        self.perform(&turn, &work);
        Ok(())
    }

    /// Whether what is issued to a stream is captured.
    pub(crate) fn is_captured(&self, call: &'static str, stream: StreamHandle) -> Result<bool, DriverError> {
        Ok(self.sound(call)?.stream(call, stream.0)?.capture.is_some())
    }

    /// Issues a part of a round in which ranks gather what all of them hold, in memory of this device.
    pub(crate) fn gather(&self, gather: Gather, stream: StreamHandle) -> Result<(), DriverError> {
        const CALL: &str = "ncclAllGather";
        let (at, bytes) = gather.memory();
        if self.is_pinned(at, bytes) {
            return Err(refused(CALL, format!("{at:#x} is memory of the host")));
        }
        let issued = Issued::Gather(gather.bytes());
        self.issue(CALL, stream, Work::Gather(gather), issued)
    }

    /// Refuses what this thread may not do while it captures.
    pub(crate) fn check_not_capturing(&self, call: &'static str) -> Result<(), DriverError> {
        self.sound(call)?.not_while_capturing(call, false)
    }

    /// Issues a product by the library.
    pub(crate) fn multiply(
        &self,
        call: &'static str,
        product: Multiplied,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        self.issue(call, stream, Work::Multiply(product), Issued::Multiply)
    }

    /// Has what is pending run whether somebody waits for it or not.
    pub(crate) fn run_by_itself(&self) {
        self.runner.get_or_init(|| {
            let own = self.own.clone();
            thread::spawn(move || run_pending(&own)).thread().clone()
        });
    }

    fn new_handle() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in one test's thread ends that test anyway.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Driver for HostDriver {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn memory(&self) -> Result<MemoryFacts, DriverError> {
        Ok(self.memory_left(&*self.sound("cuMemGetInfo")?))
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePointer, DriverError> {
        let mut state = self.sound("cuMemAlloc")?;
        state.not_while_capturing("cuMemAlloc", false)?;
        self.check_room(&state, bytes)?;
        let memory = Mapped::new(bytes).ok_or_else(|| refused("cuMemAlloc", "the host has no room"))?;
        state.allocated_bytes += bytes;
        Ok(DevicePointer(self.memories().add(memory, Some(self.facts.ordinal))))
    }

    fn free(&self, at: DevicePointer) -> Result<(), DriverError> {
        self.state().not_while_capturing("cuMemFree", true)?;
        self.drain_all(&self.turn());
        let allocation = self.memories().remove(at.0, Some(self.facts.ordinal))?;
        self.state().allocated_bytes -= allocation.memory.bytes();
        Ok(())
    }

    fn reserve(&self, bytes: usize) -> Result<DevicePointer, DriverError> {
        self.mapping("cuMemAddressReserve", false)?;
        self.memories().reserve(bytes).map(DevicePointer)
    }

    fn unreserve(&self, at: DevicePointer, bytes: usize) -> Result<(), DriverError> {
        self.mapping("cuMemAddressFree", false)?;
        self.memories().mappings.unreserve(at.0, bytes)
    }

    fn create_physical(&self, bytes: usize) -> Result<PhysicalHandle, DriverError> {
        self.mapping("cuMemCreate", false)?;
        let state = self.state();
        self.check_room(&state, bytes)?;
        let handle = HostDriver::new_handle();
        self.memories().mappings.create(handle, bytes, &state.physical_bytes)?;
        Ok(PhysicalHandle(handle))
    }

    fn release_physical(&self, memory: PhysicalHandle) -> Result<(), DriverError> {
        self.mapping("cuMemRelease", false)?;
        self.memories().mappings.release(memory.0)
    }

    fn map(&self, at: DevicePointer, bytes: usize, memory: PhysicalHandle) -> Result<(), DriverError> {
        self.mapping("cuMemMap", false)?;
        self.memories().mappings.map(at.0, bytes, memory.0)
    }

    fn allow(&self, at: DevicePointer, bytes: usize) -> Result<(), DriverError> {
        self.mapping("cuMemSetAccess", false)?;
        self.memories().mappings.allow(at.0, bytes, self.facts.ordinal)
    }

    fn unmap(&self, at: DevicePointer, bytes: usize) -> Result<(), DriverError> {
        self.mapping("cuMemUnmap", true)?;
        self.drain_all(&self.turn());
        self.memories().mappings.unmap(at.0, bytes)
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, DriverError> {
        self.sound("cuMemHostAlloc")?.not_while_capturing("cuMemHostAlloc", false)?;
        let memory = Mapped::new(bytes).and_then(|memory| NonNull::new(memory.pointer()).map(|at| (memory, at)));
        let Some((memory, at)) = memory else { return Err(DriverError::HostOutOfMemory { bytes }) };
        self.memories().add(memory, None);
        Ok(at)
    }

    unsafe fn free_pinned(&self, at: NonNull<u8>) -> Result<(), DriverError> {
        self.state().not_while_capturing("cuMemFreeHost", true)?;
        self.drain_all(&self.turn());
        self.memories().remove(at.as_ptr() as u64, None).map(drop)
    }

    fn create_stream(&self) -> Result<StreamHandle, DriverError> {
        let handle = HostDriver::new_handle();
        self.sound("cuStreamCreate")?.streams.insert(handle, StreamState::default());
        Ok(StreamHandle(handle))
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), DriverError> {
        self.drain(&self.turn(), stream.0);
        let mut state = self.state();
        state.stream("cuStreamDestroy", stream.0)?;
        state.streams.remove(&stream.0);
        Ok(())
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<(), DriverError> {
        let mut state = self.sound("cuStreamSynchronize")?;
        if let Some(capture) = &mut state.stream("cuStreamSynchronize", stream.0)?.capture {
            capture.spoil("cuStreamSynchronize");
            return Err(refused("cuStreamSynchronize", "the stream is captured: nothing of it runs"));
        }
        drop(state);
        self.drain(&self.turn(), stream.0);
        self.sound("cuStreamSynchronize").map(drop)
    }

    fn create_event(&self, _timed: bool) -> Result<EventHandle, DriverError> {
        let handle = HostDriver::new_handle();
        self.sound("cuEventCreate")?.events.insert(handle, EventState::default());
        Ok(EventHandle(handle))
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), DriverError> {
        let mut state = self.state();
        state.event("cuEventDestroy", event.0)?;
        state.events.remove(&event.0);
        Ok(())
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), DriverError> {
        let mut state = self.sound("cuEventRecord")?;
        let in_capture = state.stream("cuEventRecord", stream.0)?.capture.is_some();
        let recorded = state.event("cuEventRecord", event.0)?;
        (recorded.stream, recorded.in_capture) = (stream.0, in_capture);
        recorded.recorded += 1;
        let work = Work::Record { event: event.0, version: recorded.recorded };
        state.issue("cuEventRecord", stream.0, work)
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<(), DriverError> {
        let mut state = self.sound("cuStreamWaitEvent")?;
        let captured = state.stream("cuStreamWaitEvent", stream.0)?.capture.is_some();
        let waited = state.event("cuStreamWaitEvent", event.0)?;
        if captured != waited.in_capture {
            return Err(refused("cuStreamWaitEvent", "a capture and what is outside cannot wait for each other"));
        }
        let work = Work::Wait { event: event.0, version: waited.recorded };
        state.issue("cuStreamWaitEvent", stream.0, work)
    }

    fn is_done(&self, event: EventHandle) -> Result<bool, DriverError> {
        let mut state = self.sound("cuEventQuery")?;
        let EventState { recorded, done, stream, in_capture } = *state.event("cuEventQuery", event.0)?;
        if in_capture {
            return Err(refused("cuEventQuery", "the event was recorded in a capture"));
        }
        drop(state);
        // Time passes: who asks again and again sees it done.
        if done < recorded && self.runner.get().is_none() {
            self.run_one(&self.turn(), stream);
        }
        Ok(done >= recorded)
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), DriverError> {
        let mut state = self.sound("cuEventSynchronize")?;
        let EventState { recorded, in_capture, .. } = *state.event("cuEventSynchronize", event.0)?;
        if in_capture {
            return Err(refused("cuEventSynchronize", "the event was recorded in a capture"));
        }
        drop(state);
        match self.runner.get() {
            Some(_) => self.wait_for_event(event.0, recorded),
            None => self.reach_event(&self.turn(), event.0, recorded),
        }
        self.sound("cuEventSynchronize").map(drop)
    }

    fn elapsed_ms(&self, _from: EventHandle, _to: EventHandle) -> Result<f32, DriverError> {
        Err(refused("cuEventElapsedTime", "there is no time on this device"))
    }

    unsafe fn copy_to_device(
        &self,
        to: DevicePointer,
        from: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        self.copy("cuMemcpyHtoDAsync", to.0, from as u64, bytes, from as u64, stream)
    }

    unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: DevicePointer,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        self.copy("cuMemcpyDtoHAsync", to as u64, from.0, bytes, to as u64, stream)
    }

    fn copy_on_device(
        &self,
        to: DevicePointer,
        from: DevicePointer,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        let work = Work::Copy { to: to.0, from: from.0, bytes };
        self.issue("cuMemcpyAsync", stream, work, Issued::Copy(bytes))
    }

    fn fill(&self, at: DevicePointer, byte: u8, bytes: usize, stream: StreamHandle) -> Result<(), DriverError> {
        self.issue("cuMemsetD8Async", stream, Work::Fill { at: at.0, byte, bytes }, Issued::Fill(bytes))
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), DriverError> {
        launch.check(&self.facts)?;
        self.issue("cuLaunchKernelEx", stream, Work::Launch(Box::new(*launch)), Issued::Launch(launch.kernel()))
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<(), DriverError> {
        self.sound("cuStreamBeginCapture")?.begin_capture(stream.0)
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, DriverError> {
        let mut state = self.sound("cuStreamEndCapture")?;
        let work = state.end_capture(stream.0)?;
        let MemoryFacts { free_bytes: free, total_bytes: total } = self.memory_left(&state);
        if free < GRAPH_BYTES {
            return Err(DriverError::NoRoomForGraph { free, total });
        }
        let memories = self.memories();
        let named = |(address, bytes)| Some((address, bytes, memories.serial(address, bytes)?));
        let memory = work.iter().flat_map(Work::memory).filter_map(named).collect();
        let handle = HostDriver::new_handle();
        state.graphs.insert(handle, GraphState { work, memory });
        Ok(GraphHandle(handle))
    }

    fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), DriverError> {
        const CALL: &str = "cuGraphLaunch";
        let mut state = self.sound(CALL)?;
        let Some(GraphState { work, memory }) = state.graphs.get(&graph.0) else {
            return Err(refused(CALL, "the graph is not of this device, or was destroyed"));
        };
        let work = work.clone();
        let memories = self.memories();
        let gone = |&&(address, bytes, serial): &&(u64, usize, u64)| memories.serial(address, bytes) != Some(serial);
        if let Some((address, bytes, _)) = memory.iter().find(gone) {
            return Err(refused(CALL, format!("the graph uses {bytes} bytes at {address:#x}, which were freed")));
        }
        let named: Vec<_> = memory.iter().map(|&(address, bytes, _)| (address, bytes)).collect();
        drop(memories);
        self.check_memory(CALL, &named)?;
        if state.stream(CALL, stream.0)?.capture.is_some() {
            return Err(refused(CALL, "the stream is captured"));
        }
        state.issued.push(Issued::Graph(work.len()));
        work.into_iter().try_for_each(|work| state.issue(CALL, stream.0, work))?;
        drop(state);
        self.wake();
        Ok(())
    }

    fn destroy_graph(&self, graph: GraphHandle) -> Result<(), DriverError> {
        match self.state().graphs.remove(&graph.0) {
            Some(_) => Ok(()),
            None => Err(refused("cuGraphExecDestroy", "the graph is not of this device, or was destroyed")),
        }
    }

    fn reach(&self, peer: &DeviceFacts) -> Result<bool, DriverError> {
        if peer.ordinal == self.facts.ordinal {
            return Err(refused("cuCtxEnablePeerAccess", "CUDA_ERROR_INVALID_DEVICE: it is this device"));
        }
        // Their kernels may wait for each other, over whatever memory.
        self.run_by_itself();
        if self.machine.has_peer_access {
            lock(&self.reachable).insert(peer.ordinal);
        }
        Ok(self.machine.has_peer_access)
    }

    fn connect(&self, devices: &[&DeviceFacts]) -> Result<Arc<dyn Carrier>, DriverError> {
        match &self.machine.devices {
            Some(machine) => Ok(Arc::new(HostCarrier::connect(machine, devices)?)),
            None => Err(refused("dlopen", "there is nothing that carries data between devices")),
        }
    }

    fn products(&self) -> Result<Arc<dyn Products>, DriverError> {
        match self.machine.has_products {
            true => Ok(Arc::new(HostProducts::of(&self.own))),
            false => Err(refused("dlopen", "there is no library for products")),
        }
    }
}
