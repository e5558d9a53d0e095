//! One function per op: checks shapes, chooses the kernel, launches it on a stream.
//!
//! Matrices are row-major, `[rows, cols]`. An op panics when shapes do not match: that is a bug of its caller. It fails
//! when the driver does. Tables of pages, positions and other numbers that lie on the device are not checked: who writes
//! them there must know that they are within what they name.

mod activation;
mod attention;
mod blocks;
mod experts;
mod gather;
mod heads;
mod library;
mod linear;
mod many_hopper;
mod moves;
mod norm;
mod reduce;
mod rounded;
mod sample;
mod sharing;
mod w8a8;
mod wide;
mod wide_experts;

pub use activation::{Gate, GateLayout, gate_mul, gate_mul_quantized, soft_cap};
pub use attention::{
    AttentionShape, Chunks, DecodeRoom, DecodeRows, PREFILL_TILE_ROWS, SEEN_KEYS, attention_decode, attention_prefill,
    prefill_tiles, split_keys, splits,
};
pub use experts::{ExpertSum, MAX_EXPERTS, MAX_USED_EXPERTS, Mixture, Routes};
pub use gather::{embed, gather_rows};
pub use heads::{
    Heads, MAX_HEAD_DIM, PAGE_TOKENS, Pages, PagesMut, Placement, Places, Rotation, place_heads, rope_table,
};
pub use library::{LIBRARY_TOKENS, ProductLibrary};
pub use linear::{ExpertInput, Output, linear, linear_experts, linear_many, linear_ordered};
pub use moves::move_tokens;
pub use norm::{add_normed, add_rms_norm, rms_norm, rms_norm_quantized};
pub use reduce::{ExchangeSizes, Ground, MAX_RANKS, PeerGroup, PeerRank};
pub use rounded::{Rounded, linear_rounded, linear_rounded_many, multiplies_rounded, round_inputs};
pub use sample::{
    ALL_BANNED, Asked, Edits, MOST_TOLD, Masks, NONE, NOT_FINITE, Samplers, TOLD, Told, adjust_logits, sample, tell,
};
pub use sharing::{shared_splits, sharing_order};
pub use w8a8::{
    Quantized, QuantizedMut, linear_experts_w8a8, linear_w8a8, linear_w8a8_wide, multiplies,
    multiplies_experts_rounded, quantize_routed, quantize_tokens,
};
pub use wide::{is_faster_widely, linear_wide, multiplies_widely};
pub use wide_experts::{linear_experts_wide, multiplies_experts_widely};

/// A size as kernels take it.
///
/// # Panics
/// When it does not fit, which no op's tensors reach.
fn word(size: usize) -> u32 {
    u32::try_from(size).unwrap_or_else(|_| panic!("{size} is more than kernels count"))
}
