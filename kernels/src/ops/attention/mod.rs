//! Causal attention over the paged key-value cache, in one pass over the keys (FlashAttention's online softmax, Dao et
//! al. 2022).
//!
//! A query meets the keys of its sequence in tiles of 64 by absolute position. What it computes in a tile depends on
//! its own position alone, so neither the chunking of a prompt nor the batch changes a bit of the result.

mod append;
mod integer;
mod kernel;
mod lines;
mod product;
mod row;
mod state;

use std::ops::Range;
use std::sync::OnceLock;

use half::{bf16, f16};

pub use append::append_kv;
use kernel::Attend;
use lines::TILE_KEYS;
pub use lines::TILE_KEYS as ATTENTION_TILE_KEYS;
use row::{Int4Pair, Value};
use state::State;

use crate::kv_cache::Places;
use crate::simd::{Kernel, Simd};
use crate::{Fp8, KvCache, KvLayout, KvType, Pool};

/// Rows (queries times query heads that share a key-value head) that one worker computes together: each tile of keys
/// and values is converted once for them.
const TILE_ROWS: usize = 96;

/// Keys, by absolute position, whose part of the result is computed by itself: whole tiles, and enough of them that
/// adding the parts costs little.
const SPAN_KEYS: usize = 1024;

/// The tokens of one sequence in a call: a prefill chunk or one decoded token.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRow<'a> {
    /// The sequence's blocks, in order of position; at least those up to the last token of the call.
    pub block_table: &'a [u32],
    /// Position of the row's first token.
    pub first_position: usize,
    /// Tokens of the row in this call.
    pub tokens: usize,
    /// Empty for a text. Otherwise the last tokens of the row are guesses of what comes next, a tree of them: which of
    /// these each sees beside all tokens before them, as bits, lowest first, itself included and none behind it.
    pub seen: &'a [u64],
}

impl AttentionRow<'_> {
    /// One past the position of the row's last token.
    fn end(&self) -> usize {
        self.first_position + self.tokens
    }

    /// One past the last key that a query sees whatever the tree says.
    fn trunk(&self) -> usize {
        self.end() - self.seen.len()
    }

    /// Where in its text the token stands that is at `position` of the row: guesses that branch share places.
    fn text_position(&self, position: usize) -> usize {
        match position.checked_sub(self.trunk()) {
            None => position,
            Some(guess) => self.trunk() + self.seen[guess].count_ones() as usize - 1,
        }
    }

    fn check(&self, layout: KvLayout, blocks: usize) {
        assert!(self.seen.len() <= self.tokens.min(64), "{} guesses in a row of {}", self.seen.len(), self.tokens);
        let itself = |(guess, seen): (usize, &u64)| seen >> guess == 1;
        assert!(self.seen.iter().enumerate().all(itself), "a guess sees itself and none behind it");
        let needed = self.end().div_ceil(layout.block_tokens);
        assert!(self.block_table.len() >= needed, "{} of {needed} blocks in a table", self.block_table.len());
        let known = self.block_table[..needed].iter().all(|&block| (block as usize) < blocks);
        assert!(known, "a block table names a block beyond the cache's {blocks}");
    }
}

/// What becomes of the products of queries and keys before the softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scoring {
    /// Multiplies them.
    pub scale: f32,
    /// Bends them to `cap · tanh(score / cap)` (Gemma 2).
    pub soft_cap: Option<f32>,
    /// A query sees so many keys, itself among them: those before have no weight. Absent for all of them.
    pub window: Option<usize>,
}

impl Scoring {
    /// A scale alone.
    pub fn scaled(scale: f32) -> Scoring {
        Scoring { scale, soft_cap: None, window: None }
    }

