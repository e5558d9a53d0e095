//! One worker's share of attention: a few queries against some of the keys that they see.

use std::cell::RefCell;
use std::ops::Range;

use super::integer::{Integers, Rounded};
use super::lines::{CACHE_LINE, Keys, Lines, RUNS, Runs, TILE_KEYS, Values};
use super::product::{Dense, Floats, Right, STRIP_ROWS, Widened, multiply_add};
use super::row::Value;
use super::state::State;
use super::{Item, SPAN_KEYS, Scoring};
use crate::kv_cache::{KvLayout, Places};
use crate::ops::activation::capped;
use crate::simd::{Kernel, LANES, Simd};

/// Vectors of a row of scores.
const SCORE_VECTORS: usize = RUNS;

/// One column of a tile's keys.
type KeyColumn = [[f32; LANES]; SCORE_VECTORS];

/// An [`Item`] with what it reads.
pub(super) struct Attend<'a, V> {
    pub(super) places: Places,
    pub(super) cells: &'a [V],
    /// One for each row of the cache; empty where values are not scaled.
    pub(super) scales: &'a [f32],
    pub(super) scoring: Scoring,
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
    /// The same for keys that are integers.
    rounded_queries: Rounded,
    /// The tile's keys, `[head_dim][64 keys]`.
    keys: Vec<KeyColumn>,
    /// The tile's values, `[64 keys][vectors]`.
    values: Vec<[f32; LANES]>,
    /// Scores, then weights relative to the row's maximum so far, `[row][64 keys]`.
    scores: Vec<[f32; LANES]>,
    /// Weights for values that are integers.
    rounded_weights: Rounded,
    /// The scales of the tile's keys and of its values.
    scales: [[[f32; LANES]; SCORE_VECTORS]; 2],
    /// What the rows gathered in the span of keys at hand.
    span: State,
    /// What they gathered in the spans before.
    state: State,
}

/// Up to 64 keys of a sequence in one key-value head.
#[derive(Clone, Copy)]
struct Tile {
    kv_head: usize,
    /// Position of the first.
    start: usize,
    keys: usize,
    /// The row of the first key of each run in the cache; those beyond the last key are the first one's.
    runs: [usize; RUNS],
}

impl Scratch {
    fn reset(&mut self, rows: usize, head_dim: usize) {
        let vectors = head_dim.div_ceil(LANES);
        self.queries.resize(rows * head_dim, 0.0);
        self.keys.resize(head_dim, [[0.0; LANES]; SCORE_VECTORS]);
        self.values.resize(TILE_KEYS * vectors, [0.0; LANES]);
        self.scores.resize(rows * SCORE_VECTORS, [0.0; LANES]);
        self.state.reset(rows, vectors);
        self.span.reset(rows, vectors);
    }
}

impl<V: Value> Kernel for Attend<'_, V> {
    /// What the item's rows gathered, for each of its key-value heads, where it has no place for a result.
    type Output = Vec<State>;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> Vec<State> {
        let mut scratch = SCRATCH.take();
        let states = self.attend(simd, &mut scratch);
        SCRATCH.set(scratch);
        states
    }
}

