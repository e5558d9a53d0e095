//! A GPU's primary context, which everything of a process on that GPU shares.

use std::ffi::c_int;
use std::ptr::null_mut;

use cudarc::driver::sys;

use super::outcome::call;
use crate::cuda::DriverError;

/// The context, retained as long as this is there.
#[derive(Debug)]
pub(super) struct Context {
    pub device: sys::CUdevice,
    pub handle: sys::CUcontext,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Of GPU `ordinal`. The driver is initialized.
    pub fn of(ordinal: usize) -> Result<Context, DriverError> {
        let (mut device, mut handle) = (0, null_mut());
        // SAFETY: the driver is initialized, and the places are valid for the writes.
        unsafe {
            call("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal as c_int))?;
            call("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut handle, device))?;
        }
        Ok(Context { device, handle })
    }

    /// Makes it this thread's.
    pub fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained until this is dropped.
        call("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.handle) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `of`.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
