//! Machines with devices for tests.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use windlass_kernels::cuda::table::HOPPER;
use windlass_kernels::cuda::{Device, DeviceFacts, Features};

use super::{HostDriver, lock};
use crate::carrier::Devices;
use crate::mapping::GRANULARITY;
use crate::state::Memories;

/// What becomes of launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// They run, from their sources.
    Run,
    /// They are checked and recorded; memory stays as it is.
    Record,
}

/// Devices that see each other's memory.
#[derive(Clone, Debug)]
pub struct HostMachine {
    pub(super) memories: Arc<Mutex<Memories>>,
    pub(super) kernels: Kernels,
    seed: u64,
    pub(super) has_peer_access: bool,
    /// Where it has what connects devices: those of them that there are.
    pub(super) devices: Option<Devices>,
    maps_memory: bool,
    pub(super) has_products: bool,
    capability: (u32, u32),
    multiprocessors: u32,
}

impl HostMachine {
    /// A machine. `seed` decides the order of threads and blocks, and when deferred work runs.
    pub fn new(kernels: Kernels, seed: u64) -> HostMachine {
        HostMachine {
            memories: Arc::default(),
            kernels,
            seed,
            has_peer_access: true,
            devices: None,
            maps_memory: true,
            has_products: false,
            capability: HOPPER,
            multiprocessors: 132,
        }
    }

    /// The same with devices of another compute capability than Hopper's.
    pub fn with_capability(self, capability: (u32, u32)) -> HostMachine {
        HostMachine { capability, ..self }
    }

    /// The same with devices of so many multiprocessors: how a product is divided may hang on it.
    pub fn with_multiprocessors(self, multiprocessors: u32) -> HostMachine {
        HostMachine { multiprocessors, ..self }
    }

    /// The same with devices that cannot reach each other.
    pub fn without_peer_access(self) -> HostMachine {
        HostMachine { has_peer_access: false, ..self }
    }

    /// The same with what carries data between such devices.
    pub fn with_carrier(self) -> HostMachine {
        HostMachine { devices: Some(Devices::default()), ..self }
    }

    /// The same with a library that multiplies large matrices.
    pub fn with_products(self) -> HostMachine {
        HostMachine { has_products: true, ..self }
    }

    /// The same with devices that map no memory.
    pub fn without_mapping(self) -> HostMachine {
        HostMachine { maps_memory: false, ..self }
    }

    /// A device as large as a Hopper, with `memory_bytes`.
    pub fn driver(&self, ordinal: usize, memory_bytes: usize) -> Arc<HostDriver> {
        let facts = DeviceFacts {
            name: "CPU shim".into(),
            ordinal,
            pci_bus_id: format!("0000:{ordinal:02X}:00.0"),
            capability: self.capability,
            features: Features::of(self.capability),
            multiprocessors: self.multiprocessors,
            shared_bytes_per_block: 227 << 10,
            l2_bytes: 50 << 20,
            memory_bytes,
            map_granularity: self.maps_memory.then_some(GRANULARITY),
            driver: "no driver: the CUDA shim".into(),
        };
        let reachable = Mutex::new(BTreeSet::from([ordinal]));
        let random = AtomicU64::new(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ordinal as u64);
        let driver = Arc::new_cyclic(|own| HostDriver {
            facts,
            machine: self.clone(),
            reachable,
            random,
            state: Mutex::default(),
            turn: Mutex::default(),
            own: own.clone(),
            runner: OnceLock::new(),
            ran: Condvar::new(),
        });
        if let Some(devices) = &self.devices {
            lock(devices).insert(ordinal, Arc::downgrade(&driver));
        }
        driver
    }

    /// The same as a device.
    pub fn device(&self, ordinal: usize, memory_bytes: usize) -> Device {
        Device::new(self.driver(ordinal, memory_bytes))
    }
}
