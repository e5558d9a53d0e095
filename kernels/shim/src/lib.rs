//! A CUDA device for tests, on a machine that has none.
//!
//! [`HostMachine`] gives drivers ([`HostDriver`]) that do what is asked of a CUDA driver with memory of the host, and
//! refuse what CUDA refuses: memory that is not there or not theirs, handles of another device, allocation while a
//! stream is captured, graphs whose memory is gone. Work is deferred: it runs when somebody waits for it, or at random
//! before, so that code which does not wait reads what is not there yet.
//!
//! Kernels run from their own sources (`kernels/cuda/*.cu`, compiled for the CPU), or are only recorded.

// The C++ half is called here, and device memory is memory of this process.
#![allow(unsafe_code)]

mod driver;
mod kernels;
mod mapped;
mod state;

pub use driver::{HostDriver, HostMachine, Kernels};
pub use kernels::{Declared, declared};
pub use state::Issued;
