//! One worker's share of attention: a few queries against all keys that they see.

use std::cell::RefCell;
use std::ops::Range;

use half::bf16;

use super::Item;
use super::product::{Dense, Right, STRIP_ROWS, multiply_add};
use crate::KvLayout;
use crate::simd::{Kernel, LANES, Simd};

/// Keys that a query meets at a time, by absolute position.
const TILE_KEYS: usize = 64;

/// Vectors of a row of scores.
const SCORE_VECTORS: usize = TILE_KEYS / LANES;

/// An [`Item`] with what it reads.
pub(super) struct Attend<'a> {
    pub(super) layout: KvLayout,
    /// The layer's part of the cache.
    pub(super) cells: &'a [bf16],
    pub(super) scale: f32,
    pub(super) item: Item<'a>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A worker's buffers. A row is one query with one head.
#[derive(Default)]
struct Scratch {
    /// Scaled, `[row, head_dim]`.
    queries: Vec<f32>,
    /// The tile's keys transposed, `[head_dim rounded up to 32][64 keys]`.
    keys: Vec<[f32; LANES]>,
    /// The tile's values, `[64 keys][vectors]`.
    values: Vec<[f32; LANES]>,
    /// Scores, then weights relative to the row's maximum so far, `[row][64 keys]`.
    scores: Vec<[f32; LANES]>,
    /// Weighted values so far, `[row][vectors]`.
    sums: Vec<[f32; LANES]>,
    /// The largest score so far of each row.
    maxima: Vec<f32>,
    /// Weights so far of each row, lane by lane.
    totals: Vec<[f32; LANES]>,
}

/// Up to 64 keys of a sequence in one key-value head.
#[derive(Clone, Copy)]
struct Tile {
    kv_head: usize,
    /// Position of the first.
    start: usize,
    keys: usize,
    /// Where each key lies in the layer.
    at: [usize; TILE_KEYS],
}

impl Scratch {
    fn reset(&mut self, rows: usize, head_dim: usize) {
        let vectors = head_dim.div_ceil(LANES);
        self.queries.resize(rows * head_dim, 0.0);
        self.keys.resize(head_dim.next_multiple_of(2 * LANES) * SCORE_VECTORS, [0.0; LANES]);
        self.values.resize(TILE_KEYS * vectors, [0.0; LANES]);
        self.scores.resize(rows * SCORE_VECTORS, [0.0; LANES]);
        self.sums.clear();
        self.sums.resize(rows * vectors, [0.0; LANES]);
        self.maxima.clear();
        self.maxima.resize(rows, f32::NEG_INFINITY);
        self.totals.clear();
        self.totals.resize(rows, [0.0; LANES]);
    }
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut scratch = SCRATCH.take();
        self.attend(simd, &mut scratch);
        SCRATCH.set(scratch);
    }
}

