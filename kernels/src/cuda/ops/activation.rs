//! Elementwise ops: the gated activation (Shazeer 2020) and the cap of logits.

use half::bf16;

use super::w8a8::QuantizedMut;
use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::{DriverError, Kernel, Stream, View, ViewMut};

/// Threads of a block.
const BLOCK: usize = 256;
/// Values of a row that a block gates.
const BLOCK_VALUES: usize = BLOCK * 8;

/// What is done to a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x / (1 + e⁻ˣ)`.
    Silu,
    /// The Gaussian error unit by its hyperbolic tangent (Hendrycks and Gimpel 2016).
    GeluTanh,
}

/// How gates and their ups stand among a token's values, and among the rows of the matrix that gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateLayout {
    /// All gates, and then all ups.
    Halves,
    /// Eight gates and then their ups, as a product may gate them itself
    /// ([`Output::Gated`](super::Output::Gated)).
    Eights,
}

/// `out[t] = activation(gate) · up`, of tokens that hold `cols` gates and as many ups.
///
/// # Panics
/// When the lengths do not match, or `cols` is no multiple of 8.
pub fn gate_mul(
    stream: &Stream,
    gate: Gate,
    layout: GateLayout,
    gate_up: View<'_, bf16>,
    cols: usize,
    out: ViewMut<'_, bf16>,
) -> Result<(), DriverError> {
    assert!(cols > 0 && cols.is_multiple_of(8), "rows of {cols} values; kernels read 8 at a time");
    assert!(out.len().is_multiple_of(cols), "{} values are no whole tokens of {cols}", out.len());
    assert_eq!(gate_up.len(), 2 * out.len(), "a gate and an up for each value");
    let kernel = match gate {
        Gate::Silu => Kernel::SiluMul,
        Gate::GeluTanh => Kernel::GeluMul,
    };
    let grid = [word(out.len() / cols), word(cols.div_ceil(BLOCK_VALUES)), 1];
    let launch = Launch::new(kernel, grid).with(gate_up).with(out).with(word(cols));
    // SAFETY: each thread computes 8 of a token's `cols` values, those that are there.
    unsafe { stream.launch(&launch.with(u32::from(layout == GateLayout::Eights))) }
}

/// The same rounded to 8 bits: the codes that [`quantize_tokens`](super::quantize_tokens) would make of it.
///
/// # Panics
/// As [`gate_mul`].
pub fn gate_mul_quantized(
    stream: &Stream,
    gate: Gate,
    layout: GateLayout,
    gate_up: View<'_, bf16>,
    out: QuantizedMut<'_>,
) -> Result<(), DriverError> {
    let [tokens, cols] = out.shape(gate_up.len() / 2);
    assert_eq!(gate_up.len(), 2 * tokens * cols, "a gate and an up for each value");
    let kernel = match gate {
        Gate::Silu => out.kernel(Kernel::SiluMulInt8, Kernel::SiluMulFp8),
        Gate::GeluTanh => out.kernel(Kernel::GeluMulInt8, Kernel::GeluMulFp8),
    };
    let launch = Launch::new(kernel, [word(tokens), 1, 1]).with(gate_up).with(out.codes).with(out.scales);
    // SAFETY: one block reads and writes one of `tokens` tokens of `cols` values.
    unsafe { stream.launch(&launch.with(word(cols)).with(u32::from(layout == GateLayout::Eights))) }
}

/// `values = cap · tanh(values / cap)`: no value leaves `-cap..cap`.
///
/// # Panics
/// When there are no values, or `cap` is not positive.
pub fn soft_cap(stream: &Stream, cap: f32, values: ViewMut<'_, f32>) -> Result<(), DriverError> {
    assert!(cap > 0.0 && !values.is_empty(), "{} values and a cap of {cap}", values.len());
    let count = word(values.len());
    let launch = Launch::new(Kernel::SoftCap, [word(values.len().div_ceil(BLOCK)), 1, 1]);
    // SAFETY: each thread reads and writes one of `count` values.
    unsafe { stream.launch(&launch.with(values).with(count).with(cap)) }
}
