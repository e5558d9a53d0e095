//! What a driver refuses or reports.

use super::launch::LaunchError;

/// Why a call of the driver failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DriverError {
    /// There is no CUDA driver on this machine.
    #[error("no CUDA driver is installed: libcuda was not found")]
    NoDriver,
    /// The driver knows fewer devices.
    #[error("there is no CUDA device {ordinal}; there are {count}")]
    NoDevice {
        /// The one asked for, from 0.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The kernels use what came with Ampere.
    #[error("the GPU has compute capability {}.{}; the kernels need 8.0 (Ampere) or later", .capability.0, .capability.1)]
    TooOld {
        /// Compute capability of the device.
        capability: (u32, u32),
    },
    /// The driver refused a call, or reports that earlier work failed.
    #[error("{call} failed: {reason}")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// The driver's words.
        reason: String,
        /// Whether the device can still be used afterwards.
        device_lost: bool,
    },
    /// The device has no room.
    #[error("the device has no room for {bytes} bytes: {free} of {total} are free")]
    OutOfMemory {
        /// Asked for.
        bytes: usize,
        /// Free.
        free: usize,
        /// The device's.
        total: usize,
    },
    /// The device has no room for what the driver makes of captured work.
    #[error("the device has no room for a graph: {free} of {total} bytes are free")]
    NoRoomForGraph {
        /// Free.
        free: usize,
        /// The device's.
        total: usize,
    },
    /// The host has no room for memory that stays where it is.
    #[error("the host has no room for {bytes} bytes that stay in memory (pinned): raise the container's memory limit")]
    HostOutOfMemory {
        /// Asked for.
        bytes: usize,
    },
    /// A launch that its kernel does not allow.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The kernels could not be compiled, read or loaded.
    #[error("the kernels of {file}: {reason}")]
    Image {
        /// The source file.
        file: &'static str,
        /// What is wrong.
        reason: String,
    },
}

impl DriverError {
    /// A call that the driver refused, with the device still sound.
    pub fn refused(call: &'static str, reason: impl Into<String>) -> DriverError {
        DriverError::Call { call, reason: reason.into(), device_lost: false }
    }

    /// Whether memory was asked for that is not there, on the device or on the host.
    pub fn is_out_of_memory(&self) -> bool {
        use DriverError::{HostOutOfMemory, NoRoomForGraph, OutOfMemory};
        matches!(self, OutOfMemory { .. } | HostOutOfMemory { .. } | NoRoomForGraph { .. })
    }

    /// Whether nothing more can be computed on the device in this process.
    pub fn device_lost(&self) -> bool {
        matches!(self, DriverError::Call { device_lost: true, .. })
    }
}
