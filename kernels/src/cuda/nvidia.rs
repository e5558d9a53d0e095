//! The real driver, over cudarc's bindings, which look it up at run time: a program starts with it or without.

mod attributes;
mod context;
mod cublaslt;
mod facts;
mod library;
mod mapping;
mod nccl;
mod outcome;
mod tiles;

use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction_attribute as FunctionAttribute, CUresult};

use super::driver::{
    Carrier, DeviceFacts, DevicePointer, Driver, EventHandle, GraphHandle, MemoryFacts, PhysicalHandle, Products,
    StreamHandle,
};
use super::error::DriverError;
use super::image;
use super::launch::{Argument, Launch, MAX_PARAMETERS};
use super::table::{Kernel, MOST_TILES};
use context::Context;
use facts::facts;
use outcome::call;

/// Shared memory that a kernel may use without asking.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// One GPU with its primary context and the kernels loaded.
#[derive(Debug)]
pub struct Nvidia {
    facts: DeviceFacts,
    context: Arc<Context>,
    modules: Vec<sys::CUmodule>,
    /// By kernel.
    functions: Vec<sys::CUfunction>,
}

// SAFETY: the driver's handles may be used from any thread; every call binds the context to its thread first.
unsafe impl Send for Nvidia {}
// SAFETY: as above.
unsafe impl Sync for Nvidia {}

/// How many GPUs there are; an error where there is no driver.
pub fn devices() -> Result<usize, DriverError> {
    // SAFETY: looks for a library by name.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverError::NoDriver);
    }
    let mut count = 0;
    // SAFETY: the driver is there, and `count` is valid for the write.
    unsafe {
        call("cuInit", sys::cuInit(0))?;
        call("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
    }
    Ok(count as usize)
}

impl Nvidia {
    /// Opens GPU `ordinal` and loads the kernels: those built in, or else compiled now and kept in `cache`.
    pub fn open(ordinal: usize, cache: &Path) -> Result<Nvidia, DriverError> {
        let count = devices()?;
        if ordinal >= count {
            return Err(DriverError::NoDevice { ordinal, count });
        }
        let context = Arc::new(Context::of(ordinal)?);
        let facts = facts(context.device, ordinal)?;
        let mut opened = Nvidia { facts, context, modules: Vec::new(), functions: Vec::new() };
        opened.load(cache)?;
        Ok(opened)
    }

    /// Loads every kernel now: the first launch may be in a capture, where nothing can be loaded.
    fn load(&mut self, cache: &Path) -> Result<(), DriverError> {
        self.bind()?;
        for (&file, image) in Kernel::FILES.iter().zip(image::all(self.facts.capability, cache)?) {
            let mut module = null_mut();
            // SAFETY: the image is a whole cubin or fatbin, which describes its own length.
            let loaded = call("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) });
            loaded.map_err(|error| DriverError::Image { file, reason: error.to_string() })?;
            self.modules.push(module);
        }
        for &kernel in Kernel::ALL {
            self.functions.push(self.function(kernel)?);
        }
        Ok(())
    }

    fn function(&self, kernel: Kernel) -> Result<sys::CUfunction, DriverError> {
        let spec = kernel.spec();
        let index = Kernel::FILES.iter().position(|&file| file == spec.file).unwrap_or_default();
        let name =
            CString::new(spec.name).map_err(|error| DriverError::refused("cuModuleGetFunction", error.to_string()))?;
        let mut function = null_mut();
        // SAFETY: the module is loaded, the name ends with a zero, and the place is valid for the write.
        call("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&mut function, self.modules[index], name.as_ptr())
        })
        .map_err(|error| DriverError::Image { file: spec.file, reason: format!("{}: {error}", spec.name) })?;
        let shared = spec.shared_bytes.min(self.facts.shared_bytes_per_block);
        if shared > DEFAULT_SHARED_BYTES {
            let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found.
            call("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, attribute, shared as c_int) })?;
        }
        Ok(function)
    }

    fn bind(&self) -> Result<(), DriverError> {
        self.context.bind()
    }

    /// The result of asking for memory.
    fn room(&self, name: &'static str, bytes: usize, result: CUresult) -> Result<(), DriverError> {
        self.unless_full(name, result, |free, total| DriverError::OutOfMemory { bytes, free, total })
    }

    /// The result of making a graph.
    fn graph_room(&self, name: &'static str, result: CUresult) -> Result<(), DriverError> {
        self.unless_full(name, result, |free, total| DriverError::NoRoomForGraph { free, total })
    }

    /// The result of what takes memory: `full` makes the refusal of the bytes that are free and of all.
    fn unless_full(
        &self,
        name: &'static str,
        result: CUresult,
        full: impl FnOnce(usize, usize) -> DriverError,
    ) -> Result<(), DriverError> {
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let MemoryFacts { free_bytes, total_bytes } = self.memory()?;
            return Err(full(free_bytes, total_bytes));
        }
        call(name, result)
    }

