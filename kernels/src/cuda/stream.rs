//! Streams, events and graphs: what owns the driver's handles.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::driver::{EventHandle, GraphHandle, StreamHandle};
use super::error::DriverError;
use super::launch::Launch;
use super::memory::{Device, Element, Pinned, View, ViewMut, bytes_of};

/// Work that runs in the order in which it is issued, beside the work of other streams.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    handle: StreamHandle,
    captured: AtomicBool,
}

impl Stream {
    pub(super) fn new(device: &Device) -> Result<Stream, DriverError> {
        let handle = device.driver().create_stream()?;
        Ok(Stream { device: device.clone(), handle, captured: AtomicBool::new(false) })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle.
    pub fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// Copies `to.len()` elements from `from`, its element `at` and following.
    ///
    /// # Panics
    /// When `from` has fewer.
    pub fn copy_to_device<T: Element>(
        &self,
        to: ViewMut<'_, T>,
        from: &Pinned<T>,
        at: usize,
    ) -> Result<(), DriverError> {
        let source = from.at(at..at + to.len());
        // SAFETY: pinned memory is given back only after the work that was issued before.
        unsafe { self.device.driver().copy_to_device(to.pointer(), source.cast(), to.bytes(), self.handle) }
    }

    /// Copies `from` to element `at` of `to` and following.
    ///
    /// # Panics
    /// When `to` has too few.
    pub fn copy_to_host<T: Element>(&self, to: &Pinned<T>, at: usize, from: View<'_, T>) -> Result<(), DriverError> {
        let target = to.at(at..at + from.len());
        // SAFETY: as above; who reads `to` meanwhile reads plain numbers, old or new.
        unsafe { self.device.driver().copy_to_host(target.cast(), from.pointer(), from.bytes(), self.handle) }
    }

    /// Copies on the device.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy<T: Element>(&self, to: ViewMut<'_, T>, from: View<'_, T>) -> Result<(), DriverError> {
        assert_eq!(to.len(), from.len(), "a copy of {} elements into {}", from.len(), to.len());
        self.device.driver().copy_on_device(to.pointer(), from.pointer(), from.bytes(), self.handle)
    }

    /// Copies a part of memory to another part of it.
    ///
    /// # Panics
    /// When they overlap, or are not inside.
    pub fn copy_within<T: Element>(
        &self,
        memory: ViewMut<'_, T>,
        from: Range<usize>,
        to: usize,
    ) -> Result<(), DriverError> {
        let target = to..to + from.len();
        assert!(from.end <= target.start || target.end <= from.start, "{from:?} overlaps {target:?}");
        let source = memory.as_view().slice(from);
        let (source, bytes) = (source.pointer(), source.bytes());
        self.device.driver().copy_on_device(memory.slice(target).pointer(), source, bytes, self.handle)
    }

    /// Sets every byte.
    pub fn fill<T: Element>(&self, at: ViewMut<'_, T>, byte: u8) -> Result<(), DriverError> {
        self.device.driver().fill(at.pointer(), byte, bytes_of::<T>(at.len()), self.handle)
    }

    /// Runs a kernel.
    ///
    /// # Safety
    /// The kernel with these arguments touches only what they name: the op that builds the launch has checked shapes.
    pub(super) unsafe fn launch(&self, launch: &Launch) -> Result<(), DriverError> {
        launch.check(self.device.facts())?;
        // SAFETY: checked just above, and the caller promises the rest.
        unsafe { self.device.driver().launch(launch, self.handle) }
    }

    /// Waits until all work issued so far is done; an error of that work comes out here.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.device.driver().synchronize(self.handle)
    }

    /// A new event at the end of the work issued so far.
    pub fn record(&self) -> Result<Event, DriverError> {
        let event = Event::new(&self.device)?;
        self.mark(&event)?;
        Ok(event)
    }

    /// Moves an event to the end of the work issued so far.
    pub fn mark(&self, event: &Event) -> Result<(), DriverError> {
        self.device.driver().record(event.handle, self.handle)
    }

    /// Lets later work wait for what the event marks.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        self.device.driver().wait(self.handle, event.handle)
    }

    /// Records the work that `issue` gives to this stream as a graph; none of it runs.
    pub fn capture(&self, issue: impl FnOnce() -> Result<(), DriverError>) -> Result<Graph, DriverError> {
        let driver = self.device.driver();
        driver.begin_capture(self.handle)?;
        self.captured.store(true, Ordering::Relaxed);
        let issued = issue();
        self.captured.store(false, Ordering::Relaxed);
        // Recording ends in any case: a stream that is left recording is of no use any more.
        let graph = driver.end_capture(self.handle).map(|handle| Graph { device: self.device.clone(), handle });
        issued.and(graph)
    }

    /// Whether what is issued now is recorded.
    pub fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Relaxed)
    }

    /// Runs captured work.
    pub fn launch_graph(&self, graph: &Graph) -> Result<(), DriverError> {
        self.device.driver().launch_graph(graph.handle, self.handle)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A device that is lost has no streams; there is nobody to tell.
        let _ = self.device.driver().destroy_stream(self.handle);
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: EventHandle,
}

impl Event {
    /// An event that marks nothing yet.
    pub fn new(device: &Device) -> Result<Event, DriverError> {
        Ok(Event { device: device.clone(), handle: device.driver().create_event(false)? })
    }

    /// An event that marks nothing yet, and keeps the time when it is reached.
    pub fn timed(device: &Device) -> Result<Event, DriverError> {
        Ok(Event { device: device.clone(), handle: device.driver().create_event(true)? })
    }

    /// Whether what it marks is done.
    pub fn is_done(&self) -> Result<bool, DriverError> {
        self.device.driver().is_done(self.handle)
    }

    /// Waits for what it marks.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.device.driver().synchronize_event(self.handle)
    }

    /// Milliseconds since `earlier`; both are timed and done.
    pub fn elapsed_ms_since(&self, earlier: &Event) -> Result<f32, DriverError> {
        self.device.driver().elapsed_ms(earlier.handle, self.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.driver().destroy_event(self.handle);
    }
}

/// Captured work. It names memory without owning it: what it names must outlive its launches.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    handle: GraphHandle,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.driver().destroy_graph(self.handle);
    }
}
