//! Products of inputs in bytes with weights of 2 to 8 bits, as integers, and the rounding of such inputs.

use half::bf16;

use super::blocks::Block;
use super::linear::{Output, each_part, part_product, tokens_of};
use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::weights::{Group, Matrix, Superblock, Values};
use crate::cuda::{DriverError, Kernel, Memory, Stream, View, ViewMut};

/// Columns that a warp multiplies at a time: a token's codes have whole ones.
const SPAN: usize = 128;
/// Tokens have scales in such numbers.
const TOKEN_ALIGNMENT: usize = 8;
/// Floats of a token and a span: a scale and three sums of its codes for each 32 columns.
const SPAN_FLOATS: usize = 4 * 4;
/// Blocks of columns, and tokens, of a block of the rounding.
const ROUNDING: [usize; 2] = [8, TOKEN_ALIGNMENT];

/// Tokens in bytes: signed codes, and a scale for each 32 of them with the scaled sums of the codes (`rounded.cuh`).
#[derive(Clone, Copy, Debug)]
pub struct Rounded<'a> {
    /// Row after row.
    pub codes: View<'a, u8>,
    /// Of each span of columns and each two tokens.
    pub scales: View<'a, f32>,
}

impl Rounded<'_> {
    /// Codes and floats of so many tokens of so many values.
    pub fn lengths(tokens: usize, cols: usize) -> [usize; 2] {
        let spans = cols.div_ceil(SPAN);
        [tokens * spans * SPAN, tokens.next_multiple_of(TOKEN_ALIGNMENT) * spans * SPAN_FLOATS]
    }
}

/// Whether a matrix, or a part of it, is multiplied with inputs in bytes.
pub fn multiplies_rounded(matrix: &Matrix) -> bool {
    matrix.order().is_none() && matrix.parts().iter().any(|part| layout(part.values()).is_some())
}

/// Rounds each 32 values of each token of `cols` to bytes: the largest becomes 127. Where a value is not finite the scale is none.
///
/// # Panics
/// When the lengths do not match.
pub fn round_inputs(
    stream: &Stream,
    cols: usize,
    input: View<'_, bf16>,
    codes: ViewMut<'_, u8>,
    scales: ViewMut<'_, f32>,
) -> Result<(), DriverError> {
    assert!(!input.is_empty() && input.len().is_multiple_of(cols), "{} values are no tokens of {cols}", input.len());
    let tokens = input.len() / cols;
    assert_eq!([codes.len(), scales.len()], Rounded::lengths(tokens, cols), "codes and scales of {tokens} x {cols}");
    let blocks = codes.len() / tokens / 32;
    let grid = [word(blocks.div_ceil(ROUNDING[0])), word(tokens.div_ceil(ROUNDING[1])), 1];
    let launch = Launch::new(Kernel::RoundInputs, grid).with(input).with(codes).with(scales);
    // SAFETY: a warp reads values of eight tokens that are there, and writes their codes and scales.
    unsafe { stream.launch(&launch.with(word(tokens)).with(word(cols))) }
}

/// `out[t] = matrix · input[t]` with the inputs that `rounded` holds, which are `input`'s; parts of the matrix for which there is no
/// such product are multiplied with `input` itself. A token's result is the same whatever tokens come with it.
///
/// # Panics
/// When the lengths do not match, or the matrix's columns have an order of their own.
pub fn linear_rounded(
    stream: &Stream,
    matrix: &Matrix,
    input: View<'_, bf16>,
    rounded: &Rounded<'_>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    multiply(stream, matrix, input, rounded, out, |rows, tokens| Block::new(stream.device().facts(), rows, tokens))
}

/// The same by blocks for many tokens, however few there are: the same bits.
///
/// # Panics
/// As [`linear_rounded`].
pub fn linear_rounded_many(
    stream: &Stream,
    matrix: &Matrix,
    input: View<'_, bf16>,
    rounded: &Rounded<'_>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    multiply(stream, matrix, input, rounded, out, |_, _| Block::Many)
}