    /// Waits for all work: what uses memory that is about to be given back.
    fn settle(&self) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: the context is current.
        call("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }
}

impl Drop for Nvidia {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        for &module in &self.modules {
            // SAFETY: ours, and nothing runs any more that could use it: streams were destroyed with their work done.
            unsafe { sys::cuModuleUnload(module) };
        }
    }
}

// Every function below binds the context first; the handles are those that this driver gave, as the trait demands.
impl Driver for Nvidia {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn memory(&self) -> Result<MemoryFacts, DriverError> {
        self.bind()?;
        let (mut free_bytes, mut total_bytes) = (0, 0);
        // SAFETY: both places are valid for the writes.
        call("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free_bytes, &mut total_bytes) })?;
        Ok(MemoryFacts { free_bytes, total_bytes })
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePointer, DriverError> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: the place is valid for the write.
        self.room("cuMemAlloc", bytes, unsafe { sys::cuMemAlloc_v2(&mut pointer, bytes) })?;
        Ok(DevicePointer(pointer))
    }

    fn free(&self, at: DevicePointer) -> Result<(), DriverError> {
        self.settle()?;
        // SAFETY: the caller had it from `allocate`; nothing runs that uses it.
        call("cuMemFree", unsafe { sys::cuMemFree_v2(at.0) })
    }

    fn reserve(&self, bytes: usize) -> Result<DevicePointer, DriverError> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: the place is valid for the write. No alignment but the granularity's, and no address in particular.
        call("cuMemAddressReserve", unsafe { sys::cuMemAddressReserve(&mut pointer, bytes, 0, 0, 0) })?;
        Ok(DevicePointer(pointer))
    }

