//! What the driver is told of memory that gets its addresses by mapping.

use std::ptr::null_mut;

use cudarc::driver::sys;

use super::outcome::call;
use crate::cuda::DriverError;

/// Memory of a device that no other process can open.
pub(super) fn kind(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    let flags = sys::CUmemAllocationProp_st__bindgen_ty_1 {
        compressionType: 0,
        gpuDirectRDMACapable: 0,
        usage: 0,
        reserved: [0; 4],
    };
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: place(device),
        win32HandleMetaData: null_mut(),
        allocFlags: flags,
    }
}

/// The device's right to read and write.
pub(super) fn access(device: sys::CUdevice) -> sys::CUmemAccessDesc {
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    sys::CUmemAccessDesc { location: place(device), flags }
}

/// What bytes are multiples of.
pub(super) fn granularity(device: sys::CUdevice) -> Result<usize, DriverError> {
    let (mut bytes, kind) = (0, kind(device));
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the place is valid for the write, and the kind is read before the call returns.
    call("cuMemGetAllocationGranularity", unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, &kind, least) })?;
    Ok(bytes)
}

fn place(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}
