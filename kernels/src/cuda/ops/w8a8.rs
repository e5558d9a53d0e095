//! Products of activations in 8 bits with weights in 8 bits (W8A8), and the activations' own quantization.

use half::bf16;

use super::linear::Output;
use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::table::{W8A8_FEW_SHARED_BYTES, W8A8_MANY_SHARED_BYTES};
use crate::cuda::weights::{EightBits, Matrix, Values};
use crate::cuda::{DeviceFacts, DriverError, Kernel, Stream, View, ViewMut};

/// Tokens, and rows, of a block of `w8a8.cu` for few tokens.
const FEW: [usize; 2] = [16, 32];
/// The same for many.
const MANY: [usize; 2] = [64, 128];
/// The most tokens that are few: an estimate, as no GPU has told. Results are the same either way.
const MOST_FEW: usize = 32;

/// Tokens in 8 bits: codes, row after row, and a scale for each token.
#[derive(Debug)]
pub struct Quantized<'a> {
    /// As the matrix that they are multiplied with has them.
    pub codes: View<'a, u8>,
    /// Of each token.
    pub scales: View<'a, f32>,
}

/// Whether a device multiplies two of these codes: two floats of 8 bits from Ada (8.9) on.
pub fn multiplies(facts: &DeviceFacts, code: EightBits) -> bool {
    match code {
        EightBits::Int8 => facts.capability >= (8, 0),
        EightBits::E4m3 => facts.capability >= (8, 9),
    }
}

/// Rounds each token of `input` to codes of its own scale: the largest value becomes the largest code.
///
/// # Panics
/// When the lengths do not match.
pub fn quantize_tokens(
    stream: &Stream,
    code: EightBits,
    input: View<'_, bf16>,
    codes: ViewMut<'_, u8>,
    scales: ViewMut<'_, f32>,
) -> Result<(), DriverError> {
    let tokens = scales.len();
    assert!(tokens > 0 && input.len().is_multiple_of(tokens), "{} values of {tokens} tokens", input.len());
    assert_eq!(codes.len(), input.len(), "a code for each value");
    let kernel = match code {
        EightBits::Int8 => Kernel::QuantizeInt8,
        EightBits::E4m3 => Kernel::QuantizeFp8,
    };
    let launch = Launch::new(kernel, [word(tokens), 1, 1]);
    let launch = launch.with(input).with(codes).with(scales).with(word(input.len() / tokens));
    // SAFETY: one block for each token, which reads and writes that token's values alone.
    unsafe { stream.launch(&launch) }
}

/// `out[t] = matrix · input[t]` with both in 8 bits. A token's result is the same whatever tokens come with it.
///
/// # Panics
/// When the lengths do not match, the matrix is not in 8 bits row after row with columns in the order of inputs, or the
/// device does not multiply its codes ([`multiplies`]).
pub fn linear_w8a8(
    stream: &Stream,
    matrix: &Matrix,
    input: &Quantized<'_>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    let (rows, cols, tokens) = (matrix.rows(), matrix.cols(), input.scales.len());
    let Values::Eight { codes, scales, group, code } = matrix.values() else {
        panic!("a matrix that is not in 8 bits")
    };
    assert!(matrix.order().is_none(), "the columns of a matrix have an order of their own");
    assert!(multiplies(stream.device().facts(), *code), "{code:?} on {:?}", stream.device().facts());
    assert!(tokens > 0 && input.codes.len() == tokens * cols, "{} codes of {tokens} tokens", input.codes.len());
    assert_eq!(out.len(), tokens * rows, "{tokens} tokens of {rows} values");
    let few = tokens <= MOST_FEW;
    let kernel = match (code, few) {
        (EightBits::Int8, true) => Kernel::W8a8Int8Few,
        (EightBits::Int8, false) => Kernel::W8a8Int8Many,
        (EightBits::E4m3, true) => Kernel::W8a8Fp8Few,
        (EightBits::E4m3, false) => Kernel::W8a8Fp8Many,
    };
    let (tile, shared) = if few { (FEW, W8A8_FEW_SHARED_BYTES) } else { (MANY, W8A8_MANY_SHARED_BYTES) };
    let grid = [word(rows.div_ceil(tile[1])), word(tokens.div_ceil(tile[0])), 1];
    let launch = Launch::new(kernel, grid).shared(shared);
    let launch = launch.with(codes.view()).with(scales.view()).with(input.codes).with(input.scales);
    let launch = out.arguments().into_iter().fold(launch, Launch::with);
    let launch = launch.with(word(tokens)).with(word(rows)).with(word(cols)).with(word((*group).min(cols)));
    // SAFETY: blocks read rows and tokens that are there, and write those.
    unsafe { stream.launch(&launch) }
}
