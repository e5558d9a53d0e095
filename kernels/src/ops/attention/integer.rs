//! Products whose right-hand side is bytes: rows of the left are rounded to 16 bits, each as two bytes.

use super::lines::Lines;
use super::product::Product;
use super::row::{Value, largest};
use crate::simd::{LANES, Simd};

/// What a coarse code counts: fine ones are then below 128 in magnitude.
const FINE: f32 = 255.0;

/// The largest value in codes.
const MOST: f32 = 127.0 * FINE;

/// Codes of one kind, in fours, as the products of bytes take them.
type Plane = Vec<[i8; 4]>;

/// Rows in 16 bits: value = scale · (255 · coarse + fine), missed by 2⁻¹⁵ of the row's largest at most.
#[derive(Default)]
pub(super) struct Rounded {
    /// Fours of a row in one plane.
    fours: usize,
    /// Coarse, fine: `[row][fours]`.
    planes: [Plane; 2],
    scales: Vec<f32>,
    /// Of each plane's row the negated sum, for what the other side's bytes have too much.
    negated_sums: [Vec<i32>; 2],
}

impl Rounded {
    /// So many rows of `values`, which are to be written.
    pub(super) fn reset(&mut self, rows: usize, values: usize) {
        self.fours = values.div_ceil(4);
        self.scales.resize(rows, 0.0);
        for plane in 0..2 {
            self.planes[plane].resize(rows * self.fours, [0; 4]);
            self.negated_sums[plane].resize(rows, 0);
        }
    }

    /// Writes a row.
    #[inline(always)]
    pub(super) fn set<S: Simd>(&mut self, simd: S, row: usize, values: &[f32]) {
        let largest = largest(simd, values);
        let inverse = simd.splat(if largest > 0.0 { MOST / largest } else { 0.0 });
        let [coarse, fine] = &mut self.planes;
        let [coarse, fine] = [coarse, fine].map(|plane| plane[row * self.fours..][..self.fours].as_flattened_mut());
        let (mut sums, mut nothing) = ([simd.splat_i32(0); 2], simd.splat(0.0));
        for ((values, coarse), fine) in values.chunks(LANES).zip(coarse.chunks_mut(LANES)).zip(fine.chunks_mut(LANES)) {
            let values = simd.load_partial(values);
            nothing = simd.fma(values, simd.splat(0.0), nothing);
            let whole = simd.to_f32(simd.round(simd.mul(values, inverse)));
            let high = simd.round(simd.mul(whole, simd.splat(1.0 / FINE)));
            let low = simd.round(simd.fma(simd.to_f32(high), simd.splat(-FINE), whole));
            sums = [simd.add_i32(sums[0], high), simd.add_i32(sums[1], low)];
            simd.store_i8_partial(high, coarse);
            simd.store_i8_partial(low, fine);
        }
        // Codes cannot say that a value is no number; the scale can.
        self.scales[row] = largest / MOST + simd.sum(nothing);
        for plane in 0..2 {
            self.negated_sums[plane][row] = -simd.sum_i32(sums[plane]);
        }
    }

    #[inline(always)]
    fn row(&self, plane: usize, row: usize, fours: usize) -> &[[i8; 4]] {
        &self.planes[plane][row * self.fours..][..fours]
    }
}

/// `c[r][v] += Σ_k a[r][k] · b[k][v]` over `depth` values of each row of `a`; all beyond them are zeros. The sum is exact
/// until it is scaled.
pub(super) struct Integers<'a, L> {
    pub(super) a: &'a Rounded,
    pub(super) depth: usize,
    pub(super) b: L,
}

