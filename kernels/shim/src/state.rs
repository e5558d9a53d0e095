//! What a CUDA device remembers: memory, streams with their work, events, graphs; and the rules on them.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ThreadId};

use windlass_kernels::cuda::launch::{Argument, Launch};
use windlass_kernels::cuda::{DriverError, Kernel};

use crate::carrier::Gather;
use crate::mapped::Mapped;
use crate::mapping::Mappings;
use crate::products::Multiplied;

/// What was issued to a stream, for tests that ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Issued {
    /// A kernel.
    Launch(Kernel),
    /// A copy of so many bytes.
    Copy(usize),
    /// So many bytes set.
    Fill(usize),
    /// A graph of so many pieces of work.
    Graph(usize),
    /// So many bytes of each rank, carried to this one.
    Gather(usize),
    /// A product by the library.
    Multiply,
}

/// One piece of work. Addresses are of this process.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Copy { to: u64, from: u64, bytes: usize },
    Fill { at: u64, byte: u8, bytes: usize },
    Launch(Box<Launch>),
    Record { event: u64, version: u64 },
    Wait { event: u64, version: u64 },
    Gather(Gather),
    Multiply(Multiplied),
}

/// Memory of all devices of a machine: addresses are unified.
#[derive(Debug, Default)]
pub(crate) struct Memories {
    by_address: BTreeMap<u64, Allocation>,
    pub(crate) mappings: Mappings,
    next_serial: u64,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) memory: Mapped,
    /// The device's, or none for pinned memory of the host.
    pub(crate) device: Option<usize>,
    /// Distinguishes what came to lie at one address.
    pub(crate) serial: u64,
}

impl Memories {
    pub(crate) fn add(&mut self, memory: Mapped, device: Option<usize>) -> u64 {
        let (address, serial) = (memory.address(), self.new_serial());
        self.by_address.insert(address, Allocation { memory, device, serial });
        address
    }

    /// Reserves addresses.
    pub(crate) fn reserve(&mut self, bytes: usize) -> Result<u64, DriverError> {
        let serial = self.new_serial();
        self.mappings.reserve(bytes, serial)
    }

    fn new_serial(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    pub(crate) fn remove(&mut self, address: u64, device: Option<usize>) -> Result<Allocation, DriverError> {
        match self.by_address.get(&address) {
            Some(allocation) if allocation.device == device => {
                self.by_address.remove(&address).ok_or_else(|| unknown(address))
            }
            Some(_) => Err(refused("cuMemFree", "the memory belongs to another device")),
            None => Err(unknown(address)),
        }
    }

    /// What holds all of `bytes` at `address`.
    pub(crate) fn holding(&self, address: u64, bytes: usize) -> Option<&Allocation> {
        let (start, allocation) = self.by_address.range(..=address).next_back()?;
        (address + bytes as u64 <= start + allocation.memory.bytes() as u64).then_some(allocation)
    }

    /// What tells the memory at `address`, or the addresses, from all others that ever were there.
    pub(crate) fn serial(&self, address: u64, bytes: usize) -> Option<u64> {
        let allocated = self.holding(address, bytes).map(|allocation| allocation.serial);
        allocated.or_else(|| self.mappings.around(address, bytes).map(|reservation| reservation.serial))
    }

    /// Why `device`, which reaches what these devices allocated, may not use memory.
    pub(crate) fn check(
        &self,
        (address, bytes): (u64, usize),
        device: usize,
        reachable: &BTreeSet<usize>,
    ) -> Result<(), String> {
        match (self.holding(address, bytes), self.mappings.around(address, bytes)) {
            (Some(allocation), _) if allocation.device.is_none_or(|owner| reachable.contains(&owner)) => Ok(()),
            (Some(_), _) => Err(format!("{address:#x} is memory of a device that this one does not reach")),
            (None, Some(reservation)) => reservation.check(address, bytes, device),
            (None, None) => Err(format!("{bytes} bytes at {address:#x} are not allocated, or not in one piece")),
        }
    }
}

fn unknown(address: u64) -> DriverError {
    refused("cuMemFree", format!("{address:#x} was not allocated, or was freed before"))
}

pub(crate) fn refused(call: &'static str, reason: impl Into<String>) -> DriverError {
    DriverError::refused(call, reason)
}

/// One device's streams, events and graphs.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) streams: HashMap<u64, StreamState>,
    pub(crate) events: HashMap<u64, EventState>,
    pub(crate) graphs: HashMap<u64, GraphState>,
    /// Bytes allocated, and bytes of memory that is mapped or has a handle.
    pub(crate) allocated_bytes: usize,
    pub(crate) physical_bytes: Arc<AtomicUsize>,
    pub(crate) issued: Vec<Issued>,
    /// Why nothing can be computed any more.
    pub(crate) lost: Option<String>,
    /// After how many pieces of work it is to be lost, and why.
    pub(crate) fate: Option<(usize, String)>,
}

