//! Gated activation (Shazeer 2020).

use half::bf16;

use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::{DriverError, Kernel, Stream, View, ViewMut};

/// Values that a block computes.
const BLOCK_VALUES: usize = 256 * 8;

/// `out[t] = silu(gate) · up`, of tokens that hold `cols` gates and then `cols` ups.
///
/// # Panics
/// When the lengths do not match, or `cols` is no multiple of 8.
pub fn silu_mul(
    stream: &Stream,
    gate_up: View<'_, bf16>,
    cols: usize,
    out: ViewMut<'_, bf16>,
) -> Result<(), DriverError> {
    assert!(cols > 0 && cols.is_multiple_of(8), "rows of {cols} values; kernels read 8 at a time");
    assert!(out.len().is_multiple_of(cols), "{} values are no whole tokens of {cols}", out.len());
    assert_eq!(gate_up.len(), 2 * out.len(), "a gate and an up for each value");
    let grid = [word(cols.div_ceil(BLOCK_VALUES)), word(out.len() / cols), 1];
    let launch = Launch::new(Kernel::SiluMul, grid).with(gate_up).with(out).with(word(cols));
    // SAFETY: each thread computes 8 of a token's `cols` values, those that are there.
    unsafe { stream.launch(&launch) }
}