impl<L: Lines> Product for Integers<'_, L> {
    #[inline(always)]
    fn add_tile<S: Simd, const ROWS: usize, const WIDE: usize>(
        &self,
        simd: S,
        row: usize,
        vectors: usize,
        vector: usize,
        c: &mut [[f32; LANES]],
    ) {
        let mut dots = [[simd.splat_i32(0); WIDE]; ROWS];
        self.add_plane::<S, ROWS, WIDE, 0>(simd, row, vector, &mut dots);
        for r in 0..ROWS {
            for v in 0..WIDE {
                // What coarse codes have given counts 255 times.
                dots[r][v] = simd.sub_i32(simd.shift_left::<8>(dots[r][v]), dots[r][v]);
            }
        }
        self.add_plane::<S, ROWS, WIDE, 1>(simd, row, vector, &mut dots);
        for r in 0..ROWS {
            let scale = simd.splat(self.a.scales[row + r]);
            for v in 0..WIDE {
                let c = &mut c[r * vectors + vector + v];
                simd.store(simd.fma(simd.to_f32(dots[r][v]), scale, simd.load(c)), c);
            }
        }
    }
}

impl<L: Lines> Integers<'_, L> {
    /// Adds the products of one plane's codes.
    #[inline(always)]
    fn add_plane<S: Simd, const ROWS: usize, const WIDE: usize, const PLANE: usize>(
        &self,
        simd: S,
        row: usize,
        vector: usize,
        dots: &mut [[S::I; WIDE]; ROWS],
    ) {
        let Integers { a, depth, b } = self;
        let fours = depth.div_ceil(4);
        let mut rows = [a.row(PLANE, row, fours); ROWS];
        for r in 0..ROWS {
            rows[r] = a.row(PLANE, row + r, fours);
            let start = simd.start_biased(simd.splat_i32(a.negated_sums[PLANE][row + r]));
            for v in 0..WIDE {
                dots[r][v] = simd.add_i32(dots[r][v], start);
            }
        }
        for four in 0..fours {
            let lines = b.lines::<WIDE>(four, vector);
            let mut bytes = [simd.load_bytes(L::Cell::bytes(lines[0])); WIDE];
            for v in 1..WIDE {
                bytes[v] = simd.load_bytes(L::Cell::bytes(lines[v]));
            }
            b.prefetch_next::<S, WIDE>(simd, four, vector, (PLANE, 2));
            for r in 0..ROWS {
                let values = rows[r][four];
                for v in 0..WIDE {
                    let products = simd.multiply_biased(simd.open(dots[r][v]), bytes[v], values);
                    dots[r][v] = simd.close(dots[r][v], products);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, Kernels};
    use crate::testing::Random;

    struct Round<'a>(&'a [f32], &'a mut Rounded);

    impl Kernel for Round<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            self.1.set(simd, 1, self.0);
        }
    }

    fn rounded(kernels: Kernels, values: &[f32]) -> Rounded {
        let mut rounded = Rounded::default();
        rounded.reset(2, values.len());
        kernels.call(Round(values, &mut rounded));
        rounded
    }

    #[test]
    fn two_bytes_miss_a_value_by_two_to_the_minus_15_in_every_set() {
        let mut random = Random::new(12);
        for values in [random.values(64, 5.0), random.values(6, 1e-3), vec![0.0; 24]] {
            let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            for kernels in Kernels::available() {
                let found = rounded(kernels, &values);
                let [coarse, fine] = [0, 1].map(|plane| found.row(plane, 1, found.fours).as_flattened());
                assert!(coarse.iter().chain(fine).all(|code| *code != -128), "{}", kernels.name());
                for (i, &value) in values.iter().enumerate() {
                    let code = 255.0 * f64::from(coarse[i]) + f64::from(fine[i]);
                    let missed = (code * f64::from(found.scales[1]) - f64::from(value)).abs();
                    assert!(missed <= f64::from(largest) / 32768.0, "{}: {value} missed by {missed}", kernels.name());
                }
                for (plane, codes) in [coarse, fine].iter().enumerate() {
                    let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
                    assert_eq!(found.negated_sums[plane][1], -sum, "{}", kernels.name());
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_makes_a_row_none_in_every_set() {
        for strange in [f32::NAN, f32::INFINITY] {
            let mut values = [1.0; 24];
            values[5] = strange;
            for kernels in Kernels::available() {
                assert!(!rounded(kernels, &values).scales[1].is_finite(), "{} {strange}", kernels.name());
            }
        }
    }
}