fn multiply(
    stream: &Stream,
    matrix: &Matrix,
    input: View<'_, bf16>,
    rounded: &Rounded<'_>,
    out: Output<'_>,
    block: impl Fn(usize, usize) -> Block,
) -> Result<(), DriverError> {
    assert!(matrix.order().is_none(), "the columns of a matrix have an order of their own");
    let tokens = tokens_of(matrix, &input);
    let lengths = [rounded.codes.len(), rounded.scales.len()];
    assert_eq!(lengths, Rounded::lengths(tokens, matrix.cols()), "{tokens} tokens of {}", matrix.cols());
    each_part(stream, matrix, tokens, out, |part, out| {
        let block = block(part.rows(), tokens);
        match layout(part.values()) {
            Some((kernels, packed)) => {
                let grid = block.grid(part.rows(), tokens.div_ceil(block.tokens()));
                product(
                    Launch::new(kernels[block as usize], grid),
                    packed,
                    rounded,
                    out,
                    [tokens, part.rows(), part.cols()],
                )
            }
            None => part_product(part, block, input, out, tokens),
        }
    })
}

/// The launch of a product with what a part of a matrix holds, whose results for a token lie `stride` behind those for the one
/// before.
fn product(
    launch: Launch,
    [codes, scales]: [&Memory<u32>; 2],
    rounded: &Rounded<'_>,
    (out, stride): (Output<'_>, usize),
    [tokens, rows, cols]: [usize; 3],
) -> Launch {
    assert!(u32::try_from(rounded.codes.len()).is_ok(), "{} codes; kernels count them in 32 bits", rounded.codes.len());
    let launch = launch.with(codes.view()).with(scales.view()).with(rounded.codes).with(rounded.scales);
    let launch = out.arguments().into_iter().fold(launch, Launch::with).with(word(stride));
    launch.with(word(tokens)).with(word(rows)).with(word(cols))
}

/// The kernels for a layout in the order of [`Block`], and its codes and scales; none where inputs are not rounded for it.
fn layout(values: &Values) -> Option<([Kernel; 5], [&Memory<u32>; 2])> {
    Some(match values {
        Values::Grouped { codes, scales, group: Group::G32, bits, affine } => {
            (grouped(*bits, *affine), [codes, scales])
        }
        Values::Int8 { codes, scales } => (BYTES, [codes, scales]),
        Values::Superblocks { codes, scales, kind } => (superblocks(*kind), [codes, scales]),
        _ => return None,
    })
}

/// For signed bytes.
const BYTES: [Kernel; 5] = {
    use Kernel::*;
    [RoundedQ80T8, RoundedQ80T16, RoundedQ80T32, RoundedQ80T64, ManyRoundedQ80]
};

/// For codes of 4 bits, or of 5.
fn grouped(bits: usize, affine: bool) -> [Kernel; 5] {
    use Kernel::*;
    match (bits, affine) {
        (4, false) => [RoundedQ40T8, RoundedQ40T16, RoundedQ40T32, RoundedQ40T64, ManyRoundedQ40],
        (4, true) => [RoundedQ41T8, RoundedQ41T16, RoundedQ41T32, RoundedQ41T64, ManyRoundedQ41],
        (_, false) => [RoundedQ50T8, RoundedQ50T16, RoundedQ50T32, RoundedQ50T64, ManyRoundedQ50],
        (_, true) => [RoundedQ51T8, RoundedQ51T16, RoundedQ51T32, RoundedQ51T64, ManyRoundedQ51],
    }
}

fn superblocks(kind: Superblock) -> [Kernel; 5] {
    use Kernel::*;
    match kind {
        Superblock::Q2K => [RoundedQ2KT8, RoundedQ2KT16, RoundedQ2KT32, RoundedQ2KT64, ManyRoundedQ2K],
        Superblock::Q3K => [RoundedQ3KT8, RoundedQ3KT16, RoundedQ3KT32, RoundedQ3KT64, ManyRoundedQ3K],
        Superblock::Q4K => [RoundedQ4KT8, RoundedQ4KT16, RoundedQ4KT32, RoundedQ4KT64, ManyRoundedQ4K],
        Superblock::Q5K => [RoundedQ5KT8, RoundedQ5KT16, RoundedQ5KT32, RoundedQ5KT64, ManyRoundedQ5K],
        Superblock::Q6K => [RoundedQ6KT8, RoundedQ6KT16, RoundedQ6KT32, RoundedQ6KT64, ManyRoundedQ6K],
        Superblock::IQ4XS => [RoundedIq4XsT8, RoundedIq4XsT16, RoundedIq4XsT32, RoundedIq4XsT64, ManyRoundedIq4Xs],
    }
}