    fn unreserve(&self, at: DevicePointer, bytes: usize) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: the caller had them from `reserve`, and has unmapped what was there.
        call("cuMemAddressFree", unsafe { sys::cuMemAddressFree(at.0, bytes) })
    }

    fn create_physical(&self, bytes: usize) -> Result<PhysicalHandle, DriverError> {
        self.bind()?;
        let (mut memory, kind) = (0, mapping::kind(self.context.device));
        // SAFETY: the place is valid for the write, and the kind is read before the call returns.
        self.room("cuMemCreate", bytes, unsafe { sys::cuMemCreate(&mut memory, bytes, &kind, 0) })?;
        Ok(PhysicalHandle(memory))
    }

    fn release_physical(&self, memory: PhysicalHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: the caller had it from `create_physical` and names it no more.
        call("cuMemRelease", unsafe { sys::cuMemRelease(memory.0) })
    }

    fn map(&self, at: DevicePointer, bytes: usize, memory: PhysicalHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: the addresses are reserved, and nothing uses them yet.
        call("cuMemMap", unsafe { sys::cuMemMap(at.0, bytes, 0, memory.0, 0) })
    }

    fn allow(&self, at: DevicePointer, bytes: usize) -> Result<(), DriverError> {
        self.bind()?;
        let access = mapping::access(self.context.device);
        // SAFETY: memory is mapped there; the one description is read before the call returns.
        call("cuMemSetAccess", unsafe { sys::cuMemSetAccess(at.0, bytes, &access, 1) })
    }

    fn unmap(&self, at: DevicePointer, bytes: usize) -> Result<(), DriverError> {
        self.settle()?;
        // SAFETY: mapped by `map` as one piece, and nothing runs that uses it.
        call("cuMemUnmap", unsafe { sys::cuMemUnmap(at.0, bytes) })
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, DriverError> {
        self.bind()?;
        let mut pointer: *mut c_void = null_mut();
        // SAFETY: the place is valid for the write. The flag lets every device copy from it.
        match unsafe { sys::cuMemHostAlloc(&mut pointer, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(DriverError::HostOutOfMemory { bytes }),
            result => call("cuMemHostAlloc", result)?,
        }
        NonNull::new(pointer.cast()).ok_or_else(|| DriverError::refused("cuMemHostAlloc", "it gave no memory"))
    }

    unsafe fn free_pinned(&self, at: NonNull<u8>) -> Result<(), DriverError> {
        self.settle()?;
        // SAFETY: the caller had it from `allocate_pinned`; no copy runs that uses it.
        call("cuMemFreeHost", unsafe { sys::cuMemFreeHost(at.as_ptr().cast()) })
    }

    fn create_stream(&self) -> Result<StreamHandle, DriverError> {
        self.bind()?;
        let mut stream = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the place is valid for the write.
        call("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(StreamHandle(stream as u64))
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), DriverError> {
        self.synchronize(stream)?;
        // SAFETY: the caller had it from `create_stream` and names it no more.
        call("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(stream.0 as sys::CUstream) })
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: a stream of this driver.
        call("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream.0 as sys::CUstream) })
    }

    fn create_event(&self, timed: bool) -> Result<EventHandle, DriverError> {
        self.bind()?;
        let mut event = null_mut();
        let flags = if timed {
            sys::CUevent_flags_enum::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING
        };
        // SAFETY: the place is valid for the write.
        call("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags as u32) })?;
        Ok(EventHandle(event as u64))
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: the caller had it from `create_event` and names it no more.
        call("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event.0 as sys::CUevent) })
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: both are of this driver.
        call("cuEventRecord", unsafe { sys::cuEventRecord(event.0 as sys::CUevent, stream.0 as sys::CUstream) })
    }

    fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: both are of this driver.
        call("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(stream.0 as sys::CUstream, event.0 as sys::CUevent, 0)
        })
    }

    fn is_done(&self, event: EventHandle) -> Result<bool, DriverError> {
        self.bind()?;
        // SAFETY: an event of this driver.
        match unsafe { sys::cuEventQuery(event.0 as sys::CUevent) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => call("cuEventQuery", result).map(|()| true),
        }
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: an event of this driver.
        call("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event.0 as sys::CUevent) })
    }

    fn elapsed_ms(&self, from: EventHandle, to: EventHandle) -> Result<f32, DriverError> {
        self.bind()?;
        let mut elapsed_ms = 0.0;
        // SAFETY: both events are of this driver, and the place is valid for the write.
        call("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime(&mut elapsed_ms, from.0 as sys::CUevent, to.0 as sys::CUevent)
        })?;
        Ok(elapsed_ms)
    }

    unsafe fn copy_to_device(
        &self,
        to: DevicePointer,
        from: *const u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: the caller keeps `from` until the copy is done.
        call("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.0, from.cast(), bytes, stream.0 as sys::CUstream)
        })
    }

    unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: DevicePointer,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: the caller keeps `to` until the copy is done.
        call("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from.0, bytes, stream.0 as sys::CUstream)
        })
    }

    fn copy_on_device(
        &self,
        to: DevicePointer,
        from: DevicePointer,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: device memory alone; addresses are unified, so that peers' are known too.
        call("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to.0, from.0, bytes, stream.0 as sys::CUstream) })
    }

    fn fill(&self, at: DevicePointer, byte: u8, bytes: usize, stream: StreamHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: device memory alone.
        call("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at.0, byte, bytes, stream.0 as sys::CUstream) })
    }

    unsafe fn launch(&self, launch: &Launch, stream: StreamHandle) -> Result<(), DriverError> {
        self.bind()?;
        let (mut values, mut maps) = ([0u64; MAX_PARAMETERS], [sys::CUtensorMap { opaque: [0; 16] }; MOST_TILES]);
        let mut places = [null_mut::<c_void>(); MAX_PARAMETERS];
        let mut free_maps = maps.iter_mut();
        for ((value, place), argument) in values.iter_mut().zip(&mut places).zip(launch.arguments()) {
            *value = argument.bits();
            *place = std::ptr::from_mut(value).cast();
            if let Argument::Tiles(tiles) = argument {
                let Some(map) = free_maps.next() else {
                    return Err(DriverError::refused(
                        "cuLaunchKernelEx",
                        format!("more than {MOST_TILES} tensor maps"),
                    ));
                };
                *map = tiles::encoded(tiles)?;
                *place = std::ptr::from_mut(map).cast();
            }
        }
        let mut attributes = attributes::of(launch, &self.facts);
        let [grid_x, grid_y, grid_z] = launch.grid();
        let config = sys::CUlaunchConfig {
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: launch.kernel().spec().threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes(),
            hStream: stream.0 as sys::CUstream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let function = self.functions[launch.kernel() as usize];
        // SAFETY: the arguments were checked against the kernel's parameters; all of this is read before the call returns.
        call("cuLaunchKernelEx", unsafe { sys::cuLaunchKernelEx(&config, function, places.as_mut_ptr(), null_mut()) })
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<(), DriverError> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of this driver.
        call("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.0 as sys::CUstream, mode) })
    }

    fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, DriverError> {
        self.bind()?;
        let (mut graph, mut ready) = (null_mut(), null_mut());
        // SAFETY: a stream of this driver; both places are valid for the writes; the recording is not needed once the
        // executable graph is made of it.
        unsafe {
            call("cuStreamEndCapture", sys::cuStreamEndCapture(stream.0 as sys::CUstream, &mut graph))?;
            let made = sys::cuGraphInstantiateWithFlags(&mut ready, graph, 0);
            call("cuGraphDestroy", sys::cuGraphDestroy(graph))?;
            self.graph_room("cuGraphInstantiate", made)?;
        }
        let graph = GraphHandle(ready as u64);
        // SAFETY: the graph was just made, and the stream is of this driver.
        let uploaded = unsafe { sys::cuGraphUpload(ready, stream.0 as sys::CUstream) };
        if let Err(error) = self.graph_room("cuGraphUpload", uploaded) {
            self.destroy_graph(graph)?;
            return Err(error);
        }
        Ok(graph)
    }

    fn launch_graph(&self, graph: GraphHandle, stream: StreamHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: both are of this driver.
        call("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.0 as sys::CUgraphExec, stream.0 as sys::CUstream) })
    }

    fn destroy_graph(&self, graph: GraphHandle) -> Result<(), DriverError> {
        self.bind()?;
        // SAFETY: the caller had it from `end_capture` and names it no more.
        call("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(graph.0 as sys::CUgraphExec) })
    }

    fn reach(&self, peer: &DeviceFacts) -> Result<bool, DriverError> {
        self.bind()?;
        // For this call alone: the peer's own driver retains it, too.
        let (peer, mut can) = (Context::of(peer.ordinal)?, 0);
        // SAFETY: both devices are there, and the place is valid for the write.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.context.device, peer.device) };
        call("cuDeviceCanAccessPeer", asked)?;
        if can == 0 {
            return Ok(false);
        }
        // SAFETY: this driver's context is current, and the peer's is retained.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.handle, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            result => call("cuCtxEnablePeerAccess", result).map(|()| true),
        }
    }

    fn connect(&self, devices: &[&DeviceFacts]) -> Result<Arc<dyn Carrier>, DriverError> {
        Ok(nccl::NcclGroup::connect(devices)?)
    }

    fn products(&self) -> Result<Arc<dyn Products>, DriverError> {
        Ok(cublaslt::LargeProducts::on(&self.facts, &self.context)?)
    }
}
