//! Matrices of which kernels copy tiles, as the driver has them described.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::call;
use crate::cuda::DriverError;
use crate::cuda::launch::TensorMap;
use crate::cuda::memory::ElementType;

/// A matrix as the driver tells copies of it: swizzled as wgmma reads it, and zeros outside.
pub(super) fn encoded(tiles: &TensorMap) -> Result<sys::CUtensorMap, DriverError> {
    use sys::CUtensorMapDataType as Type;
    let data_type = match tiles.element {
        ElementType::U8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        ElementType::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        ElementType::U32 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        ElementType::U64 | ElementType::Address => Type::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        ElementType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    };
    // Columns come first.
    let (sizes, row_bytes) = ([u64::from(tiles.cols), u64::from(tiles.rows)], [tiles.row_bytes() as u64]);
    let (box_sizes, steps) = ([tiles.box_cols(), tiles.box_rows], [1; 2]);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: there is room for the map, and numbers of two dimensions, of which the rows have a stride; the address is only kept.
    call("cuTensorMapEncodeTiled", unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            data_type,
            sizes.len() as u32,
            tiles.at.0 as *mut c_void,
            sizes.as_ptr(),
            row_bytes.as_ptr(),
            box_sizes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    })?;
    Ok(map)
}
