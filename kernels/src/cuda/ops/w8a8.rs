//! Products of activations in 8 bits with weights in 8 bits (W8A8), and the activations' own quantization.

use half::bf16;

use super::experts::{Mixture, Routes};
use super::linear::Output;
use super::wide::{blocks_on_hopper, tokens_on_hopper};
use super::word;
use crate::cuda::launch::{Argument, Launch, TensorMap};
use crate::cuda::table::{GEMM_HOPPER_TILE, W8A8_HOPPER_SHARED_BYTES, W8A8_MANY_SHARED_BYTES};
use crate::cuda::weights::{EightBits, Matrix, Values};
use crate::cuda::{DeviceFacts, DriverError, Kernel, Stream, View, ViewMut};

/// Tokens, and rows, of a block of `w8a8.cu` for few tokens.
const FEW: [usize; 2] = [16, 16];
/// The same for many.
const MANY: [usize; 2] = [64, 128];
/// The most tokens that are few: an estimate, as no GPU has told. Results are the same either way.
const MOST_FEW: usize = 32;
/// Fewest tokens that Hopper's warpgroups multiply: more than a block for many has. An estimate, too.
const FEWEST_BY_WARPGROUPS: usize = MANY[0] + 1;

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

/// Room for tokens in 8 bits.
#[derive(Debug)]
pub struct QuantizedMut<'a> {
    /// What they are rounded to: the largest value of a token becomes the largest code.
    pub code: EightBits,
    /// Row after row.
    pub codes: ViewMut<'a, u8>,
    /// Of each token; none where a value of it is not finite.
    pub scales: ViewMut<'a, f32>,
}

impl QuantizedMut<'_> {
    /// Tokens, and values of one.
    ///
    /// # Panics
    /// When there are no whole tokens of `values` values, or a token is no multiple of 8 of them.
    pub(super) fn shape(&self, values: usize) -> [usize; 2] {
        let tokens = self.scales.len();
        assert!(tokens > 0 && values.is_multiple_of(tokens), "{values} values of {tokens} tokens");
        assert_eq!(self.codes.len(), values, "a code for each value");
        let cols = values / tokens;
        assert!(cols.is_multiple_of(8), "tokens of {cols} values; kernels read 8 at a time");
        [tokens, cols]
    }

    /// That of its code.
    pub(super) fn kernel(&self, int8: Kernel, e4m3: Kernel) -> Kernel {
        kernel_of(self.code, int8, e4m3)
    }
}

fn kernel_of(code: EightBits, int8: Kernel, e4m3: Kernel) -> Kernel {
    match code {
        EightBits::Int8 => int8,
        EightBits::E4m3 => e4m3,
    }
}

/// Rounds each token of `input` to codes of its own scale.
///
/// # Panics
/// When the lengths do not match, or a token is no multiple of 8 values.
pub fn quantize_tokens(stream: &Stream, input: View<'_, bf16>, out: QuantizedMut<'_>) -> Result<(), DriverError> {
    let tokens = out.scales.len();
    quantize(stream, input, Argument::none::<u32>(), tokens, out)
}

/// The same with a row for each token and each of its experts, each expert's side by side, as `routes` were chosen; rows of experts
/// that are elsewhere mean nothing.
///
/// # Panics
/// When the lengths do not match, or a token is no multiple of 8 values.
pub fn quantize_routed(
    stream: &Stream,
    routes: &Routes,
    input: View<'_, bf16>,
    out: QuantizedMut<'_>,
) -> Result<(), DriverError> {
    let tokens = out.scales.len() / routes.mixture().used;
    assert_eq!(out.scales.len(), tokens * routes.mixture().used, "a row for each token and expert");
    quantize(stream, input, routes.token_at(tokens).into(), tokens, out)
}

/// `order` names a token of the input for each row, or nothing.
fn quantize(
    stream: &Stream,
    input: View<'_, bf16>,
    order: Argument,
    tokens: usize,
    out: QuantizedMut<'_>,
) -> Result<(), DriverError> {
    let [rows, cols] = out.shape(out.codes.len());
    assert_eq!(input.len(), tokens * cols, "{tokens} tokens of {cols} values");
    let kernel = out.kernel(Kernel::QuantizeInt8, Kernel::QuantizeFp8);
    let launch = Launch::new(kernel, [word(rows), 1, 1]).with(input).with(order).with(out.codes).with(out.scales);
    // SAFETY: one block for each row, which reads one of `tokens` tokens and writes that row alone.
    unsafe { stream.launch(&launch.with(word(tokens)).with(word(cols))) }
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
    multiply(stream, matrix, input, out, false)
}

/// [`linear_w8a8`], but that Hopper's warpgroups multiply many tokens in e4m3: equal but for rounding. Not for a mode in which
/// results must not depend on the batch.
///
/// # Panics
/// As [`linear_w8a8`].
pub fn linear_w8a8_wide(
    stream: &Stream,
    matrix: &Matrix,
    input: &Quantized<'_>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    multiply(stream, matrix, input, out, true)
}

