//! Products of many tokens by Hopper's warpgroups, in the bits of those of a few.

use half::bf16;

use super::linear::Output;
use super::wide::{blocks_on_hopper, with_tiles};
use super::word;
use crate::cuda::launch::{Launch, TensorMap};
use crate::cuda::table::{GEMM_HOPPER_SHARE, GEMM_HOPPER_TILE};
use crate::cuda::weights::{Matrix, Values};
use crate::cuda::{DeviceFacts, Kernel, View};

/// Fewest tokens that warpgroups multiply. On an H200 blocks of 16 rows read weights at 82 % of a copy's rate for 8 tokens and at 51 %
/// for 16; warpgroups at 83 % for 32.
const FEWEST: usize = 9;

/// The launch of a product by warpgroups with a part of a matrix, where a device has them and they multiply such a part.
pub(super) fn product_by_warpgroups(
    facts: &DeviceFacts,
    part: &Matrix,
    input: View<'_, bf16>,
    (out, stride): (&mut Output<'_>, usize),
    tokens: usize,
) -> Option<Launch> {
    let (rows, cols) = (part.rows(), part.cols());
    let Values::Bf16(weights) = part.values() else { return None };
    if !facts.has_warpgroups() || tokens < FEWEST || !TensorMap::reads_rows_of(cols * size_of::<bf16>()) {
        return None;
    }
    let launch = with_tiles(blocks(facts, tokens, rows), weights.view(), input, cols);
    let launch = out.reborrow().arguments().into_iter().fold(launch, Launch::with);
    Some(launch.with(word(stride)).with(word(tokens)).with(word(rows)).with(word(cols)))
}

/// Blocks of 64 tokens where one holds all of them, else of 128.
fn blocks(facts: &DeviceFacts, tokens: usize, rows: usize) -> Launch {
    let half = GEMM_HOPPER_SHARE as usize;
    let (kernel, launch) = if tokens <= half {
        let kernel = Kernel::ManyHopperBf16T64;
        (kernel, Launch::new(kernel, [word(tokens.div_ceil(half)), word(rows.div_ceil(GEMM_HOPPER_TILE as usize)), 1]))
    } else {
        let kernel = Kernel::ManyHopperBf16;
        (kernel, blocks_on_hopper(facts, kernel, tokens, rows))
    };
    launch.shared(kernel.spec().shared_bytes)
}
