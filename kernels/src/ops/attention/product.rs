//! A small dense product in f32, for scores and for weighted values.

use crate::simd::{LANES, Simd};

/// The right-hand side of a product: rows of vectors of 16.
pub(super) trait Right: Copy {
    /// Vector `vector` of row `k`.
    fn load<S: Simd>(self, simd: S, k: usize, vector: usize) -> S::F;
}

/// Rows of `vectors` vectors one after the other.
#[derive(Clone, Copy)]
pub(super) struct Dense<'a> {
    pub(super) cells: &'a [[f32; LANES]],
    pub(super) vectors: usize,
}

impl Right for Dense<'_> {
    #[inline(always)]
    fn load<S: Simd>(self, simd: S, k: usize, vector: usize) -> S::F {
        simd.load(&self.cells[k * self.vectors + vector])
    }
}

/// Rows of a multiplication that share the loads of its right-hand side.
pub(super) const STRIP_ROWS: usize = 6;

/// `c[r][v] += Σ_k a[r][k] · b[k][v]` for `a` of `[rows, depth]`, `b` of `[depth, vectors]` and `c` of
/// `[rows, vectors]`, where `c` holds vectors of 16. Each sum runs over `k` in ascending order. `a` has a row
/// every `a_stride` values.
#[inline(always)]
pub(super) fn multiply_add<S: Simd>(
    simd: S,
    (a, a_stride): (&[f32], usize),
    depth: usize,
    b: impl Right,
    c: &mut [[f32; LANES]],
    vectors: usize,
) {
    let rows = c.len() / vectors;
    let mut row = 0;
    while row < rows {
        let a = (&a[row * a_stride..], a_stride);
        let c = &mut c[row * vectors..];
        row += if !S::REGISTERS {
            strip::<S, _, 1, 1>(simd, a, depth, b, c, vectors)
        } else if S::MANY_REGISTERS {
            match rows - row {
                1 => strip::<S, _, 1, 4>(simd, a, depth, b, c, vectors),
                2 => strip::<S, _, 2, 4>(simd, a, depth, b, c, vectors),
                3 => strip::<S, _, 3, 4>(simd, a, depth, b, c, vectors),
                4 => strip::<S, _, 4, 4>(simd, a, depth, b, c, vectors),
                5 => strip::<S, _, 5, 4>(simd, a, depth, b, c, vectors),
                _ => strip::<S, _, STRIP_ROWS, 4>(simd, a, depth, b, c, vectors),
            }
        } else {
            // Sixteen: up to eight sums, which are as many as hide each other's latency, and what they are made of.
            match rows - row {
                1 => strip::<S, _, 1, 4>(simd, a, depth, b, c, vectors),
                2 => strip::<S, _, 2, 2>(simd, a, depth, b, c, vectors),
                3 => strip::<S, _, 3, 1>(simd, a, depth, b, c, vectors),
                _ => strip::<S, _, 4, 1>(simd, a, depth, b, c, vectors),
            }
        };
    }
}

/// `ROWS` rows of `c`, `WIDE` vectors at a time; returns the rows done.
#[inline(always)]
fn strip<S: Simd, R: Right, const ROWS: usize, const WIDE: usize>(
    simd: S,
    (a, a_stride): (&[f32], usize),
    depth: usize,
    b: R,
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
    b: R,
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
    for k in 0..a[0].len() {
        let mut lanes = [sums[0][0]; WIDE];
        for v in 0..WIDE {
            lanes[v] = b.load(simd, k, vector + v);
        }
        for r in 0..ROWS {
            let a = simd.splat(a[r][k]);
            for v in 0..WIDE {
                sums[r][v] = simd.fma(a, lanes[v], sums[r][v]);
            }
        }
    }
    for r in 0..ROWS {
        for v in 0..WIDE {
            simd.store(sums[r][v], &mut c[r * vectors + vector + v]);
        }
    }
}
