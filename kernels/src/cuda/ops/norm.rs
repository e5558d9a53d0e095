//! Root-mean-square norms (Zhang and Sennrich 2019), one block per token.

use half::bf16;

use super::w8a8::QuantizedMut;
use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::{DriverError, Kernel, Stream, View, ViewMut};

/// `out[t] = input[t] / sqrt(mean(input[t]²) + epsilon) · weight` for each token of `weight.len()` values.
///
/// # Panics
/// When the lengths are no whole tokens or differ, or a token is no multiple of 8 values.
pub fn rms_norm(
    stream: &Stream,
    input: View<'_, f32>,
    weight: View<'_, f32>,
    epsilon: f32,
    out: ViewMut<'_, bf16>,
) -> Result<(), DriverError> {
    let (rows, cols) = shape(input.len(), weight.len(), out.len());
    let launch = Launch::new(Kernel::RmsNorm, [word(rows), 1, 1]);
    let launch = launch.with(input).with(weight).with(out).with(word(cols)).with(epsilon);
    // SAFETY: one block reads and writes one of `rows` tokens of `cols` values.
    unsafe { stream.launch(&launch) }
}

/// The same rounded to 8 bits: the codes that [`quantize_tokens`](super::quantize_tokens) would make of it.
///
/// # Panics
/// As [`rms_norm`].
pub fn rms_norm_quantized(
    stream: &Stream,
    input: View<'_, f32>,
    weight: View<'_, f32>,
    epsilon: f32,
    out: QuantizedMut<'_>,
) -> Result<(), DriverError> {
    let [tokens, cols] = out.shape(input.len());
    assert_eq!(weight.len(), cols, "a weight for each value of a token");
    let launch = Launch::new(out.kernel(Kernel::RmsNormInt8, Kernel::RmsNormFp8), [word(tokens), 1, 1]);
    let launch = launch.with(input).with(weight).with(out.codes).with(out.scales).with(word(cols)).with(epsilon);
    // SAFETY: one block reads and writes one of `tokens` tokens of `cols` values.
    unsafe { stream.launch(&launch) }
}

/// `residual += addend`, then [`rms_norm`] of the sum into `out`.
///
/// # Panics
/// When the lengths are no whole tokens or differ, or a token is no multiple of 8 values.
pub fn add_rms_norm(
    stream: &Stream,
    residual: ViewMut<'_, f32>,
    addend: View<'_, bf16>,
    weight: View<'_, f32>,
    epsilon: f32,
    out: ViewMut<'_, bf16>,
) -> Result<(), DriverError> {
    let (rows, cols) = shape(residual.len(), weight.len(), out.len());
    assert_eq!(residual.len(), addend.len(), "residual and addend");
    let launch = Launch::new(Kernel::AddRmsNorm, [word(rows), 1, 1]);
    let launch = launch.with(residual).with(addend).with(weight).with(out).with(word(cols)).with(epsilon);
    // SAFETY: one block reads and writes one of `rows` tokens of `cols` values.
    unsafe { stream.launch(&launch) }
}

/// `residual[t] += addend[t] / sqrt(mean(addend[t]²) + epsilon) · weight`: what a block gave is normed before it is added.
///
/// # Panics
/// When the lengths are no whole tokens or differ, or a token is no multiple of 8 values.
pub fn add_normed(
    stream: &Stream,
    residual: ViewMut<'_, f32>,
    addend: View<'_, bf16>,
    weight: View<'_, f32>,
    epsilon: f32,
) -> Result<(), DriverError> {
    let (rows, cols) = shape(residual.len(), weight.len(), addend.len());
    let launch = Launch::new(Kernel::AddNormed, [word(rows), 1, 1]);
    let launch = launch.with(residual).with(addend).with(weight).with(word(cols)).with(epsilon);
    // SAFETY: one block reads and writes one of `rows` tokens of `cols` values.
    unsafe { stream.launch(&launch) }
}

/// Tokens, and values of one.
fn shape(values: usize, cols: usize, out: usize) -> (usize, usize) {
    assert!(cols > 0 && cols.is_multiple_of(8), "tokens of {cols} values; kernels read 8 at a time");
    assert!(values > 0 && values.is_multiple_of(cols), "{values} values are no whole tokens of {cols}");
    assert_eq!(values, out, "as many of both");
    (values / cols, cols)
}
