//! One worker's share of attention: a few queries against all keys that they see.

use std::cell::RefCell;

use half::bf16;

use super::Item;
use super::product::multiply_add;
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

impl Scratch {
    fn reset(&mut self, rows: usize, head_dim: usize) {
        let vectors = head_dim.div_ceil(LANES);
        self.queries.clear();
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
        let dim = self.layout.head_dim;
        let group = self.item.queries[0].len() / dim;
        scratch.reset(self.item.positions.len() * group, dim);
        for query in &self.item.queries {
            for value in *query {
                scratch.queries.push(value * self.scale);
            }
        }
        let end = self.item.positions.end;
        let mut start = 0;
        while start < end {
            let keys = (end - start).min(TILE_KEYS);
            self.load_keys(simd, start, keys, &mut scratch.keys);
            self.load_values(simd, start, keys, &mut scratch.values);
            for score in &mut scratch.scores {
                *score = [0.0; LANES];
            }
            let (queries, scores) = ((&scratch.queries[..], dim), &mut scratch.scores);
            multiply_add(simd, queries, dim, &scratch.keys, scores, SCORE_VECTORS);
            self.weigh(simd, start, keys, group, scratch);
            let weights = (scratch.scores.as_flattened(), TILE_KEYS);
            multiply_add(simd, weights, keys, &scratch.values, &mut scratch.sums, dim.div_ceil(LANES));
            start += TILE_KEYS;
        }
        self.finish(simd, scratch);
    }

    /// Where the key of a position lies.
    #[inline(always)]
    fn key_at(&self, position: usize) -> usize {
        let (block, token) = (position / self.layout.block_tokens, position % self.layout.block_tokens);
        self.layout.key_at(self.item.row.block_table[block] as usize, self.item.kv_head, token)
    }

    /// Transposes the keys from position `start` on: 16 keys by 16 pairs of bf16 at a time.
    #[inline(always)]
    fn load_keys<S: Simd>(&self, simd: S, start: usize, keys: usize, to: &mut [[f32; LANES]]) {
        let dim = self.layout.head_dim;
        for first in (0..keys).step_by(LANES) {
            let mut at = [0; LANES];
            for lane in 0..LANES {
                // Lanes beyond the last key repeat it; nothing reads their scores.
                at[lane] = self.key_at(start + (first + lane).min(keys - 1));
            }
            for part in (0..dim).step_by(2 * LANES) {
                let mut pairs = [simd.splat_i32(0); LANES];
                for lane in 0..LANES {
                    pairs[lane] = load_pairs(simd, &self.cells[at[lane]..][..dim][part..]);
                }
                let pairs = simd.transpose(pairs);
                let to = &mut to[part * SCORE_VECTORS + first / LANES..];
                for pair in 0..LANES {
                    simd.store(simd.low_bf16(pairs[pair]), &mut to[2 * pair * SCORE_VECTORS]);
                    simd.store(simd.high_bf16(pairs[pair]), &mut to[(2 * pair + 1) * SCORE_VECTORS]);
                }
            }
        }
    }

    #[inline(always)]
    fn load_values<S: Simd>(&self, simd: S, start: usize, keys: usize, to: &mut [[f32; LANES]]) {
        let dim = self.layout.head_dim;
        let vectors = dim.div_ceil(LANES);
        for key in 0..keys {
            let value = &self.cells[self.key_at(start + key) + self.layout.value_offset()..][..dim];
            for (lanes, to) in value.chunks(LANES).zip(&mut to[key * vectors..]) {
                simd.store(load_partial_bf16(simd, lanes), to);
            }
        }
    }

    /// Turns scores into weights, and scales what was summed under a smaller maximum.
    #[inline(always)]
    fn weigh<S: Simd>(&self, simd: S, start: usize, keys: usize, group: usize, scratch: &mut Scratch) {
        let vectors = self.layout.head_dim.div_ceil(LANES);
        for row in 0..scratch.maxima.len() {
            let position = self.item.positions.start + row / group;
            let visible = (position + 1).saturating_sub(start).min(keys);
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
    fn finish<S: Simd>(&mut self, simd: S, scratch: &Scratch) {
        let dim = self.layout.head_dim;
        let mut rows = scratch.sums.chunks_exact(dim.div_ceil(LANES)).zip(&scratch.totals);
        for out in &mut self.item.out {
            for (head, (sums, totals)) in out.chunks_exact_mut(dim).zip(&mut rows) {
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

/// Sixteen values, zeros beyond the end of `from`.
#[inline(always)]
fn load_partial_bf16<S: Simd>(simd: S, from: &[bf16]) -> S::F {
    match from.first_chunk() {
        Some(lanes) => simd.load_bf16(lanes),
        None => {
            let mut lanes = [bf16::ZERO; LANES];
            lanes[..from.len()].copy_from_slice(from);
            simd.load_bf16(&lanes)
        }
    }
}
