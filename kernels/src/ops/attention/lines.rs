//! A tile's keys and values where they lie in the cache: lines of sixteen cells, side by side for every sixteen tokens.

use std::array;

use super::row::Value;
use crate::simd::{LANES, Simd};

/// Keys that a query meets at a time: tiles begin at multiples of it.
pub const TILE_KEYS: usize = 64;

/// Runs of sixteen tokens in a tile.
pub(super) const RUNS: usize = TILE_KEYS / LANES;

/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

/// The lines of a tile's keys, or of its values, run by run. Those of runs beyond the last key are some other's.
pub(super) type Runs<'a, V> = [&'a [[V; LANES]]; RUNS];

/// The right-hand side of a product as the cache has it.
pub(super) trait Lines {
    type Cell: Value;

    /// `WIDE` vectors, from vector `vector` on, of the rows in cell `cell`.
    fn lines<const WIDE: usize>(&self, cell: usize, vector: usize) -> [&[Self::Cell; LANES]; WIDE];

    /// Where the next tile has what lies there in this one.
    fn next<const WIDE: usize>(&self, cell: usize, vector: usize) -> [*const [Self::Cell; LANES]; WIDE];

    /// Has the cache fetch the next tile's lines while this one's are multiplied: memory answers to a few at a time as fast as
    /// they are needed, to a whole tile at once with a wait. `pass` of `passes` over this one's asks for its share of them.
    #[inline(always)]
    fn prefetch_next<S: Simd, const WIDE: usize>(
        &self,
        simd: S,
        cell: usize,
        vector: usize,
        (pass, passes): (usize, usize),
    ) {
        let next = self.next::<WIDE>(cell, vector);
        for v in (pass..WIDE).step_by(passes) {
            // Shorter ones share what is fetched.
            if size_of::<[Self::Cell; LANES]>() >= CACHE_LINE || (next[v] as usize).is_multiple_of(CACHE_LINE) {
                simd.prefetch(next[v].cast(), 1);
            }
        }
    }
}

/// Keys: a row is a column of theirs, and a vector is a run, `[run][cells of a key][16 keys]`.
pub(super) struct Keys<'a, V> {
    pub(super) runs: Runs<'a, V>,
    pub(super) next: Runs<'a, V>,
}

impl<V: Value> Lines for Keys<'_, V> {
    type Cell = V;

    #[inline(always)]
    fn lines<const WIDE: usize>(&self, cell: usize, vector: usize) -> [&[V; LANES]; WIDE] {
        array::from_fn(|v| &self.runs[vector + v][cell])
    }

    #[inline(always)]
    fn next<const WIDE: usize>(&self, cell: usize, vector: usize) -> [*const [V; LANES]; WIDE] {
        array::from_fn(|v| self.next[vector + v].as_ptr().wrapping_add(cell))
    }
}

/// Values: a row is a token, which has `vectors` vectors, `[run][cells of sixteen tokens][vectors][16 columns]`.
pub(super) struct Values<'a, V> {
    pub(super) runs: Runs<'a, V>,
    pub(super) next: Runs<'a, V>,
    pub(super) vectors: usize,
}

impl<V: Value> Values<'_, V> {
    /// The run of a cell, and in it the line of a vector.
    #[inline(always)]
    fn place(&self, cell: usize, vector: usize) -> (usize, usize) {
        let of_a_run = const { LANES / V::DEPTH };
        (cell / of_a_run, cell % of_a_run * self.vectors + vector)
    }
}

impl<V: Value> Lines for Values<'_, V> {
    type Cell = V;

    #[inline(always)]
    fn lines<const WIDE: usize>(&self, cell: usize, vector: usize) -> [&[V; LANES]; WIDE] {
        let (run, line) = self.place(cell, vector);
        let lines = &self.runs[run][line..][..WIDE];
        array::from_fn(|v| &lines[v])
    }

    #[inline(always)]
    fn next<const WIDE: usize>(&self, cell: usize, vector: usize) -> [*const [V; LANES]; WIDE] {
        let (run, line) = self.place(cell, vector);
        let start = self.next[run].as_ptr().wrapping_add(line);
        array::from_fn(|v| start.wrapping_add(v))
    }
}
