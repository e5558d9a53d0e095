//! Keys and values of tokens on their way from one place in the pages to another.

use super::heads::{Heads, PagesMut};
use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::{DriverError, Kernel, Stream, View};

/// Heads that a block takes, one for each of its warps.
const BLOCK_HEADS: usize = 4;

/// For pages in bf16, e4m3 and signed bytes.
const MOVE: [Kernel; 3] = [Kernel::MoveTokens, Kernel::MoveTokensBytes, Kernel::MoveTokensBytes];

/// Copies keys and values of tokens in all of `layers`, whose pages follow one another: `moves` is `[moves, 2]`, the slot that
/// is read and the one that is overwritten (`page · 64 + place in the page`). One after the other, so that what one reads
/// another may overwrite later.
///
/// # Panics
/// When the pages are not as many for each layer, or there is no move.
pub fn move_tokens(
    stream: &Stream,
    heads: Heads,
    layers: usize,
    moves: View<'_, u32>,
    pages: PagesMut<'_>,
) -> Result<(), DriverError> {
    let (Heads { kv_heads, dim, .. }, values) = (heads, pages.len());
    assert!(!moves.is_empty() && moves.len().is_multiple_of(2), "moves of two slots each");
    assert!(layers > 0 && values.is_multiple_of(layers * heads.page_values()), "pages of {layers} layers");
    let (kernel, [pages, scales]) = pages.arguments(heads, MOVE);
    let grid = [word(layers), word((2 * kv_heads).div_ceil(BLOCK_HEADS)), 1];
    let launch = Launch::new(kernel, grid).with(moves).with(pages).with(scales).with(word(moves.len() / 2));
    let launch = launch.with(word(kv_heads)).with(word(dim)).with(word(values / layers / heads.page_values()));
    // SAFETY: a lane copies the same values of one head for every move, in order; slots are the caller's promise.
    unsafe { stream.launch(&launch) }
}