impl<V: Value> Attend<'_, V> {
    #[inline(always)]
    fn attend<S: Simd>(&mut self, simd: S, scratch: &mut Scratch) -> Vec<State> {
        let mut states = Vec::new();
        let mut next = self.locate(self.item.kv_heads.start, self.item.keys.start);
        for kv_head in self.item.kv_heads.clone() {
            self.begin(simd, kv_head, scratch);
            while next.keys > 0 && next.kv_head == kv_head {
                let tile = next;
                next = self.after(&tile);
                self.meet(simd, &tile, &next, scratch);
                if (tile.start + TILE_KEYS).is_multiple_of(SPAN_KEYS) || next.kv_head != kv_head || next.keys == 0 {
                    scratch.state.absorb(simd, &scratch.span);
                    let vectors = self.places.layout.head_dim.div_ceil(LANES);
                    scratch.span.reset(scratch.state.maxima.len(), vectors);
                }
            }
            if self.item.out.is_empty() {
                states.push(scratch.state.clone());
            } else {
                let part = self.part(kv_head);
                let out = self.item.out.iter_mut().map(|out| &mut out[part.clone()]);
                scratch.state.finish(simd, self.places.layout.head_dim, out);
            }
        }
        states
    }

    /// The queries of one key-value head against one tile.
    #[inline(always)]
    fn meet<S: Simd>(&self, simd: S, tile: &Tile, next: &Tile, scratch: &mut Scratch) {
        if V::SCALED {
            self.load_scales(simd, tile, next, &mut scratch.scales);
        }
        self.score(simd, tile, next, scratch);
        self.weigh(simd, tile, scratch);
        self.add_values(simd, tile, next, scratch);
    }

    /// Query heads of a key-value head.
    #[inline(always)]
    fn group(&self) -> usize {
        self.item.queries[0].len() / (self.item.kv_heads.len() * self.places.layout.head_dim)
    }

    /// The part of a query that belongs to a key-value head.
    #[inline(always)]
    fn part(&self, kv_head: usize) -> Range<usize> {
        let values = self.group() * self.places.layout.head_dim;
        let index = kv_head - self.item.kv_heads.start;
        index * values..(index + 1) * values
    }

    #[inline(always)]
    fn begin<S: Simd>(&self, simd: S, kv_head: usize, scratch: &mut Scratch) {
        let (dim, part) = (self.places.layout.head_dim, self.part(kv_head));
        scratch.reset(self.item.positions.len() * self.group(), dim);
        for (query, scaled) in self.item.queries.iter().zip(scratch.queries.chunks_exact_mut(part.len())) {
            for (query, scaled) in query[part.clone()].chunks(LANES).zip(scaled.chunks_mut(LANES)) {
                simd.store_partial(simd.mul(simd.load_partial(query), simd.splat(self.scoring.scale)), scaled);
            }
        }
        if V::INTEGERS {
            scratch.rounded_queries.reset(scratch.queries.len() / dim, dim);
            for (row, query) in scratch.queries.chunks_exact(dim).enumerate() {
                scratch.rounded_queries.set(simd, row, query);
            }
        }
    }

    /// The tile that starts at position `start`; empty beyond the last key.
    #[inline(always)]
    fn locate(&self, kv_head: usize, start: usize) -> Tile {
        let keys = self.item.keys.end.saturating_sub(start).min(TILE_KEYS);
        let mut tile = Tile { kv_head, start, keys, runs: [0; RUNS] };
        if keys > 0 {
            let block_tokens = self.places.layout.block_tokens;
            for run in 0..RUNS {
                let position = start + if run * LANES < keys { run * LANES } else { 0 };
                let block = self.item.row.block_table[position / block_tokens] as usize;
                tile.runs[run] = self.places.key(block, kv_head, position % block_tokens);
            }
        }
        tile
    }

    /// The tile after `tile`, of the next key-value head after the last key; then an empty one.
    #[inline(always)]
    fn after(&self, tile: &Tile) -> Tile {
        let start = tile.start + TILE_KEYS;
        if start < self.item.keys.end {
            self.locate(tile.kv_head, start)
        } else if tile.kv_head + 1 < self.item.kv_heads.end {
            self.locate(tile.kv_head + 1, self.item.keys.start)
        } else {
            Tile { keys: 0, ..*tile }
        }
    }

    /// The products of queries and keys. Keys that are no integers are widened: on the way for one strip of rows, beforehand
    /// for several.
    #[inline(always)]
    fn score<S: Simd>(&self, simd: S, tile: &Tile, next: &Tile, scratch: &mut Scratch) {
        let dim = self.places.layout.head_dim;
        let Scratch { queries, rounded_queries, keys, scores, .. } = scratch;
        for score in scores.iter_mut() {
            *score = [0.0; LANES];
        }
        let cached = Keys { runs: self.runs(tile, 0), next: self.runs(next, 0) };
        if V::INTEGERS {
            let product = Integers { a: rounded_queries, depth: dim, b: cached };
            return multiply_add(simd, &product, scores, SCORE_VECTORS);
        }
        let cached = Widened(cached);
        if scores.len() <= STRIP_ROWS * SCORE_VECTORS {
            let product = Floats { a: queries, a_stride: dim, depth: dim, b: cached };
            return multiply_add(simd, &product, scores, SCORE_VECTORS);
        }
        self.prefetch(simd, next, 0);
        for (column, to) in keys.iter_mut().enumerate() {
            let lanes = cached.load::<S, SCORE_VECTORS>(simd, column / V::DEPTH, column % V::DEPTH, 0);
            for vector in 0..SCORE_VECTORS {
                simd.store(lanes[vector], &mut to[vector]);
            }
        }
        let dense = Dense { cells: keys.as_flattened(), vectors: SCORE_VECTORS };
        let product = Floats { a: queries, a_stride: dim, depth: dim, b: dense };
        multiply_add(simd, &product, scores, SCORE_VECTORS);
    }

    /// The lines of a tile's keys, or of what lies `offset` rows from them.
    #[inline(always)]
    fn runs(&self, tile: &Tile, offset: usize) -> Runs<'_, V> {
        let width = self.places.row_cells(V::DEPTH);
        tile.runs.map(|row| self.cells[(row + offset) * width..][..LANES * width].as_chunks().0)
    }

    /// The scales of a tile's keys and values, zeros beyond the last; has the cache fetch the next one's.
    #[inline(always)]
    fn load_scales<S: Simd>(&self, simd: S, tile: &Tile, next: &Tile, to: &mut [[[f32; LANES]; SCORE_VECTORS]; 2]) {
        for (scales, offset) in to.iter_mut().zip([0, self.places.layout.value_offset()]) {
            for run in 0..RUNS {
                scales[run].copy_from_slice(&self.scales[tile.runs[run] + offset..][..LANES]);
                simd.prefetch(self.scales.as_ptr().wrapping_add(next.runs[run] + offset).cast(), 1);
            }
            scales.as_flattened_mut()[tile.keys..].fill(0.0);
        }
    }

    /// Has the cache fetch the keys of a tile, or what lies `offset` rows from them.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, tile: &Tile, offset: usize) {
        for run in self.runs(tile, offset) {
            simd.prefetch(run.as_ptr().cast(), size_of_val(run).div_ceil(CACHE_LINE));
        }
    }

    /// Adds the tile's values, weighted. Values that are no integers are widened: on the way for one strip of rows, beforehand
    /// for several, and where a token's are not whole vectors.
    #[inline(always)]
    fn add_values<S: Simd>(&self, simd: S, tile: &Tile, next: &Tile, scratch: &mut Scratch) {
        let KvLayout { head_dim, .. } = self.places.layout;
        let (vectors, offset) = (head_dim.div_ceil(LANES), self.places.layout.value_offset());
        let Scratch { values, scores, rounded_weights, span, .. } = scratch;
        let (weights, whole) = (scores.as_flattened(), head_dim.is_multiple_of(LANES));
        let cached = Values { runs: self.runs(tile, offset), next: self.runs(next, offset), vectors };
        if whole && V::INTEGERS {
            rounded_weights.reset(span.maxima.len(), TILE_KEYS);
            for (row, weights) in weights.chunks_exact(TILE_KEYS).enumerate() {
                rounded_weights.set(simd, row, weights);
            }
            let product = Integers { a: rounded_weights, depth: tile.keys, b: cached };
            return multiply_add(simd, &product, &mut span.sums, vectors);
        }
        if whole && span.maxima.len() <= STRIP_ROWS {
            let product = Floats { a: weights, a_stride: TILE_KEYS, depth: tile.keys, b: Widened(cached) };
            return multiply_add(simd, &product, &mut span.sums, vectors);
        }
        self.prefetch(simd, next, offset);
        for (key, to) in values.chunks_exact_mut(vectors).enumerate().take(tile.keys) {
            for (vector, to) in to.iter_mut().enumerate() {
                let lanes = match whole {
                    true => V::load(simd, cached.lines::<1>(key / V::DEPTH, vector)[0], key % V::DEPTH),
                    false => V::load(simd, &self.value_cells(tile, key, vector), key % V::DEPTH),
                };
                simd.store(lanes, to);
            }
        }
        let product = Floats { a: weights, a_stride: TILE_KEYS, depth: tile.keys, b: Dense { cells: values, vectors } };
        multiply_add(simd, &product, &mut span.sums, vectors);
    }

    /// The cells of a vector of a key's value, zeros beyond the last.
    #[inline(always)]
    fn value_cells(&self, tile: &Tile, key: usize, vector: usize) -> [V; LANES] {
        let KvLayout { head_dim, .. } = self.places.layout;
        let row = tile.runs[key / LANES] + key % LANES + self.places.layout.value_offset();
        let cells = &self.cells[self.places.value_cell(row, key, V::DEPTH)..][..head_dim];
        let cells = &cells[vector * LANES..head_dim.min((vector + 1) * LANES)];
        let mut filled = [V::default(); LANES];
        filled[..cells.len()].copy_from_slice(cells);
        filled
    }

    /// Turns scores into weights, and scales what was summed under a smaller maximum.
    #[inline(always)]
    fn weigh<S: Simd>(&self, simd: S, tile: &Tile, scratch: &mut Scratch) {
        let group = self.group();
        let vectors = self.places.layout.head_dim.div_ceil(LANES);
        let [key_scales, value_scales] = &scratch.scales;
        let span = &mut scratch.span;
        for row in 0..span.maxima.len() {
            let sight = self.sight(tile, self.item.positions.start + row / group);
            let scores = &mut scratch.scores[row * SCORE_VECTORS..][..SCORE_VECTORS];
            let nothing = simd.splat(f32::NEG_INFINITY);
            let mut lanes = [nothing; SCORE_VECTORS];
            let mut largest = nothing;
            for v in 0..SCORE_VECTORS {
                let mut score = simd.load(&scores[v]);
                if V::SCALED {
                    score = simd.mul(score, simd.load(&key_scales[v]));
                }
                if let Some(cap) = self.scoring.soft_cap {
                    score = capped(simd, score, cap);
                }
                lanes[v] = self.seen(simd, tile, &sight, v, score, f32::NEG_INFINITY);
                largest = simd.max(largest, lanes[v]);
            }
            let before = span.maxima[row];
            let maximum = simd.largest(simd.max(largest, simd.splat(before)));
            let mut total = simd.splat(0.0);
            for v in 0..SCORE_VECTORS {
                let weight = simd.exp(simd.sub(lanes[v], simd.splat(maximum)));
                let weight = self.seen(simd, tile, &sight, v, weight, 0.0);
                total = simd.add(total, weight);
                let weight = if V::SCALED { simd.mul(weight, simd.load(&value_scales[v])) } else { weight };
                simd.store(weight, &mut scores[v]);
            }
            if maximum > before {
                let shrink = simd.exp(simd.splat(before - maximum));
                span.maxima[row] = maximum;
                let sums = &mut span.sums[row * vectors..][..vectors];
                for sum in sums {
                    simd.store(simd.mul(simd.load(sum), shrink), sum);
                }
                let totals = &mut span.totals[row];
                simd.store(simd.fma(simd.load(totals), shrink, total), totals);
            } else {
                let totals = &mut span.totals[row];
                simd.store(simd.add(simd.load(totals), total), totals);
            }
        }
    }

    /// What of a tile the query at `position` sees.
    #[inline(always)]
    fn sight(&self, tile: &Tile, position: usize) -> Sight {
        let trunk = self.item.row.trunk();
        let visible = (position + 1).saturating_sub(tile.start).min(tile.keys);
        let first_key = self.scoring.first_key(self.item.row.text_position(position)).min(trunk);
        let hidden = first_key.saturating_sub(tile.start).min(tile.keys);
        let branches = position >= trunk && tile.start + tile.keys > trunk;
        Sight { position, visible, hidden, branches, all: visible == TILE_KEYS && hidden == 0 && !branches }
    }

    /// Vector `vector` of a row of the tile, with `nothing` in place of what belongs to keys that the query does not see.
    #[inline(always)]
    fn seen<S: Simd>(&self, simd: S, tile: &Tile, sight: &Sight, vector: usize, lanes: S::F, nothing: f32) -> S::F {
        if sight.all {
            return lanes;
        }
        let (first, empty) = (vector * LANES, simd.splat(nothing));
        let lanes = simd.keep_first(sight.visible.saturating_sub(first), lanes, empty);
        let lanes = simd.keep_first(sight.hidden.saturating_sub(first), empty, lanes);
        if !sight.branches {
            return lanes;
        }
        self.hide(simd, sight.position, tile.start + first, lanes, nothing)
    }

    /// Puts `nothing` in place of what the guess at `position` does not see of sixteen keys from `first` on: guesses on
    /// other branches, and those of its own that lie before its window.
    #[inline(always)]
    fn hide<S: Simd>(&self, simd: S, position: usize, first: usize, lanes: S::F, nothing: f32) -> S::F {
        let row = &self.item.row;
        let seen = row.seen[position - row.trunk()];
        let mut values = [0.0; LANES];
        simd.store(lanes, &mut values);
        for (key, value) in (first..).zip(&mut values).filter(|(key, _)| (row.trunk()..row.end()).contains(key)) {
            let from_key_on = seen >> (key - row.trunk());
            let outside = self.scoring.window.is_some_and(|window| from_key_on.count_ones() as usize > window);
            if from_key_on & 1 == 0 || outside {
                *value = nothing;
            }
        }
        simd.load(&values)
    }
}

/// What of a tile a query sees.
struct Sight {
    position: usize,
    /// Keys from the first on that are not behind it.
    visible: usize,
    /// Of these, the first ones that lie before its window.
    hidden: usize,
    /// Whether some of them are guesses on branches.
    branches: bool,
    /// Whether it sees all 64: most queries do of most tiles, and need no masks.
    all: bool,
}
