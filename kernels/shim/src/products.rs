//! A library for large products, with cuBLASLt's rules: what was not planned for its shape is not multiplied, nor what begins
//! elsewhere than at multiples of 16 bytes, and nothing is planned or multiplied for the first time in a capture.

use std::collections::BTreeSet;
use std::sync::{Mutex, Weak};

use windlass_kernels::cuda::DriverError;
use windlass_kernels::cuda::driver::{DevicePointer, Product, ProductOutput, Products, StreamHandle};

use crate::driver::{HostDriver, lock};
use crate::state::refused;

const CALL: &str = "cublasLtMatmul";
const WORKSPACE_BYTES: usize = 4 << 10;

/// On one device.
#[derive(Debug)]
pub(crate) struct HostProducts {
    device: Weak<HostDriver>,
    planned: Mutex<BTreeSet<Product>>,
}

impl HostProducts {
    pub(crate) fn of(device: &Weak<HostDriver>) -> HostProducts {
        HostProducts { device: device.clone(), planned: Mutex::default() }
    }
}

impl Products for HostProducts {
    fn name(&self) -> String {
        "the shim's products".to_owned()
    }

    fn workspace_bytes(&self) -> usize {
        WORKSPACE_BYTES
    }

    fn plan(&self, product: &Product) -> Result<bool, DriverError> {
        let Some(device) = self.device.upgrade() else { return Err(refused(CALL, "the device is gone")) };
        device.check_not_capturing("cublasLtMatmulAlgoGetHeuristic")?;
        lock(&self.planned).insert(*product);
        Ok(true)
    }

    fn multiply(
        &self,
        product: &Product,
        operands: [DevicePointer; 3],
        workspace: DevicePointer,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        let Some(device) = self.device.upgrade() else { return Err(refused(CALL, "the device is gone")) };
        if !lock(&self.planned).contains(product) {
            return Err(refused(CALL, "CUBLAS_STATUS_INVALID_VALUE: nothing was planned for this shape"));
        }
        if operands.iter().any(|operand| !operand.0.is_multiple_of(16)) {
            return Err(refused(CALL, "CUBLAS_STATUS_NOT_SUPPORTED: an operand is not aligned to 16 bytes"));
        }
        device.check_not_capturing(CALL)?;
        let [weights, input, out] = operands.map(|operand| operand.0);
        let workspace = (workspace.0, WORKSPACE_BYTES);
        device.multiply(CALL, Multiplied { product: *product, weights, input, out, workspace }, stream)
    }
}

/// A product on its way. Addresses are of this process.
#[derive(Clone, Debug)]
pub(crate) struct Multiplied {
    product: Product,
    weights: u64,
    input: u64,
    out: u64,
    workspace: (u64, usize),
}

impl Multiplied {
    /// The memory that it names.
    pub(crate) fn memory(&self) -> Vec<(u64, usize)> {
        let Product { tokens, rows, cols, out } = self.product;
        let out_bytes = if out == ProductOutput::Bf16 { 2 } else { 4 };
        let operands = [(self.weights, 2 * rows * cols), (self.input, 2 * tokens * cols)];
        operands.into_iter().chain([(self.out, out_bytes * tokens * rows), self.workspace]).collect()
    }

    pub(crate) fn run(&self) {
        let Product { tokens, rows, cols, out } = self.product;
        // SAFETY: as for all work, memory was checked when this was issued and is there until it is done.
        unsafe {
            // The library writes what it likes there.
            (self.workspace.0 as *mut u8).write_bytes(0xff, self.workspace.1);
            for (at, (token, row)) in (0..tokens).flat_map(|token| (0..rows).map(move |row| (token, row))).enumerate() {
                let sum = dot(self.weights, row * cols, self.input, token * cols, cols);
                match out {
                    ProductOutput::Bf16 => (self.out as *mut u16).add(at).write(rounded(sum)),
                    ProductOutput::F32 => (self.out as *mut f32).add(at).write(sum),
                    ProductOutput::AddTo => *(self.out as *mut f32).add(at) += sum,
                }
            }
        }
    }
}

/// The sum of `count` products, the last one first: in another order than the kernels'.
///
/// # Safety
/// Both arrays in bf16 are there.
unsafe fn dot(weights: u64, first: usize, input: u64, other: usize, count: usize) -> f32 {
    // SAFETY: as the caller promises.
    let value =
        |at: u64, index: usize| f32::from_bits(u32::from(unsafe { (at as *const u16).add(index).read() }) << 16);
    (0..count).rev().map(|index| value(weights, first + index) * value(input, other + index)).sum()
}

/// The nearest bf16, of two the even one.
fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}
