//! Products of many tokens with a weight matrix, whose blocks have more of both than those of [`super::linear`].

use half::bf16;

use super::linear::Output;
use super::word;
use crate::cuda::launch::{Launch, TensorMap};
use crate::cuda::table::{
    GEMM_HOPPER_CLUSTER, GEMM_HOPPER_SHARE, GEMM_HOPPER_SHARED_BYTES, GEMM_HOPPER_TILE, GEMM_SHARED_BYTES,
    INT4_HOPPER_SHARED_BYTES, INT4_HOPPER_TILES,
};
use crate::cuda::weights::{Matrix, ROW_TILE, Values};
use crate::cuda::{DeviceFacts, DriverError, Element, Kernel, Memory, Stream, View};

/// Tokens, and rows, of a block of `gemm.cu`.
const GEMM_TILE: usize = 128;

/// Fewest tokens that [`linear_wide`] and a machine's library are for: those of one of its blocks.
pub(super) const WIDE_TOKENS: usize = 128;

/// Fewest tokens of which it multiplies bf16 faster than [`super::linear()`] where that has warpgroups too: on an H200 512, and not 128.
const WIDE_TOKENS_BESIDE_WARPGROUPS: usize = 256;

/// Whether [`linear_wide`] is for so many tokens and such a matrix on a device.
pub fn multiplies_widely(facts: &DeviceFacts, matrix: &Matrix, tokens: usize) -> bool {
    has_wide_kernel(facts, matrix) && tokens >= WIDE_TOKENS
}

/// Whether [`linear_wide`] is faster than [`super::linear()`] for so many tokens of those that it is for.
pub fn is_faster_widely(facts: &DeviceFacts, matrix: &Matrix, tokens: usize) -> bool {
    let has_warpgroups_besides = facts.has_warpgroups() && matches!(matrix.values(), Values::Bf16(_));
    !has_warpgroups_besides || tokens >= WIDE_TOKENS_BESIDE_WARPGROUPS
}

/// Whether there is a kernel of many tokens with such a matrix on a device.
pub(super) fn has_wide_kernel(facts: &DeviceFacts, matrix: &Matrix) -> bool {
    let has_kernel = match matrix.values() {
        Values::Bf16(_) => true,
        Values::Grouped { bits: 4, .. } => facts.has_warpgroups(),
        _ => false,
    };
    has_kernel && matrix.order().is_none()
}

/// [`super::linear()`] for many tokens with a matrix in bf16, or on Hopper in 4 bits: equal but for rounding, because it sums in
/// another order and makes codes of 4 bits bf16. Not for a mode in which results must not depend on the batch.
///
/// # Panics
/// When the lengths do not match, or the matrix is of another kind or has columns in an order of their own.
pub fn linear_wide(
    stream: &Stream,
    matrix: &Matrix,
    input: View<'_, bf16>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    let (rows, cols, facts) = (matrix.rows(), matrix.cols(), stream.device().facts());
    assert!(!input.is_empty() && input.len().is_multiple_of(cols), "{} values are no tokens of {cols}", input.len());
    let tokens = input.len() / cols;
    assert_eq!(out.len(), tokens * rows, "{tokens} tokens of {rows} values");
    assert!(matrix.order().is_none(), "the columns of a matrix have an order of their own");
    let on_hopper = facts.has_warpgroups();
    let (launch, group) = match matrix.values() {
        Values::Bf16(weights) if on_hopper && TensorMap::reads_rows_of(input.bytes() / tokens) => {
            let launch = blocks_on_hopper(facts, Kernel::GemmHopperBf16, tokens, rows);
            (with_bf16(launch, weights.view(), input, cols), None)
        }
        Values::Bf16(weights) => {
            let grid = [word(rows.div_ceil(GEMM_TILE)), word(tokens.div_ceil(GEMM_TILE)), 1];
            (Launch::new(Kernel::GemmBf16, grid).shared(GEMM_SHARED_BYTES).with(weights.view()).with(input), None)
        }
        Values::Grouped { codes, scales, group, bits: 4, .. } if on_hopper => {
            let launch = blocks_on_hopper(facts, Kernel::Int4Hopper, tokens, rows);
            (with_int4(launch, [codes, scales], rows, input, cols), Some(word(group.cols())))
        }
        _ => panic!("{facts:?} multiplies no such matrix with many tokens"),
    };
    let launch = out.ungated_arguments().into_iter().fold(launch, Launch::with);
    let launch = launch.with(word(tokens)).with(word(rows)).with(word(cols));
    // SAFETY: blocks read rows and tokens that are there, and write those.
    unsafe { stream.launch(&group.into_iter().fold(launch, Launch::with)) }
}

/// Blocks of Hopper's products, in clusters where they are whole ones.
pub(super) fn blocks_on_hopper(facts: &DeviceFacts, kernel: Kernel, tokens: usize, rows: usize) -> Launch {
    let [tokens, rows] = [tokens, rows].map(|count| word(count.div_ceil(GEMM_HOPPER_TILE as usize)));
    let launch = Launch::new(kernel, [tokens, rows, 1]);
    let pairs = facts.has_clusters() && rows.is_multiple_of(GEMM_HOPPER_CLUSTER[1]);
    if pairs { launch.in_clusters(GEMM_HOPPER_CLUSTER) } else { launch }
}

/// Their tokens, of which a block copies a share at a time.
pub(super) fn tokens_on_hopper<T: Element>(input: View<'_, T>, cols: usize) -> TensorMap {
    TensorMap::new(input, cols, GEMM_HOPPER_SHARE)
}

/// A launch of `gemm_hopper.cu` with its weights and input.
pub(super) fn with_bf16(launch: Launch, weights: View<'_, bf16>, input: View<'_, bf16>, cols: usize) -> Launch {
    with_tiles(launch.shared(GEMM_HOPPER_SHARED_BYTES), weights, input, cols)
}

/// A launch of bf16 products by warpgroups with its weights and input.
pub(super) fn with_tiles(launch: Launch, weights: View<'_, bf16>, input: View<'_, bf16>, cols: usize) -> Launch {
    launch.with(TensorMap::new(weights, cols, GEMM_HOPPER_TILE)).with(tokens_on_hopper(input, cols))
}

/// The same of `int4_hopper.cu` with codes and scales, of which what 16 rows of the matrix have is a row.
pub(super) fn with_int4(
    launch: Launch,
    values: [&Memory<u32>; 2],
    rows: usize,
    input: View<'_, bf16>,
    cols: usize,
) -> Launch {
    let tiles = |words: View<'_, u32>| TensorMap::new(words, words.len() / rows.div_ceil(ROW_TILE), INT4_HOPPER_TILES);
    let launch = values
        .into_iter()
        .fold(launch.shared(INT4_HOPPER_SHARED_BYTES), |launch, words| launch.with(tiles(words.view())));
    launch.with(tokens_on_hopper(input, cols))
}
