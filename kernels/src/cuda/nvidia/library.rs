//! Libraries that a machine may have, looked up at run time.

use std::error::Error;
use std::ffi::CStr;

use libloading::Library;

use crate::cuda::DriverError;

/// The first of these libraries that there is.
///
/// # Safety
/// What loading them runs may run here.
pub(super) unsafe fn open(names: &[&str]) -> Result<Library, DriverError> {
    let mut missing = Vec::new();
    for &name in names {
        // SAFETY: as the caller promises.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => missing.push(words(&error)),
        }
    }
    Err(DriverError::refused("dlopen", missing.join("; ")))
}

/// A function of a library, which the library must outlive.
///
/// # Safety
/// The symbol is of type `T`.
pub(super) unsafe fn symbol<T: Copy>(library: &Library, name: &CStr) -> Result<T, DriverError> {
    // SAFETY: as the caller promises.
    let found = unsafe { library.get::<T>(name) };
    found.map(|found| *found).map_err(|error| DriverError::refused("dlsym", words(&error)))
}

/// The loader's own words, which name what it looked for.
fn words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
