//! One worker's share of attention: a few queries against some of the keys that they see.

use std::cell::RefCell;
use std::ops::Range;

use super::product::{Dense, Right, STRIP_ROWS, multiply_add};
use super::row::{Value, filled_up};
use super::state::State;
use super::{Item, SPAN_KEYS, Scoring};
use crate::kv_cache::{KvLayout, Places, key_cell};
use crate::ops::activation::capped;
use crate::simd::{Kernel, LANES, Simd};

/// Keys that a query meets at a time: tiles begin at multiples of it.
pub const TILE_KEYS: usize = 64;

/// Vectors of a row of scores.
const SCORE_VECTORS: usize = TILE_KEYS / LANES;

/// One column of a tile's keys.
pub(super) type KeyColumn = [[f32; LANES]; SCORE_VECTORS];

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
    /// The tile's keys, `[head_dim][64 keys]`.
    keys: Vec<KeyColumn>,
    /// The tile's values, `[64 keys][vectors]`.
    values: Vec<[f32; LANES]>,
    /// Scores, then weights relative to the row's maximum so far, `[row][64 keys]`.
    scores: Vec<[f32; LANES]>,
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
    /// The row of each key in the cache.
    at: [usize; TILE_KEYS],
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
            self.load_scales(tile, &mut scratch.scales);
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
    }

    /// The tile that starts at position `start`; empty beyond the last key.
    #[inline(always)]
    fn locate(&self, kv_head: usize, start: usize) -> Tile {
        let keys = self.item.keys.end.saturating_sub(start).min(TILE_KEYS);
        let mut tile = Tile { kv_head, start, keys, at: [0; TILE_KEYS] };
        let (mut block, mut token) = (start / self.places.layout.block_tokens, start % self.places.layout.block_tokens);
        let mut left = &mut tile.at[..keys];
        while !left.is_empty() {
            let (here, rest) = left.split_at_mut(left.len().min(self.places.layout.block_tokens - token));
            let first = self.places.key(self.item.row.block_table[block] as usize, kv_head, token);
            for (i, at) in here.iter_mut().enumerate() {
                *at = first + i;
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
        if start < self.item.keys.end {
            self.locate(tile.kv_head, start)
        } else if tile.kv_head + 1 < self.item.kv_heads.end {
            self.locate(tile.kv_head + 1, self.item.keys.start)
        } else {
            Tile { keys: 0, ..*tile }
        }
    }

    /// The products of queries and keys: these are widened on the way for one strip of rows, beforehand for several, or
    /// where sixteen of them do not lie side by side.
    #[inline(always)]
    fn score<S: Simd>(&self, simd: S, tile: &Tile, next: &Tile, scratch: &mut Scratch) {
        let KvLayout { block_tokens, head_dim, .. } = self.places.layout;
        let Scratch { queries, keys, scores, .. } = scratch;
        for score in scores.iter_mut() {
            *score = [0.0; LANES];
        }
        self.prefetch(simd, next, 0);
        // Nothing reads the scores of vectors beyond the last key, nor below those of lanes beyond it.
        let first_of = |vector: usize| if vector * LANES < tile.keys { vector * LANES } else { 0 };
        let firsts = std::array::from_fn(|vector| self.first_cell(tile, first_of(vector)));
        let paged = Keys { cells: self.cells, stride: block_tokens, firsts };
        let side_by_side = block_tokens.is_multiple_of(LANES);
        if side_by_side && scores.len() <= STRIP_ROWS * SCORE_VECTORS {
            return multiply_add(simd, (queries, head_dim), head_dim, paged, scores, SCORE_VECTORS);
        }
        for vector in 0..SCORE_VECTORS {
            let key = |lane: usize| (vector * LANES + lane).min(tile.keys - 1);
            let apart = (!side_by_side).then(|| std::array::from_fn(|lane| self.first_cell(tile, key(lane))));
            for (column, to) in keys.iter_mut().enumerate() {
                let lanes = match apart {
                    None => paged.load(simd, column, vector),
                    Some(firsts) => paged.gather(simd, column, firsts),
                };
                simd.store(lanes, &mut to[vector]);
            }
        }
        let dense = Dense { cells: keys.as_flattened(), vectors: SCORE_VECTORS };
        multiply_add(simd, (queries, head_dim), head_dim, dense, scores, SCORE_VECTORS);
    }

    /// The first cell of a key of the tile.
    #[inline(always)]
    fn first_cell(&self, tile: &Tile, key: usize) -> usize {
        let KvLayout { block_tokens, head_dim, .. } = self.places.layout;
        key_cell(tile.at[key], (tile.start + key) % block_tokens, V::cells(head_dim))
    }

    /// The scales of a tile's keys and values, zeros beyond the last.
    #[inline(always)]
    fn load_scales(&self, tile: &Tile, to: &mut [[[f32; LANES]; SCORE_VECTORS]; 2]) {
        for (scales, offset) in to.iter_mut().zip([0, self.places.layout.value_offset()]) {
            let scales = scales.as_flattened_mut();
            for (scale, at) in scales.iter_mut().zip(&tile.at[..tile.keys]) {
                *scale = self.scales[at + offset];
            }
            scales[tile.keys..].fill(0.0);
        }
    }

    /// Has the cache fetch the keys of a tile, or what lies `offset` rows from them: sixteen at once where they lie one
    /// after the other.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, tile: &Tile, offset: usize) {
        let width = V::cells(self.places.layout.head_dim);
        let lines = |rows: usize| (rows * width * size_of::<V>()).div_ceil(64);
        let fetch = |at: usize, rows: usize| {
            simd.prefetch(self.cells.as_ptr().wrapping_add((at + offset) * width).cast(), lines(rows));
        };
        for at in tile.at[..tile.keys].chunks(LANES) {
            match at {
                [start, .., last] if last - start == LANES - 1 => fetch(*start, LANES),
                scattered => scattered.iter().for_each(|at| fetch(*at, 1)),
            }
        }
    }

    /// Adds the tile's values, weighted: widened on the way for one strip of rows, beforehand for several.
    #[inline(always)]
    fn add_values<S: Simd>(&self, simd: S, tile: &Tile, next: &Tile, scratch: &mut Scratch) {
        self.prefetch(simd, next, self.places.layout.value_offset());
        let vectors = self.places.layout.head_dim.div_ceil(LANES);
        let weights = (scratch.scores.as_flattened(), TILE_KEYS);
        let (head_dim, offset) = (self.places.layout.head_dim, self.places.layout.value_offset());
        let paged = Values { cells: self.cells, width: V::cells(head_dim), offset, at: &tile.at };
        if scratch.span.maxima.len() <= STRIP_ROWS && head_dim.is_multiple_of(LANES) {
            return multiply_add(simd, weights, tile.keys, paged, &mut scratch.span.sums, vectors);
        }
        for (key, to) in scratch.values.chunks_exact_mut(vectors).enumerate().take(tile.keys) {
            for (cells, to) in paged.row(key).chunks(LANES / V::PACKED).zip(to) {
                let whole = cells.len() == LANES / V::PACKED;
                simd.store(if whole { V::load(simd, cells) } else { V::load(simd, &filled_up(cells)) }, to);
            }
        }
        let dense = Dense { cells: &scratch.values, vectors };
        multiply_add(simd, weights, tile.keys, dense, &mut scratch.span.sums, vectors);
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

/// The keys of a tile where they lie in the cache.
#[derive(Clone, Copy)]
struct Keys<'a, V> {
    cells: &'a [V],
    /// Cells from a column to the next.
    stride: usize,
    /// The first cell of every sixteenth key.
    firsts: [usize; SCORE_VECTORS],
}

impl<V: Value> Keys<'_, V> {
    /// Sixteen keys that lie apart, given by their first cells.
    #[inline(always)]
    fn gather<S: Simd>(self, simd: S, column: usize, firsts: [usize; LANES]) -> S::F {
        let mut cells = [V::default(); LANES];
        for lane in 0..LANES {
            cells[lane] = self.cells[firsts[lane] + column / V::PACKED * self.stride];
        }
        V::load_part(simd, &cells, column % V::PACKED)
    }
}

impl<V: Value> Right for Keys<'_, V> {
    /// Sixteen keys of a block.
    #[inline(always)]
    fn load<S: Simd>(self, simd: S, column: usize, vector: usize) -> S::F {
        V::load_part(simd, &self.cells[self.firsts[vector] + column / V::PACKED * self.stride..], column % V::PACKED)
    }
}

/// The values of a tile where they lie in the cache.
#[derive(Clone, Copy)]
struct Values<'a, V> {
    cells: &'a [V],
    /// Cells of a row.
    width: usize,
    /// Rows from a key to its value.
    offset: usize,
    at: &'a [usize; TILE_KEYS],
}

impl<V: Value> Values<'_, V> {
    #[inline(always)]
    fn row(&self, key: usize) -> &[V] {
        &self.cells[(self.at[key] + self.offset) * self.width..][..self.width]
    }
}

impl<V: Value> Right for Values<'_, V> {
    #[inline(always)]
    fn load<S: Simd>(self, simd: S, key: usize, vector: usize) -> S::F {
        V::load(simd, &self.row(key)[vector * LANES / V::PACKED..])
    }
}
