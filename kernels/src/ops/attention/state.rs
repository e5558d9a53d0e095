//! What queries have gathered from some of their keys, and how two such parts become one.

use crate::simd::{LANES, Simd};

/// The online softmax of some rows (a row is one query with one head) over some keys.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// Weighted values so far, `[row][vectors]`.
    pub(super) sums: Vec<[f32; LANES]>,
    /// The largest score so far of each row.
    pub(super) maxima: Vec<f32>,
    /// Weights so far of each row relative to its maximum, lane by lane.
    pub(super) totals: Vec<[f32; LANES]>,
}

impl State {
    /// Rows that have met no key.
    pub(super) fn reset(&mut self, rows: usize, vectors: usize) {
        self.sums.clear();
        self.sums.resize(rows * vectors, [0.0; LANES]);
        self.maxima.clear();
        self.maxima.resize(rows, f32::NEG_INFINITY);
        self.totals.clear();
        self.totals.resize(rows, [0.0; LANES]);
    }

    /// Takes in what the rows gathered from the keys that come next.
    #[inline(always)]
    pub(super) fn absorb<S: Simd>(&mut self, simd: S, next: &State) {
        let vectors = self.sums.len() / self.maxima.len();
        for row in 0..self.maxima.len() {
            // Keys that a row does not see leave every bit as it was.
            if next.maxima[row] == f32::NEG_INFINITY {
                continue;
            }
            let sums = row * vectors..(row + 1) * vectors;
            if self.maxima[row] == f32::NEG_INFINITY {
                self.sums[sums.clone()].copy_from_slice(&next.sums[sums]);
                (self.totals[row], self.maxima[row]) = (next.totals[row], next.maxima[row]);
                continue;
            }
            let maximum = self.maxima[row].max(next.maxima[row]);
            let ours = simd.exp(simd.splat(self.maxima[row] - maximum));
            let theirs = simd.exp(simd.splat(next.maxima[row] - maximum));
            for (sum, next) in self.sums[sums.clone()].iter_mut().zip(&next.sums[sums]) {
                simd.store(simd.fma(simd.load(sum), ours, simd.mul(simd.load(next), theirs)), sum);
            }
            let total = simd.fma(simd.load(&self.totals[row]), ours, simd.mul(simd.load(&next.totals[row]), theirs));
            simd.store(total, &mut self.totals[row]);
            self.maxima[row] = maximum;
        }
    }

    /// Writes the weighted means: `out` has, for each query, the values of its heads, `[heads, head_dim]`.
    #[inline(always)]
    pub(super) fn finish<'a, S: Simd>(&self, simd: S, head_dim: usize, out: impl Iterator<Item = &'a mut [f32]>) {
        let mut rows = self.sums.chunks_exact(head_dim.div_ceil(LANES)).zip(&self.totals);
        for out in out {
            for (head, (sums, totals)) in out.chunks_exact_mut(head_dim).zip(&mut rows) {
                let total = simd.splat(simd.sum(simd.load(totals)));
                for (out, sum) in head.chunks_mut(LANES).zip(sums) {
                    simd.store_partial(simd.div(simd.load(sum), total), out);
                }
            }
        }
    }
}
