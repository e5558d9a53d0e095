//! The seam: what is asked of a CUDA driver, and nothing more.
//!
//! Handles are plain numbers of the driver that gave them. What owns them is above (`memory`, `stream`). One driver
//! object stands for one device and its context; it may be called from any thread.

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

use super::error::DriverError;
use super::features::Features;
use super::launch::Launch;

/// An address in a device's memory.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePointer(pub u64);

impl DevicePointer {
    /// The address `bytes` further on.
    pub fn plus(self, bytes: usize) -> DevicePointer {
        DevicePointer(self.0 + bytes as u64)
    }
}

/// A stream of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub u64);

/// A point in a stream's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(pub u64);

/// Memory of a device that has no address by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PhysicalHandle(pub u64);

/// Captured work, ready to be launched again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GraphHandle(pub u64);

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Its place among the devices of this process, from 0.
    pub ordinal: usize,
    /// Its place in the machine, such as `0000:3B:00.0`: the same whatever devices a process sees.
    pub pci_bus_id: String,
    /// Compute capability: (9, 0) for Hopper.
    pub capability: (u32, u32),
    /// What kernels use of it that others lack.
    pub features: Features,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that one block may ask for.
    pub shared_bytes_per_block: u32,
    /// Bytes of the second-level cache.
    pub l2_bytes: usize,
    /// Bytes of memory.
    pub memory_bytes: usize,
    /// What bytes that are reserved, made and mapped are multiples of; none where the device maps no memory.
    pub map_granularity: Option<usize>,
    /// What drives it: the driver's version, or what stands in for one.
    pub driver: String,
}

impl DeviceFacts {
    /// Whether a kernel may start before the one ahead of it ends (programmatic dependent launch).
    pub fn overlaps_launches(&self) -> bool {
        self.features.overlap
    }

    /// Whether four warps multiply together.
    pub fn has_warpgroups(&self) -> bool {
        self.features.warpgroups
    }

    /// Whether blocks may run in clusters, which begin together and reach each other's shared memory.
    pub fn has_clusters(&self) -> bool {
        self.features.clusters
    }
}

/// A device's memory now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFacts {
    /// Bytes that can be allocated.
    pub free_bytes: usize,
    /// Bytes in all.
    pub total_bytes: usize,
}

/// The driver of one device.
///
/// Work issued to a stream runs in that stream's order, later than the call that issues it. While a stream is captured,
/// work issued to it is recorded and does not run; nothing may then be allocated, mapped or freed, nor that stream waited for.
pub trait Driver: Debug + Send + Sync {
    /// What the device is.
    fn facts(&self) -> &DeviceFacts;
    /// How much of its memory is free.
    fn memory(&self) -> Result<MemoryFacts, DriverError>;

    /// Memory on the device, at a multiple of 256.
    fn allocate(&self, bytes: usize) -> Result<DevicePointer, DriverError>;
    /// Gives memory back, once all work issued so far is done.
    fn free(&self, at: DevicePointer) -> Result<(), DriverError>;

    /// Addresses with nothing behind them.
    fn reserve(&self, bytes: usize) -> Result<DevicePointer, DriverError>;
    /// Gives all addresses of a reservation back. Nothing is mapped there.
    fn unreserve(&self, at: DevicePointer, bytes: usize) -> Result<(), DriverError>;
    /// Memory on the device without an address. It is there until it is released and mapped nowhere any more.
    fn create_physical(&self, bytes: usize) -> Result<PhysicalHandle, DriverError>;
    /// Forgets the handle.
    fn release_physical(&self, memory: PhysicalHandle) -> Result<(), DriverError>;
    /// Puts all of `memory`, which has so many bytes, at addresses that are reserved and have nothing behind them. No device
    /// may use it yet.
    fn map(&self, at: DevicePointer, bytes: usize, memory: PhysicalHandle) -> Result<(), DriverError>;
    /// Lets this device, and no peer, read and write what is mapped there.
    fn allow(&self, at: DevicePointer, bytes: usize) -> Result<(), DriverError>;
    /// Takes away what was mapped there at once, when all work issued so far is done. The addresses stay reserved.
    fn unmap(&self, at: DevicePointer, bytes: usize) -> Result<(), DriverError>;

    /// Memory of the host that every device copies to and from by itself, and whose kernels may read it.
    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, DriverError>;
    /// Gives it back, once all work issued so far is done.
    ///
    /// # Safety
    /// `at` came from [`Driver::allocate_pinned`] and nothing reads or writes it afterwards.
    unsafe fn free_pinned(&self, at: NonNull<u8>) -> Result<(), DriverError>;

