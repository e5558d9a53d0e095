//! A small product in f32, for scores and for weighted values.

use super::lines::Lines;
use super::row::Value;
use crate::simd::{LANES, Simd};

/// The right-hand side of a product: rows of vectors of 16.
pub(super) trait Right {
    /// Rows that lie in the same cells.
    const DEPTH: usize;

    /// `WIDE` vectors, from vector `vector` on, of row `cell · DEPTH + part`.
    fn load<S: Simd, const WIDE: usize>(&self, simd: S, cell: usize, part: usize, vector: usize) -> [S::F; WIDE];

    /// Has the cache fetch what comes next in the place of these cells.
    #[inline(always)]
    fn prefetch_next<S: Simd, const WIDE: usize>(&self, _simd: S, _cell: usize, _vector: usize) {}
}

/// Rows of `vectors` vectors one after the other.
pub(super) struct Dense<'a> {
    pub(super) cells: &'a [[f32; LANES]],
    pub(super) vectors: usize,
}

impl Right for Dense<'_> {
    const DEPTH: usize = 1;

    #[inline(always)]
    fn load<S: Simd, const WIDE: usize>(&self, simd: S, cell: usize, _part: usize, vector: usize) -> [S::F; WIDE] {
        let cells = &self.cells[cell * self.vectors + vector..][..WIDE];
        let mut lanes = [simd.splat(0.0); WIDE];
        for v in 0..WIDE {
            lanes[v] = simd.load(&cells[v]);
        }
        lanes
    }
}

/// Cells that are widened on the way.
pub(super) struct Widened<L>(pub(super) L);

impl<L: Lines> Right for Widened<L> {
    const DEPTH: usize = L::Cell::DEPTH;

    #[inline(always)]
    fn load<S: Simd, const WIDE: usize>(&self, simd: S, cell: usize, part: usize, vector: usize) -> [S::F; WIDE] {
        let lines = self.0.lines::<WIDE>(cell, vector);
        let mut lanes = [simd.splat(0.0); WIDE];
        for v in 0..WIDE {
            lanes[v] = L::Cell::load(simd, lines[v], part);
        }
        lanes
    }

    #[inline(always)]
    fn prefetch_next<S: Simd, const WIDE: usize>(&self, simd: S, cell: usize, vector: usize) {
        self.0.prefetch_next::<S, WIDE>(simd, cell, vector);
    }
}

/// Rows of a multiplication that share the loads of its right-hand side.
pub(super) const STRIP_ROWS: usize = 6;

/// Multiplies as many rows, from row `row` of `rows` on, as the set has registers for: `$strip::<ROWS, WIDE>($arguments)`,
/// which returns them.
macro_rules! strip_of {
    ($set:ident, $rows:expr, $strip:ident($($argument:expr),*)) => {
        if !$set::REGISTERS {
            $strip::<$set, _, 1, 1>($($argument),*)
        } else if $set::MANY_REGISTERS {
            match $rows {
                1 => $strip::<$set, _, 1, 4>($($argument),*),
                2 => $strip::<$set, _, 2, 4>($($argument),*),
                3 => $strip::<$set, _, 3, 4>($($argument),*),
                4 => $strip::<$set, _, 4, 4>($($argument),*),
                5 => $strip::<$set, _, 5, 4>($($argument),*),
                _ => $strip::<$set, _, { $crate::ops::attention::product::STRIP_ROWS }, 4>($($argument),*),
            }
        } else {
            // Sixteen: up to eight sums, which are as many as hide each other's latency, and what they are made of.
            match $rows {
                1 => $strip::<$set, _, 1, 4>($($argument),*),
                2 => $strip::<$set, _, 2, 2>($($argument),*),
                3 => $strip::<$set, _, 3, 1>($($argument),*),
                _ => $strip::<$set, _, 4, 1>($($argument),*),
            }
        }
    };
}
pub(super) use strip_of;

/// `c[r][v] += Σ_k a[r][k] · b[k][v]` for `a` of `[rows, depth]`, `b` of `[depth, vectors]` and `c` of
/// `[rows, vectors]`, where `c` holds vectors of 16. Each sum runs over `k` in ascending order. `a` has a row
/// every `a_stride` values.
#[inline(always)]
pub(super) fn multiply_add<S: Simd>(
    simd: S,
    (a, a_stride): (&[f32], usize),
    depth: usize,
    b: &impl Right,
    c: &mut [[f32; LANES]],
    vectors: usize,
) {
    let rows = c.len() / vectors;
    let mut row = 0;
    while row < rows {
        let a = (&a[row * a_stride..], a_stride);
        let c = &mut c[row * vectors..];
        row += strip_of!(S, rows - row, strip(simd, a, depth, b, c, vectors));
    }
}

/// `ROWS` rows of `c`, `WIDE` vectors at a time; returns the rows done.
#[inline(always)]
fn strip<S: Simd, R: Right, const ROWS: usize, const WIDE: usize>(
    simd: S,
    (a, a_stride): (&[f32], usize),
    depth: usize,
    b: &R,
    c: &mut [[f32; LANES]],
    vectors: usize,
) -> usize {
    let mut rows = [&a[..depth]; ROWS];
    for r in 0..ROWS {
        rows[r] = &a[r * a_stride..][..depth];
    }
    let mut vector = 0;
    while vector + WIDE <= vectors {
        register_tile::<S, R, ROWS, WIDE>(simd, rows, b, c, vectors, vector);
        vector += WIDE;
    }
    while vector < vectors {
        register_tile::<S, R, ROWS, 1>(simd, rows, b, c, vectors, vector);
        vector += 1;
    }
    ROWS
}

#[inline(always)]
fn register_tile<S: Simd, R: Right, const ROWS: usize, const WIDE: usize>(
    simd: S,
    a: [&[f32]; ROWS],
    b: &R,
    c: &mut [[f32; LANES]],
    vectors: usize,
    vector: usize,
) {
    let mut sums = [[simd.splat(0.0); WIDE]; ROWS];
    for r in 0..ROWS {
        for v in 0..WIDE {
            sums[r][v] = simd.load(&c[r * vectors + vector + v]);
        }
    }
    let (cells, rest) = (a[0].len() / R::DEPTH, a[0].len() % R::DEPTH);
    for cell in 0..cells {
        b.prefetch_next::<S, WIDE>(simd, cell, vector);
        // Their number is known, so that every part is taken by a path of its own.
        for part in 0..R::DEPTH {
            add_row(simd, a, b, (cell, part), vector, &mut sums);
        }
    }
    for part in 0..rest {
        add_row(simd, a, b, (cells, part), vector, &mut sums);
    }
    for r in 0..ROWS {
        for v in 0..WIDE {
            simd.store(sums[r][v], &mut c[r * vectors + vector + v]);
        }
    }
}

/// Adds the products with one row of `b`.
#[inline(always)]
fn add_row<S: Simd, R: Right, const ROWS: usize, const WIDE: usize>(
    simd: S,
    a: [&[f32]; ROWS],
    b: &R,
    (cell, part): (usize, usize),
    vector: usize,
    sums: &mut [[S::F; WIDE]; ROWS],
) {
    let lanes = b.load::<S, WIDE>(simd, cell, part, vector);
    for r in 0..ROWS {
        let a = simd.splat(a[r][cell * R::DEPTH + part]);
        for v in 0..WIDE {
            sums[r][v] = simd.fma(a, lanes[v], sums[r][v]);
        }
    }
}
