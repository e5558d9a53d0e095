//! What a call of the driver comes to.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

use crate::cuda::DriverError;

/// An error unless it succeeded.
pub(super) fn call(name: &'static str, result: CUresult) -> Result<(), DriverError> {
    use CUresult as R;
    if result == R::CUDA_SUCCESS {
        return Ok(());
    }
    // After these the context is of no use any more (CUDA Driver API, cudaError_enum).
    let device_lost = matches!(
        result,
        R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | R::CUDA_ERROR_CONTAINED
            | R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | R::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | R::CUDA_ERROR_EXTERNAL_DEVICE
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | R::CUDA_ERROR_UNKNOWN
    );
    Err(DriverError::Call { call: name, reason: words(result), device_lost })
}

/// The driver's name of an error and what it means.
fn words(result: CUresult) -> String {
    let text = |find: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver gives a text that lives as long as the program, or leaves the place alone.
        unsafe {
            (find(result, &mut text) == CUresult::CUDA_SUCCESS && !text.is_null())
                .then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("error {}", result as u32));
    text(sys::cuGetErrorString).map_or_else(|| name.clone(), |meaning| format!("{name}: {meaning}"))
}