    /// A stream that runs beside all others.
    fn create_stream(&self) -> Result<StreamHandle, DriverError>;
    /// Ends a stream once its work is done.
    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), DriverError>;
    /// Waits until all work of a stream is done; an error of that work comes out here.
    fn synchronize(&self, stream: StreamHandle) -> Result<(), DriverError>;

    /// An event; with `timed`, it keeps the time.
    fn create_event(&self, timed: bool) -> Result<EventHandle, DriverError>;
    /// Ends an event.
    fn destroy_event(&self, event: EventHandle) -> Result<(), DriverError>;
    /// Marks the end of the work that `stream` has so far.
    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), DriverError>;
    /// Lets later work of `stream` wait for what the event marks.
    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<(), DriverError>;
    /// Whether what the event marks is done.
    fn is_done(&self, event: EventHandle) -> Result<bool, DriverError>;
    /// Waits for what the event marks.
    fn synchronize_event(&self, event: EventHandle) -> Result<(), DriverError>;
    /// Milliseconds between two timed events that are done.
    fn elapsed_ms(&self, from: EventHandle, to: EventHandle) -> Result<f32, DriverError>;

    /// Copies from the host.
    ///
    /// # Safety
    /// `from` is valid for reads of `bytes` until the copy is done.
    unsafe fn copy_to_device(
        &self,
        to: DevicePointer,
        from: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError>;
    /// Copies to the host.
    ///
    /// # Safety
    /// `to` is valid for writes of `bytes` until the copy is done.
    unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: DevicePointer,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError>;
    /// Copies on the device, or between devices that see each other's memory.
    fn copy_on_device(
        &self,
        to: DevicePointer,
        from: DevicePointer,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError>;
    /// Sets every byte.
    fn fill(&self, at: DevicePointer, byte: u8, bytes: usize, stream: StreamHandle) -> Result<(), DriverError>;
    /// Runs a kernel.
    ///
    /// # Safety
    /// The launch was checked ([`Launch::check`]), and the kernel with these arguments touches only what they name.
    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), DriverError>;

    /// Starts recording what is issued to `stream`.
    fn begin_capture(&self, stream: StreamHandle) -> Result<(), DriverError>;
    /// Ends recording, and makes what was recorded ready to run.
    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, DriverError>;
    /// Runs captured work in `stream`. All memory that it names must still be there.
    fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), DriverError>;
    /// Ends a graph.
    fn destroy_graph(&self, graph: GraphHandle) -> Result<(), DriverError>;

    /// Lets this device reach what `peer` allocates, but not what it maps. Whether the machine can.
    fn reach(&self, peer: &DeviceFacts) -> Result<bool, DriverError>;

    /// Connects devices, which are this one and others in the order of ranks, by what carries data between those that do not
    /// reach each other. An error where the machine has no such library, too.
    fn connect(&self, devices: &[&DeviceFacts]) -> Result<Arc<dyn Carrier>, DriverError>;

    /// What multiplies large matrices on this device beside the kernels. An error where the machine has no such library.
    fn products(&self) -> Result<Arc<dyn Products>, DriverError>;
}

/// A product of tokens with a weight matrix, `[tokens, cols] · [rows, cols]ᵀ`, both in bf16, with sums in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // said above
pub struct Product {
    pub tokens: usize,
    pub rows: usize,
    pub cols: usize,
    pub out: ProductOutput,
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProductOutput {
    /// Rounded.
    Bf16,
    /// As summed.
    F32,
    /// Added to what is there, in f32.
    AddTo,
}

/// What multiplies large matrices on a device: cuBLASLt, or what stands in for it. Its bits change with the number of tokens.
pub trait Products: Debug + Send + Sync {
    /// What it is, such as `cuBLASLt 13.1.0`.
    fn name(&self) -> String;
    /// Bytes of memory that the products of a stream need.
    fn workspace_bytes(&self) -> usize;
    /// Plans a product, unless that was done: whether it can be made, if all operands begin at multiples of 16 bytes. Not in a
    /// capture.
    fn plan(&self, product: &Product) -> Result<bool, DriverError>;
    /// Issues a product that was planned, of weights and input into what comes third. Not in a capture: what is done for the
    /// first time may load kernels.
    fn multiply(
        &self,
        product: &Product,
        operands: [DevicePointer; 3],
        workspace: DevicePointer,
        stream: StreamHandle,
    ) -> Result<(), DriverError>;
}

/// What carries data between the devices of a group, one for each rank: NCCL, or what stands in for it.
///
/// All ranks ask for the same in the same order, each from a thread of its own: the first time, which may not be captured, each
/// waits there for the others. What is captured is captured on all of them.
pub trait Carrier: Debug + Send + Sync {
    /// What it is, such as `NCCL 2.27.3`.
    fn name(&self) -> String;
    /// Has the `bytes` of every rank, which lie at `at + rank · bytes` on its own device, come to lie there on this rank's, too.
    fn all_gather(&self, rank: usize, at: DevicePointer, bytes: usize, stream: StreamHandle)
    -> Result<(), DriverError>;
    /// Ends what runs on any of the devices, as a rank may never come to it, and refuses all that follows. Waits for nobody.
    fn abort(&self);
    /// What went wrong after it was issued.
    fn failure(&self) -> Option<String>;
}
