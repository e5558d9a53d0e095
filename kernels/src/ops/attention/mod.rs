//! Causal attention over the paged key-value cache, in one pass over the keys (FlashAttention's online softmax, Dao et
//! al. 2022).
//!
//! A query meets the keys of its sequence in tiles of 64 by absolute position. What it computes in a tile depends on
//! its own position alone, so neither the chunking of a prompt nor the batch changes a bit of the result.

mod append;
mod kernel;
mod product;

use std::ops::Range;

pub use append::append_kv;
use kernel::Attend;

use crate::{KvCache, KvLayout, Pool};

/// Rows (queries times query heads that share a key-value head) that one worker computes together: each tile of keys
/// and values is converted once for them.
const TILE_ROWS: usize = 96;

/// The tokens of one sequence in a call: a prefill chunk or one decoded token.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRow<'a> {
    /// The sequence's blocks, in order of position; at least those up to the last token of the call.
    pub block_table: &'a [u32],
    /// Position of the row's first token.
    pub first_position: usize,
    /// Tokens of the row in this call.
    pub tokens: usize,
}

impl AttentionRow<'_> {
    /// One past the position of the row's last token.
    fn end(&self) -> usize {
        self.first_position + self.tokens
    }

    fn check(&self, layout: KvLayout, blocks: usize) {
        let needed = self.end().div_ceil(layout.block_tokens);
        assert!(self.block_table.len() >= needed, "{} of {needed} blocks in a table", self.block_table.len());
        let known = self.block_table[..needed].iter().all(|&block| (block as usize) < blocks);
        assert!(known, "a block table names a block beyond the cache's {blocks}");
    }
}

/// `out = softmax(scale · queries · keysᵀ) · values` over each sequence's positions up to the query's own.
///
/// `queries` and `out` are `[tokens, heads, head_dim]` with the rows' tokens one after the other. `heads` is a multiple
/// of the cache's key-value heads; query head `h` reads key-value head `h / (heads / kv_heads)`. The rows' own keys and
/// values must have been appended before.
///
/// # Panics
/// When the lengths do not match, or a block table is too short or names an unknown block.
#[allow(clippy::too_many_arguments)]
pub fn paged_attention(
    pool: &Pool,
    cache: &KvCache,
    layer: usize,
    heads: usize,
    scale: f32,
    rows: &[AttentionRow<'_>],
    queries: &[f32],
    out: &mut [f32],
) {
    let layout = cache.layout();
    let tokens: usize = rows.iter().map(|row| row.tokens).sum();
    assert!(heads > 0 && heads.is_multiple_of(layout.kv_heads), "{heads} heads over {} kv heads", layout.kv_heads);
    assert_eq!(queries.len(), tokens * heads * layout.head_dim, "queries");
    assert_eq!(out.len(), queries.len(), "out");
    rows.iter().for_each(|row| row.check(layout, cache.blocks()));
    let cells = cache.layer(layer);
    let items = items(pool.threads(), layout, heads, rows, queries, out);
    let kernels = pool.kernels();
    pool.for_each_of(items.len(), items.into_iter(), |item| kernels.call(Attend { layout, cells, scale, item }));
}

/// What one worker computes at a time: a few queries of one row, for the query heads of some key-value heads.
struct Item<'a> {
    row: AttentionRow<'a>,
    kv_heads: Range<usize>,
    /// Positions of the queries.
    positions: Range<usize>,
    /// Of each query, `[query heads of these key-value heads, head_dim]`.
    queries: Vec<&'a [f32]>,
    /// As `queries`.
    out: Vec<&'a mut [f32]>,
}

/// Items that a region needs for each of its workers to end evenly.
const ITEMS_PER_WORKER: usize = 4;

/// All items, those of the last queries of a row first: they read the most keys, and short ones end a region evenly.
/// Key-value heads stay together where that leaves enough items: their keys then come from memory in one stream.
fn items<'a>(
    threads: usize,
    layout: KvLayout,
    heads: usize,
    rows: &[AttentionRow<'a>],
    queries: &'a [f32],
    out: &'a mut [f32],
) -> Vec<Item<'a>> {
    let group = heads / layout.kv_heads;
    let tile_queries = (TILE_ROWS / group).max(1);
    let tiles: usize = rows.iter().map(|row| row.tokens.div_ceil(tile_queries)).sum();
    let together = if tiles >= ITEMS_PER_WORKER * threads { layout.kv_heads } else { 1 };
    let part = together * group * layout.head_dim;
    let mut parts = queries.chunks_exact(part).zip(out.chunks_exact_mut(part));
    let mut items = Vec::with_capacity(tiles * layout.kv_heads / together);
    for &row in rows {
        for start in (row.first_position..row.end()).step_by(tile_queries) {
            let positions = start..row.end().min(start + tile_queries);
            let first = items.len();
            items.extend((0..layout.kv_heads).step_by(together).map(|kv_head| {
                let count = positions.len();
                let (queries, out) = (Vec::with_capacity(count), Vec::with_capacity(count));
                Item { row, kv_heads: kv_head..kv_head + together, positions: positions.clone(), queries, out }
            }));
            let turns = (0..positions.len()).flat_map(|_| first..first + layout.kv_heads / together);
            for (item, (queries, out)) in turns.zip(&mut parts) {
                items[item].queries.push(queries);
                items[item].out.push(out);
            }
        }
    }
    items.reverse();
    items
}

#[cfg(test)]
mod tests;