impl Attend<'_> {
    #[inline(always)]
    fn attend<S: Simd>(&mut self, simd: S, scratch: &mut Scratch) {
        let mut next = self.locate(self.item.kv_heads.start, 0);
        for kv_head in self.item.kv_heads.clone() {
            self.begin(simd, kv_head, scratch);
            while next.keys > 0 && next.kv_head == kv_head {
                let tile = next;
                next = self.after(&tile);
                self.meet(simd, &tile, &next, scratch);
            }
            self.finish(simd, kv_head, scratch);
        }
    }

    /// The queries of one key-value head against one tile.
    #[inline(always)]
    fn meet<S: Simd>(&self, simd: S, tile: &Tile, next: &Tile, scratch: &mut Scratch) {
        let dim = self.layout.head_dim;
        self.load_keys(simd, tile, next, &mut scratch.keys);
        for score in &mut scratch.scores {
            *score = [0.0; LANES];
        }
        let keys = Dense { cells: &scratch.keys, vectors: SCORE_VECTORS };
        multiply_add(simd, (&scratch.queries, dim), dim, keys, &mut scratch.scores, SCORE_VECTORS);
        self.weigh(simd, tile, scratch);
        self.add_values(simd, tile, scratch);
    }

    /// Query heads of a key-value head.
    #[inline(always)]
    fn group(&self) -> usize {
        self.item.queries[0].len() / (self.item.kv_heads.len() * self.layout.head_dim)
    }

    /// The part of a query that belongs to a key-value head.
    #[inline(always)]
    fn part(&self, kv_head: usize) -> Range<usize> {
        let values = self.group() * self.layout.head_dim;
        let index = kv_head - self.item.kv_heads.start;
        index * values..(index + 1) * values
    }

    #[inline(always)]
    fn begin<S: Simd>(&self, simd: S, kv_head: usize, scratch: &mut Scratch) {
        let (dim, part) = (self.layout.head_dim, self.part(kv_head));
        scratch.reset(self.item.positions.len() * self.group(), dim);
        for (query, scaled) in self.item.queries.iter().zip(scratch.queries.chunks_exact_mut(part.len())) {
            for (query, scaled) in query[part.clone()].chunks(LANES).zip(scaled.chunks_mut(LANES)) {
                simd.store_partial(simd.mul(simd.load_partial(query), simd.splat(self.scale)), scaled);
            }
        }
    }

    /// The tile that starts at position `start`; empty beyond the last query.
    #[inline(always)]
    fn locate(&self, kv_head: usize, start: usize) -> Tile {
        let keys = self.item.positions.end.saturating_sub(start).min(TILE_KEYS);
        let mut tile = Tile { kv_head, start, keys, at: [0; TILE_KEYS] };
        let (mut block, mut token) = (start / self.layout.block_tokens, start % self.layout.block_tokens);
        let mut left = &mut tile.at[..keys];
        while !left.is_empty() {
            let (here, rest) = left.split_at_mut(left.len().min(self.layout.block_tokens - token));
            let first = self.layout.key_at(self.item.row.block_table[block] as usize, kv_head, token);
            for (i, at) in here.iter_mut().enumerate() {
                *at = first + i * self.layout.head_dim;
            }
            left = rest;
            (block, token) = (block + 1, 0);
        }
        tile
    }

    /// The tile after `tile`, of the next key-value head after the last key; then an empty one.
    #[inline(always)]
    fn after(&self, tile: &Tile) -> Tile {
        let start = tile.start + TILE_KEYS;
        if start < self.item.positions.end {
            self.locate(tile.kv_head, start)
        } else if tile.kv_head + 1 < self.item.kv_heads.end {
            self.locate(tile.kv_head + 1, 0)
        } else {
            Tile { kv_head: tile.kv_head, start, keys: 0, at: [0; TILE_KEYS] }
        }
    }

    /// Transposes the keys, 16 keys by 16 pairs of bf16 at a time, and has the cache fetch the `next` tile: little by
    /// little, as the processor waits for a burst of fetches.
    #[inline(always)]
    fn load_keys<S: Simd>(&self, simd: S, tile: &Tile, next: &Tile, to: &mut [[f32; LANES]]) {
        let dim = self.layout.head_dim;
        for first in (0..TILE_KEYS).step_by(LANES) {
            self.prefetch(simd, next, first, 0);
            if first >= tile.keys {
                self.prefetch(simd, next, first, self.layout.value_offset());
                continue;
            }
            let mut at = [0; LANES];
            for lane in 0..LANES {
                // Lanes beyond the last key repeat it; nothing reads their scores.
                at[lane] = tile.at[(first + lane).min(tile.keys - 1)];
            }
            for part in (0..dim).step_by(2 * LANES) {
                if part + 2 * LANES >= dim {
                    self.prefetch(simd, next, first, self.layout.value_offset());
                }
                let mut pairs = [simd.splat_i32(0); LANES];
                for lane in 0..LANES {
                    pairs[lane] = load_pairs(simd, &self.cells[at[lane] + part..at[lane] + dim]);
                }
                let pairs = simd.transpose(pairs);
                let to = &mut to[part * SCORE_VECTORS + first / LANES..][..(2 * LANES - 1) * SCORE_VECTORS + 1];
                for pair in 0..LANES {
                    simd.store(simd.low_bf16(pairs[pair]), &mut to[2 * pair * SCORE_VECTORS]);
                    simd.store(simd.high_bf16(pairs[pair]), &mut to[(2 * pair + 1) * SCORE_VECTORS]);
                }
            }
        }
    }

    /// Has the cache fetch 16 keys of a tile from `first` on, or what lies `offset` from them.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, tile: &Tile, first: usize, offset: usize) {
        let lines = (self.layout.head_dim * size_of::<bf16>()).div_ceil(64);
        for at in &tile.at[first.min(tile.keys)..tile.keys.min(first + LANES)] {
            simd.prefetch(self.cells.as_ptr().wrapping_add(at + offset).cast(), lines);
        }
    }

    /// Adds the tile's values, weighted: widened on the way for one strip of rows, beforehand for several.
    #[inline(always)]
    fn add_values<S: Simd>(&self, simd: S, tile: &Tile, scratch: &mut Scratch) {
        let vectors = self.layout.head_dim.div_ceil(LANES);
        let weights = (scratch.scores.as_flattened(), TILE_KEYS);
        let paged = Values { cells: self.cells, layout: self.layout, at: &tile.at };
        if scratch.maxima.len() <= STRIP_ROWS && self.layout.head_dim.is_multiple_of(LANES) {
            return multiply_add(simd, weights, tile.keys, paged, &mut scratch.sums, vectors);
        }
        for (key, to) in scratch.values.chunks_exact_mut(vectors).enumerate().take(tile.keys) {
            let (whole, part) = paged.row(key).as_chunks();
            for (from, to) in whole.iter().zip(&mut *to) {
                simd.store(simd.load_bf16(from), to);
            }
            if !part.is_empty() {
                simd.store(paged.load(simd, key, whole.len()), &mut to[whole.len()]);
            }
        }
        let dense = Dense { cells: &scratch.values, vectors };
        multiply_add(simd, weights, tile.keys, dense, &mut scratch.sums, vectors);
    }

    /// Turns scores into weights, and scales what was summed under a smaller maximum.
    #[inline(always)]
    fn weigh<S: Simd>(&self, simd: S, tile: &Tile, scratch: &mut Scratch) {
        let group = self.group();
        let vectors = self.layout.head_dim.div_ceil(LANES);
        for row in 0..scratch.maxima.len() {
            let position = self.item.positions.start + row / group;
            let visible = (position + 1).saturating_sub(tile.start).min(tile.keys);
            let scores = &mut scratch.scores[row * SCORE_VECTORS..][..SCORE_VECTORS];
            let nothing = simd.splat(f32::NEG_INFINITY);
            let mut lanes = [nothing; SCORE_VECTORS];
            let mut largest = nothing;
            for v in 0..SCORE_VECTORS {
                lanes[v] = simd.keep_first(visible.saturating_sub(v * LANES), simd.load(&scores[v]), nothing);
                largest = simd.max(largest, lanes[v]);
            }
            let before = scratch.maxima[row];
            let maximum = simd.largest(simd.max(largest, simd.splat(before)));
            let mut total = simd.splat(0.0);
            for v in 0..SCORE_VECTORS {
                let weight = simd.exp(simd.sub(lanes[v], simd.splat(maximum)));
                let weight = simd.keep_first(visible.saturating_sub(v * LANES), weight, simd.splat(0.0));
                simd.store(weight, &mut scores[v]);
                total = simd.add(total, weight);
            }
            if maximum > before {
                let shrink = simd.exp(simd.splat(before - maximum));
                scratch.maxima[row] = maximum;
                let sums = &mut scratch.sums[row * vectors..][..vectors];
                for sum in sums {
                    simd.store(simd.mul(simd.load(sum), shrink), sum);
                }
                let totals = &mut scratch.totals[row];
                simd.store(simd.fma(simd.load(totals), shrink, total), totals);
            } else {
                let totals = &mut scratch.totals[row];
                simd.store(simd.add(simd.load(totals), total), totals);
            }
        }
    }

    #[inline(always)]
    fn finish<S: Simd>(&mut self, simd: S, kv_head: usize, scratch: &Scratch) {
        let (dim, part) = (self.layout.head_dim, self.part(kv_head));
        let mut rows = scratch.sums.chunks_exact(dim.div_ceil(LANES)).zip(&scratch.totals);
        for out in &mut self.item.out {
            for (head, (sums, totals)) in out[part.clone()].chunks_exact_mut(dim).zip(&mut rows) {
                let total = simd.splat(simd.sum(simd.load(totals)));
                for (out, sum) in head.chunks_mut(LANES).zip(sums) {
                    simd.store_partial(simd.div(simd.load(sum), total), out);
                }
            }
        }
    }
}

