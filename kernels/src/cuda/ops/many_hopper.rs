//! Products of many tokens by Hopper's warpgroups, in the bits of those of a few.

use half::bf16;

use super::linear::Output;
use super::wide::{blocks_on_hopper, with_tiles};
use super::word;
use crate::cuda::launch::{Launch, TensorMap};
use crate::cuda::table::MANY_HOPPER_SHARED_BYTES;
use crate::cuda::weights::{Matrix, Values};
use crate::cuda::{DeviceFacts, Kernel, View};

/// Fewest tokens that warpgroups multiply: more than a block of 16 rows takes at its best.
const FEWEST: usize = 33;

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
    let launch = blocks_on_hopper(facts, Kernel::ManyHopperBf16, tokens, rows).shared(MANY_HOPPER_SHARED_BYTES);
    let launch = with_tiles(launch, weights.view(), input, cols);
    let launch = out.reborrow().arguments().into_iter().fold(launch, Launch::with);
    Some(launch.with(word(stride)).with(word(tokens)).with(word(rows)).with(word(cols)))
}
