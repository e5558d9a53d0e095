//! A CUDA device for tests, on a machine that has none.
//!
//! [`HostMachine`] gives drivers ([`HostDriver`]) that do what is asked of a CUDA driver with memory of the host, and
//! refuse what CUDA refuses: memory that is not there or not theirs, handles of another device, allocation while a
//! stream is captured, graphs whose memory is gone, addresses behind which nothing is mapped. Work is deferred: it runs when somebody waits for it, or at random
//! before, so that code which does not wait reads what is not there yet. Devices that reach each other run it beside each
//! other, as their kernels may wait for one another.
//!
//! Kernels run from their own sources (`kernels/cuda/*.cu`, compiled for the CPU), or are only recorded.

// The C++ half is called here, and device memory is memory of this process.
#![allow(unsafe_code)]

mod carrier;
mod driver;
mod kernels;
mod mapped;
mod mapping;
mod products;
mod state;

pub use driver::{HostDriver, HostMachine, Kernels};
pub use kernels::{Declared, declared};
pub use state::Issued;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use windlass_kernels::cuda::{Device, DriverError, Nvidia};

/// What a test computes on: this machine's first NVIDIA GPU where `WINDLASS_GPU` names a folder for its machine code, else
/// a device of so many bytes whose kernels run in the order of `seed`.
pub fn device_under_test(seed: u64, bytes: usize) -> Result<Device, DriverError> {
    static GPU: OnceLock<Option<Result<Device, DriverError>>> = OnceLock::new();
    let open = || {
        let cache = std::env::var_os("WINDLASS_GPU")?;
        Some(Nvidia::open(0, Path::new(&cache)).map(|gpu| Device::new(Arc::new(gpu))))
    };
    GPU.get_or_init(open).clone().unwrap_or_else(|| Ok(HostMachine::new(Kernels::Run, seed).device(0, bytes)))
}
