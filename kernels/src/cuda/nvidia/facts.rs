//! What the driver says of a device.

use std::env;
use std::ffi::{CStr, c_int};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::mapping;
use super::outcome::call;
use crate::cuda::features::WITHOUT;
use crate::cuda::{DeviceFacts, DriverError, Features};

/// Of a device of an initialized driver.
pub(super) fn facts(device: sys::CUdevice, ordinal: usize) -> Result<DeviceFacts, DriverError> {
    let get = |attribute| -> Result<u32, DriverError> {
        let mut value = 0;
        // SAFETY: the place is valid for the write.
        call("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
        Ok(value as u32)
    };
    let (mut name, mut bus, mut memory_bytes, mut version) = ([0; 256], [0; 32], 0, 0);
    // SAFETY: the places are valid for the writes; texts are cut to their arrays and end with a zero.
    let (name, pci_bus_id) = unsafe {
        call("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device))?;
        call("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as c_int, device))?;
        call("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
        call("cuDriverGetVersion", sys::cuDriverGetVersion(&mut version))?;
        [name.as_ptr(), bus.as_ptr()].map(|text| CStr::from_ptr(text).to_string_lossy().into_owned()).into()
    };
    let capability = (
        get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok(DeviceFacts {
        name,
        ordinal,
        pci_bus_id,
        capability,
        features: Features::of(capability).without(&env::var(WITHOUT).unwrap_or_default())?,
        multiprocessors: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes_per_block: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: get(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        memory_bytes,
        map_granularity: match get(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)? {
            0 => None,
            _ => Some(mapping::granularity(device)?),
        },
        driver: format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
    })
}