fn multiply(
    stream: &Stream,
    matrix: &Matrix,
    input: &Quantized<'_>,
    out: Output<'_>,
    wide: bool,
) -> Result<(), DriverError> {
    let (rows, cols, tokens) = (matrix.rows(), matrix.cols(), input.scales.len());
    let facts = stream.device().facts();
    let Values::Eight { codes, scales, group, code } = matrix.values() else {
        panic!("a matrix that is not in 8 bits")
    };
    assert!(matrix.order().is_none(), "the columns of a matrix have an order of their own");
    assert!(multiplies(facts, *code), "{code:?} on {facts:?}");
    assert!(tokens > 0 && input.codes.len() == tokens * cols, "{} codes of {tokens} tokens", input.codes.len());
    assert_eq!(out.len(), tokens * rows, "{tokens} tokens of {rows} values");
    // Integers are added up exactly, in whatever order.
    let by_warpgroups = facts.has_warpgroups() && tokens >= FEWEST_BY_WARPGROUPS && (wide || *code == EightBits::Int8);
    let launch = match by_warpgroups {
        true => {
            let kernel = kernel_of(*code, Kernel::W8a8HopperInt8, Kernel::W8a8HopperFp8);
            with_operands(blocks_on_hopper(facts, kernel, tokens, rows), codes.view(), scales.view(), input, cols)
        }
        false => {
            let launch = blocks(*code, tokens, rows).with(codes.view()).with(scales.view());
            launch.with(input.codes).with(input.scales)
        }
    };
    let launch = out.ungated_arguments().into_iter().fold(launch, Launch::with);
    let launch = launch.with(word(tokens)).with(word(rows)).with(word(cols)).with(word((*group).min(cols)));
    // SAFETY: blocks read rows and tokens that are there, and write those.
    unsafe { stream.launch(&launch) }
}

/// Whether [`linear_experts_w8a8`] is for so many tokens and such a matrix of all experts on a device: where an expert gets more than
/// a block for many has.
pub fn multiplies_experts_rounded(facts: &DeviceFacts, matrix: &Matrix, mixture: &Mixture, tokens: usize) -> bool {
    let reads = TensorMap::reads_rows_of(matrix.cols()) && matrix.order().is_none();
    facts.has_warpgroups() && matrix.code().is_some() && reads && mixture.share(tokens) >= FEWEST_BY_WARPGROUPS
}

/// `out[row] = matrix of the row's expert · input[row]` with both in 8 bits, by Hopper's warpgroups, for rows as [`quantize_routed`]
/// left them: what [`linear_w8a8_wide`] gives with that expert's matrix alone. Rows that are nobody's stay as they are.
///
/// # Panics
/// When the lengths do not match, the matrix is none of 8 bits on Hopper with columns in the order of inputs, or the routes were not
/// chosen by [`Routes::choose_wide`].
pub fn linear_experts_w8a8(
    stream: &Stream,
    matrix: &Matrix,
    routes: &Routes,
    input: &Quantized<'_>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    let Mixture { held, used, .. } = *routes.mixture();
    let (inputs, rows, cols) = (input.scales.len(), matrix.rows() / held, matrix.cols());
    let Values::Eight { codes, scales, group, code } = matrix.values() else {
        panic!("a matrix that is not in 8 bits")
    };
    assert!(routes.are_wide(), "routes that are chosen for narrow products");
    assert!(matrix.order().is_none(), "the columns of experts have an order of their own");
    assert!(matrix.rows() == held * rows && inputs.is_multiple_of(used), "{inputs} rows, {} of {held}", matrix.rows());
    assert_eq!([input.codes.len(), out.len()], [inputs * cols, inputs * rows], "{inputs} rows of {cols} and {rows}");
    let (tiles, tile_count) = routes.tiles(inputs / used);
    let kernel = kernel_of(*code, Kernel::W8a8HopperInt8Experts, Kernel::W8a8HopperFp8Experts);
    let tokens = tile_count * GEMM_HOPPER_TILE as usize;
    let facts = stream.device().facts();
    let launch = with_operands(blocks_on_hopper(facts, kernel, tokens, rows), codes.view(), scales.view(), input, cols);
    let stride = word(out.stride(rows));
    let launch = out.ungated_arguments().into_iter().fold(launch.with(tiles), Launch::with);
    let launch = launch.with(stride).with(word(rows)).with(word(cols)).with(word((*group).min(cols)));
    // SAFETY: tiles name experts that there are and rows that there are, each row once.
    unsafe { stream.launch(&launch) }
}

/// Blocks of `w8a8.cu`.
fn blocks(code: EightBits, tokens: usize, rows: usize) -> Launch {
    let few = tokens <= MOST_FEW;
    let kernel = match few {
        true => kernel_of(code, Kernel::W8a8Int8Few, Kernel::W8a8Fp8Few),
        false => kernel_of(code, Kernel::W8a8Int8Many, Kernel::W8a8Fp8Many),
    };
    let (tile, shared) = if few { (FEW, 0) } else { (MANY, W8A8_MANY_SHARED_BYTES) };
    Launch::new(kernel, [word(rows.div_ceil(tile[1])), word(tokens.div_ceil(tile[0])), 1]).shared(shared)
}

/// A launch of `w8a8_hopper.cu` with its weights and input.
fn with_operands(
    launch: Launch,
    codes: View<'_, u8>,
    scales: View<'_, f32>,
    input: &Quantized<'_>,
    cols: usize,
) -> Launch {
    let launch = launch.shared(W8A8_HOPPER_SHARED_BYTES).with(TensorMap::new(codes, cols, GEMM_HOPPER_TILE));
    launch.with(scales).with(tokens_on_hopper(input.codes, cols)).with(input.scales)
}
