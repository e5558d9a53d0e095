//! The GPU side: CUDA kernels (`kernels/cuda/*.cu`) behind one seam to the driver.
//!
//! From the bottom up:
//! - [`driver`]: [`Driver`], the few calls that are made of a CUDA driver. [`Nvidia`] makes them of the real one, which
//!   it loads at run time; the crate `windlass-cuda-shim` has the one that tests use, which keeps CUDA's rules and runs
//!   the same kernels on the CPU.
//! - [`table`]: every kernel with its parameters and limits, against which every launch is checked ([`launch`]).
//! - [`memory`] and [`stream`]: what owns the driver's objects: [`Device`], [`Memory`], [`Pinned`], [`Stream`],
//!   [`Event`], [`Graph`].
//! - [`upload`]: [`Uploader`], which copies weights to a device while the next ones are made.
//! - [`region`]: [`Region`], memory that is given back for a while and keeps its addresses.
//! - [`weights`]: [`Matrix`], a weight matrix in the layout of the kernels.
//! - [`ops`]: what callers use: one function per op, which checks shapes, chooses the kernel and launches it.
//!
//! Nothing here allocates per launch, and nothing reads back from the device unless asked.

// The driver is C, and kernels are given raw addresses.
#![allow(unsafe_code)]

pub mod driver;
pub mod error;
pub mod features;
pub mod image;
pub mod launch;
pub mod memory;
mod nvidia;
pub mod ops;
pub mod region;
pub mod stream;
pub mod table;
pub mod upload;
pub mod weights;

pub use driver::{Carrier, DeviceFacts, Driver, MemoryFacts, Products};
pub use error::DriverError;
pub use features::Features;
pub use memory::{Device, Element, ElementType, Memory, Pinned, View, ViewMut};
pub use nvidia::{Nvidia, devices};
pub use region::Region;
pub use stream::{Event, Graph, Stream};
pub use table::Kernel;
pub use upload::{Upload, Uploader};
pub use weights::{LoadError, Matrix};
