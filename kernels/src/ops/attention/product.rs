//! Small products with sums in registers, for scores and for weighted values.

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
        self.0.prefetch_next::<S, WIDE>(simd, cell, vector, (0, 1));
    }
}

/// A product `a · b` that is computed a tile of sums at a time.
pub(super) trait Product {
    /// Adds to `ROWS` rows of `c`, from row `row` on, `WIDE` of their `vectors` vectors, from vector `vector` on.
    fn add_tile<S: Simd, const ROWS: usize, const WIDE: usize>(
        &self,
        simd: S,
        row: usize,
        vectors: usize,
        vector: usize,
        c: &mut [[f32; LANES]],
    );
}

/// Rows of a product that share the loads of its right-hand side.
pub(super) const STRIP_ROWS: usize = 6;

/// `c += a · b` for `c` of `[rows, vectors]`, vectors of 16.
#[inline(always)]
pub(super) fn multiply_add<S: Simd>(simd: S, product: &impl Product, c: &mut [[f32; LANES]], vectors: usize) {
    let rows = c.len() / vectors;
    let mut row = 0;
    while row < rows {
        row += if !S::REGISTERS {
            strip::<S, _, 1, 1>(simd, product, row, c, vectors)
        } else if S::MANY_REGISTERS {
            match rows - row {
                1 => strip::<S, _, 1, 4>(simd, product, row, c, vectors),
                2 => strip::<S, _, 2, 4>(simd, product, row, c, vectors),
                3 => strip::<S, _, 3, 4>(simd, product, row, c, vectors),
                4 => strip::<S, _, 4, 4>(simd, product, row, c, vectors),
                5 => strip::<S, _, 5, 4>(simd, product, row, c, vectors),
                _ => strip::<S, _, STRIP_ROWS, 4>(simd, product, row, c, vectors),
            }
        } else {
            // Sixteen: up to eight sums, which are as many as hide each other's latency, and what they are made of.
            match rows - row {
                1 => strip::<S, _, 1, 4>(simd, product, row, c, vectors),
                2 => strip::<S, _, 2, 2>(simd, product, row, c, vectors),
                3 => strip::<S, _, 3, 1>(simd, product, row, c, vectors),
                _ => strip::<S, _, 4, 1>(simd, product, row, c, vectors),
            }
        };
    }
}

/// `ROWS` rows of `c` from row `row` on, `WIDE` vectors at a time; returns the rows done.
#[inline(always)]
fn strip<S: Simd, P: Product, const ROWS: usize, const WIDE: usize>(
    simd: S,
    product: &P,
    row: usize,
    c: &mut [[f32; LANES]],
    vectors: usize,
) -> usize {
    let c = &mut c[row * vectors..];
    let mut vector = 0;
    while vector + WIDE <= vectors {
        product.add_tile::<S, ROWS, WIDE>(simd, row, vectors, vector, c);
        vector += WIDE;
    }
    while vector < vectors {
        product.add_tile::<S, ROWS, 1>(simd, row, vectors, vector, c);
        vector += 1;
    }
    ROWS
}

/// `c[r][v] += Σ_k a[r][k] · b[k][v]` over `depth` values of each row of `a`, which has one every `a_stride` values. Each sum
/// runs over `k` in ascending order.
pub(super) struct Floats<'a, R> {
    pub(super) a: &'a [f32],
    pub(super) a_stride: usize,
    pub(super) depth: usize,
    pub(super) b: R,
}

impl<R: Right> Product for Floats<'_, R> {
    #[inline(always)]
    fn add_tile<S: Simd, const ROWS: usize, const WIDE: usize>(
        &self,
        simd: S,
        row: usize,
        vectors: usize,
        vector: usize,
        c: &mut [[f32; LANES]],
    ) {
        let mut a = [&self.a[..self.depth]; ROWS];
        for r in 0..ROWS {
            a[r] = &self.a[(row + r) * self.a_stride..][..self.depth];
        }
        let mut sums = [[simd.splat(0.0); WIDE]; ROWS];
        for r in 0..ROWS {
            for v in 0..WIDE {
                sums[r][v] = simd.load(&c[r * vectors + vector + v]);
            }
        }
        let (cells, rest) = (self.depth / R::DEPTH, self.depth % R::DEPTH);
        for cell in 0..cells {
            self.b.prefetch_next::<S, WIDE>(simd, cell, vector);
            // Their number is known, so that every part is taken by a path of its own.
            for part in 0..R::DEPTH {
                add_row(simd, a, &self.b, (cell, part), vector, &mut sums);
            }
        }
        for part in 0..rest {
            add_row(simd, a, &self.b, (cells, part), vector, &mut sums);
        }
        for r in 0..ROWS {
            for v in 0..WIDE {
                simd.store(sums[r][v], &mut c[r * vectors + vector + v]);
            }
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