#[derive(Debug, Default)]
pub(crate) struct StreamState {
    pub(crate) pending: VecDeque<Work>,
    pub(crate) capture: Option<Capture>,
}

#[derive(Debug)]
pub(crate) struct Capture {
    work: Vec<Work>,
    thread: ThreadId,
    /// The call that spoiled it.
    spoiled: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EventState {
    /// Counts the times it was recorded.
    pub(crate) recorded: u64,
    pub(crate) done: u64,
    pub(crate) stream: u64,
    pub(crate) in_capture: bool,
}

#[derive(Debug)]
pub(crate) struct GraphState {
    pub(crate) work: Vec<Work>,
    /// The allocations that it names, by address, bytes and serial.
    pub(crate) memory: Vec<(u64, usize, u64)>,
}

impl State {
    /// One more piece of work is about to run; or not, for this reason.
    pub(crate) fn meet_fate(&mut self) -> Option<&str> {
        match &mut self.fate {
            Some((0, reason)) => self.lost = Some(std::mem::take(reason)),
            Some((pieces, _)) => *pieces -= 1,
            None => {}
        }
        self.fate.take_if(|_| self.lost.is_some());
        self.lost.as_deref()
    }

    /// Bytes of the device's that somebody has.
    pub(crate) fn taken_bytes(&self) -> usize {
        self.allocated_bytes + self.physical_bytes.load(Ordering::Relaxed)
    }

    /// A call that CUDA forbids while this thread captures; it also spoils the capture.
    pub(crate) fn not_while_capturing(&mut self, call: &'static str, whole_device: bool) -> Result<(), DriverError> {
        let own = thread::current().id();
        let captures = self.streams.values_mut().filter_map(|stream| stream.capture.as_mut());
        let mut found = false;
        for capture in captures.filter(|capture| whole_device || capture.thread == own) {
            capture.spoiled.get_or_insert(call);
            found = true;
        }
        if found { Err(refused(call, "not allowed while a stream is captured")) } else { Ok(()) }
    }

    pub(crate) fn stream(&mut self, call: &'static str, stream: u64) -> Result<&mut StreamState, DriverError> {
        self.streams.get_mut(&stream).ok_or_else(|| refused(call, "the stream is not of this device, or was destroyed"))
    }

    pub(crate) fn event(&mut self, call: &'static str, event: u64) -> Result<&mut EventState, DriverError> {
        self.events.get_mut(&event).ok_or_else(|| refused(call, "the event is not of this device, or was destroyed"))
    }

    /// Gives work to a stream, or to its capture.
    pub(crate) fn issue(&mut self, call: &'static str, stream: u64, work: Work) -> Result<(), DriverError> {
        let stream = self.stream(call, stream)?;
        match &mut stream.capture {
            Some(capture) => capture.work.push(work),
            None => stream.pending.push_back(work),
        }
        Ok(())
    }

    pub(crate) fn begin_capture(&mut self, stream: u64) -> Result<(), DriverError> {
        let stream = self.stream("cuStreamBeginCapture", stream)?;
        if stream.capture.is_some() {
            return Err(refused("cuStreamBeginCapture", "the stream is captured already"));
        }
        stream.capture = Some(Capture { work: Vec::new(), thread: thread::current().id(), spoiled: None });
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, stream: u64) -> Result<Vec<Work>, DriverError> {
        let capture = self.stream("cuStreamEndCapture", stream)?.capture.take();
        let Some(capture) = capture else { return Err(refused("cuStreamEndCapture", "the stream is not captured")) };
        match capture.spoiled {
            Some(call) => Err(refused("cuStreamEndCapture", format!("the capture was spoiled by {call}"))),
            None => Ok(capture.work),
        }
    }
}

impl Capture {
    pub(crate) fn spoil(&mut self, call: &'static str) {
        self.spoiled.get_or_insert(call);
    }
}

impl Work {
    /// The device memory that it names.
    pub(crate) fn memory(&self) -> Vec<(u64, usize)> {
        match self {
            Work::Copy { to, from, bytes } => vec![(*to, *bytes), (*from, *bytes)],
            Work::Fill { at, bytes, .. } => vec![(*at, *bytes)],
            Work::Launch(launch) => launch.arguments().iter().filter_map(argument_memory).collect(),
            Work::Gather(gather) => vec![gather.memory()],
            Work::Multiply(product) => product.memory(),
            Work::Record { .. } | Work::Wait { .. } => vec![],
        }
    }
}

fn argument_memory(argument: &Argument) -> Option<(u64, usize)> {
    match argument {
        Argument::Memory { at, bytes, .. } if at.0 != 0 => Some((at.0, *bytes)),
        Argument::Tiles(map) => Some((map.at.0, map.bytes())),
        _ => None,
    }
}