    /// Position of the first key that a query at `position` sees.
    fn first_key(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// `out = softmax(score(queries · keysᵀ)) · values` over each sequence's positions up to the query's own, or the last of
/// them that lie in the window. Nothing is read before the tile of [`ATTENTION_TILE_KEYS`] in which a window begins.
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
    scoring: Scoring,
    rows: &[AttentionRow<'_>],
    queries: &[f32],
    out: &mut [f32],
) {
    let places = cache.places(layer);
    let layout = places.layout;
    let tokens: usize = rows.iter().map(|row| row.tokens).sum();
    assert!(heads > 0 && heads.is_multiple_of(layout.kv_heads), "{heads} heads over {} kv heads", layout.kv_heads);
    assert_eq!(queries.len(), tokens * heads * layout.head_dim, "queries");
    assert_eq!(out.len(), queries.len(), "out");
    rows.iter().for_each(|row| row.check(layout, cache.blocks()));
    assert!(scoring.window != Some(0), "a window of no keys");
    let items = items(pool.threads(), layout, heads, scoring, rows, queries, out);
    match cache.kind() {
        KvType::Bf16 => attend_all::<[bf16; 2]>(pool, places, cache.rows(), scoring, items),
        KvType::F16 => attend_all::<f16>(pool, places, cache.rows(), scoring, items),
        KvType::Fp8 => attend_all::<Fp8>(pool, places, cache.rows(), scoring, items),
        KvType::Int8 => attend_all::<[u8; 4]>(pool, places, cache.rows(), scoring, items),
        KvType::Int4 => attend_all::<Int4Pair>(pool, places, cache.rows(), scoring, items),
    }
}

/// Computes the items: each by one worker, or where they are few and their keys many, each span of keys by one.
fn attend_all<V: Value>(
    pool: &Pool,
    places: Places,
    (cells, scales): (&[V], &[f32]),
    scoring: Scoring,
    mut items: Vec<Item<'_>>,
) {
    let kernels = pool.kernels();
    let attend = |item| kernels.call(Attend { places, cells, scales, scoring, item });
    let few = pool.threads() > 1 && items.len() < ITEMS_PER_WORKER * pool.threads();
    if !few || items.iter().all(|item| item.keys.len() <= SPAN_KEYS) {
        return pool.for_each_of(items.len(), items.into_iter(), |item| drop(attend(item)));
    }
    let spans: Vec<(usize, Item<'_>)> = items.iter().enumerate().flat_map(|(i, item)| item.spans(i)).collect();
    let states: Vec<OnceLock<Vec<State>>> = spans.iter().map(|_| OnceLock::new()).collect();
    let owners: Vec<usize> = spans.iter().map(|(owner, _)| *owner).collect();
    pool.for_each_of(spans.len(), spans.into_iter().zip(&states), |((_, item), state)| {
        state.get_or_init(|| attend(item));
    });
    for (owner, item) in items.iter_mut().enumerate() {
        let parts = owners.iter().zip(&states).filter(|(of, _)| **of == owner).filter_map(|(_, state)| state.get());
        kernels.call(Join { layout: places.layout, parts: parts.collect(), item });
    }
}

/// Adds the spans of an item up.
struct Join<'a, 'b> {
    layout: KvLayout,
    /// By span, then by key-value head.
    parts: Vec<&'a Vec<State>>,
    item: &'a mut Item<'b>,
}

impl Kernel for Join<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let heads = self.item.kv_heads.len();
        for head in 0..heads {
            let mut state = self.parts[0][head].clone();
            for part in &self.parts[1..] {
                state.absorb(simd, &part[head]);
            }
            let values = self.item.queries[0].len() / heads;
            let out = self.item.out.iter_mut().map(|out| &mut out[head * values..(head + 1) * values]);
            state.finish(simd, self.layout.head_dim, out);
        }
    }
}

/// What one worker computes at a time: a few queries of one row, for the query heads of some key-value heads.
struct Item<'a> {
    row: AttentionRow<'a>,
    kv_heads: Range<usize>,
    /// Positions of the queries.
    positions: Range<usize>,
    /// Positions of the keys, whole tiles but for the last.
    keys: Range<usize>,
    /// Of each query, `[query heads of these key-value heads, head_dim]`.
    queries: Vec<&'a [f32]>,
    /// As `queries`; empty where the result is wanted as it stands before the last division.
    out: Vec<&'a mut [f32]>,
}

impl<'a> Item<'a> {
    /// The item's spans of keys as items of their own, with the index of the item.
    fn spans(&self, index: usize) -> impl Iterator<Item = (usize, Item<'a>)> + use<'_, 'a> {
        let first = self.keys.start / SPAN_KEYS * SPAN_KEYS;
        (first..self.keys.end).step_by(SPAN_KEYS).map(move |start| {
            let keys = start.max(self.keys.start)..self.keys.end.min(start + SPAN_KEYS);
            let Item { row, kv_heads, positions, queries, .. } = self;
            let (kv_heads, positions, queries) = (kv_heads.clone(), positions.clone(), queries.clone());
            (index, Item { row: *row, kv_heads, positions, keys, queries, out: Vec::new() })
        })
    }
}

/// Items that a region needs for each of its workers to end evenly.
const ITEMS_PER_WORKER: usize = 4;

/// All items, those of the last queries of a row first: they read the most keys, and short ones end a region evenly.
/// Key-value heads stay together where that leaves enough items: their keys then come from memory in one stream.
#[allow(clippy::too_many_arguments)]
fn items<'a>(
    threads: usize,
    layout: KvLayout,
    heads: usize,
    scoring: Scoring,
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
                // No guess of a tree stands before the first behind the trunk.
                let first_key = scoring.first_key(positions.start.min(row.trunk())) / TILE_KEYS * TILE_KEYS;
                let (kv_heads, keys) = (kv_head..kv_head + together, first_key..positions.end);
                Item { row, kv_heads, positions: positions.clone(), keys, queries, out }
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
