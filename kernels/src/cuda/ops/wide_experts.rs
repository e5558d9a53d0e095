//! Products of many tokens with the matrices of experts, by blocks as large as those of [`super::linear_wide`].

use half::bf16;

use super::experts::{Mixture, Routes};
use super::gather::gather_halves;
use super::linear::{ExpertInput, ExpertShape, Output};
use super::wide::{WIDE_TOKENS, blocks_on_hopper, has_wide_kernel, with_bf16, with_int4};
use super::word;
use crate::cuda::launch::{Launch, TensorMap};
use crate::cuda::table::GEMM_HOPPER_TILE;
use crate::cuda::weights::{Matrix, Values};
use crate::cuda::{DeviceFacts, DriverError, Kernel, Memory, Stream, View};

/// Whether [`linear_experts_wide`] is for so many tokens and such a matrix of all experts on a device: where an expert gets about as
/// many as [`super::linear_wide`] is for.
pub fn multiplies_experts_widely(facts: &DeviceFacts, matrix: &Matrix, mixture: &Mixture, tokens: usize) -> bool {
    let reads = TensorMap::reads_rows_of(matrix.cols() * size_of::<bf16>());
    facts.has_warpgroups() && reads && has_wide_kernel(facts, matrix) && mixture.share(tokens) >= WIDE_TOKENS
}

/// [`super::linear_experts()`] for many tokens with matrices in bf16 or in 4 bits on Hopper, as [`super::linear_wide`] is for a single
/// matrix: equal but for rounding. Tokens are copied once into `room`, each expert's side by side: a row for each token and expert.
///
/// # Panics
/// When the lengths do not match, the matrix is of another kind or has columns in an order of their own, or the routes were not
/// chosen by [`Routes::choose_wide`].
pub fn linear_experts_wide(
    stream: &Stream,
    matrix: &Matrix,
    routes: &Routes,
    input: ExpertInput<'_>,
    room: &mut Memory<bf16>,
    out: Output<'_>,
) -> Result<(), DriverError> {
    let ExpertShape { rows, inputs } = ExpertShape::of(matrix, routes, input, &out);
    let (cols, tokens) = (matrix.cols(), inputs / routes.mixture().used);
    assert!(routes.are_wide(), "routes that are chosen for narrow products");
    let sorted = match input {
        ExpertInput::Given(values) => values,
        ExpertInput::Tokens(values) => {
            gather_halves(stream, routes.token_at(tokens), values, cols, room.slice_mut(0..inputs * cols))?;
            room.slice(0..inputs * cols)
        }
    };
    let (tiles, tile_count) = routes.tiles(tokens);
    let (launch, group) = experts_on_hopper(stream.device().facts(), matrix, sorted, tile_count, rows);
    let stride = word(out.stride(rows));
    let launch = out.arguments().into_iter().fold(launch.with(tiles), Launch::with);
    let launch = launch.with(stride).with(word(rows)).with(word(cols));
    // SAFETY: tiles name experts that there are and places of as many inputs, each place once.
    unsafe { stream.launch(&group.into_iter().fold(launch, Launch::with)) }
}

/// A launch for so many tiles, with weights and input alone, and the columns of a group.
fn experts_on_hopper(
    facts: &DeviceFacts,
    matrix: &Matrix,
    input: View<'_, bf16>,
    tiles: usize,
    rows: usize,
) -> (Launch, Option<u32>) {
    let tokens = tiles * GEMM_HOPPER_TILE as usize;
    match matrix.values() {
        Values::Bf16(weights) => {
            let launch = blocks_on_hopper(facts, Kernel::GemmHopperExperts, tokens, rows);
            (with_bf16(launch, weights.view(), input, matrix.cols()), None)
        }
        Values::Grouped { codes, scales, group, bits: 4, .. } => {
            let launch = blocks_on_hopper(facts, Kernel::Int4HopperExperts, tokens, rows);
            (with_int4(launch, [codes, scales], matrix.rows(), input, matrix.cols()), Some(word(group.cols())))
        }
        _ => panic!("warpgroups multiply no such experts"),
    }
}