/// Sixteen pairs from the start of `from`, zeros beyond its end.
#[inline(always)]
fn load_pairs<S: Simd>(simd: S, from: &[bf16]) -> S::I {
    match from.first_chunk() {
        Some(pairs) => simd.load_pairs(pairs),
        None => {
            let mut pairs = [bf16::ZERO; 2 * LANES];
            pairs[..from.len()].copy_from_slice(from);
            simd.load_pairs(&pairs)
        }
    }
}

/// The values of a tile where they lie in the cache.
#[derive(Clone, Copy)]
struct Values<'a> {
    cells: &'a [bf16],
    layout: KvLayout,
    at: &'a [usize; TILE_KEYS],
}

impl Values<'_> {
    #[inline(always)]
    fn row(&self, key: usize) -> &[bf16] {
        &self.cells[self.at[key] + self.layout.value_offset()..][..self.layout.head_dim]
    }
}

impl Right for Values<'_> {
    #[inline(always)]
    fn load<S: Simd>(self, simd: S, key: usize, vector: usize) -> S::F {
        let start = self.at[key] + self.layout.value_offset();
        let from = &self.cells[start + vector * LANES..start + self.layout.head_dim];
        match from.first_chunk() {
            Some(lanes) => simd.load_bf16(lanes),
            None => {
                let mut lanes = [bf16::ZERO; LANES];
                lanes[..from.len()].copy_from_slice(from);
                simd.load_bf16(&lanes)
            }
        }
    }
}
