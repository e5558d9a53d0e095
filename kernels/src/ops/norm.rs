//! Root-mean-square normalization (Zhang and Sennrich 2019).

use crate::Pool;
use crate::simd::{Kernel, LANES, Simd};

/// Tokens that one worker takes at a time.
const CHUNK_TOKENS: usize = 8;

/// `out[t] = input[t] / sqrt(mean(input[t]²) + epsilon) · weight` for each token of `weight.len()` values.
///
/// # Panics
/// When the lengths are no whole tokens or differ.
pub fn rms_norm(pool: &Pool, input: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    check(input.len(), weight.len(), out.len());
    let kernels = pool.kernels();
    let chunk = CHUNK_TOKENS * weight.len();
    let parts = input.chunks(chunk).zip(out.chunks_mut(chunk));
    pool.for_each_of(input.len().div_ceil(chunk), parts, |(input, out)| {
        kernels.call(RmsNorm { input, weight, epsilon, out });
    });
}

/// `residual += addend`, then [`rms_norm`] of the sum into `out`.
///
/// # Panics
/// When the lengths are no whole tokens or differ.
pub fn add_rms_norm(pool: &Pool, residual: &mut [f32], addend: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    check(residual.len(), weight.len(), out.len());
    assert_eq!(residual.len(), addend.len(), "residual and addend");
    let kernels = pool.kernels();
    let chunk = CHUNK_TOKENS * weight.len();
    let count = residual.len().div_ceil(chunk);
    let parts = residual.chunks_mut(chunk).zip(addend.chunks(chunk)).zip(out.chunks_mut(chunk));
    pool.for_each_of(count, parts, |((residual, addend), out)| {
        kernels.call(Add { target: residual, addend });
        kernels.call(RmsNorm { input: residual, weight, epsilon, out });
    });
}

fn check(values: usize, cols: usize, out: usize) {
    assert!(cols > 0 && values.is_multiple_of(cols), "{values} values are no whole tokens of {cols}");
    assert_eq!(values, out, "input and out");
}

/// `target += addend`.
pub(super) struct Add<'a> {
    pub(super) target: &'a mut [f32],
    pub(super) addend: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (target, addend) in self.target.chunks_mut(LANES).zip(self.addend.chunks(LANES)) {
            let sum = simd.add(simd.load_partial(target), simd.load_partial(addend));
            simd.store_partial(sum, target);
        }
    }
}

/// Whole tokens of `weight.len()` values.
struct RmsNorm<'a> {
    input: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let cols = self.weight.len();
        for (input, out) in self.input.chunks_exact(cols).zip(self.out.chunks_exact_mut(cols)) {
            let mut squares = simd.splat(0.0);
            for x in input.chunks(LANES) {
                let x = simd.load_partial(x);
                squares = simd.fma(x, x, squares);
            }
            let mean = simd.sum(squares) / cols as f32;
            let factor = simd.splat(1.0 / (mean + self.epsilon).sqrt());
            let lanes = input.chunks(LANES).zip(self.weight.chunks(LANES)).zip(out.chunks_mut(LANES));
            for ((x, weight), out) in lanes {
                let normed = simd.mul(simd.load_partial(x), factor);
                simd.store_partial(simd.mul(normed, simd.load_partial(weight)), out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernels;
    use crate::testing::{Random, bits, relative_error};

    fn reference(input: &[f32], weight: &[f32], epsilon: f32) -> Vec<f64> {
        let token = |x: &[f32]| {
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
            let root = (mean + f64::from(epsilon)).sqrt();
            x.iter().zip(weight).map(|(&x, &w)| f64::from(x) / root * f64::from(w)).collect::<Vec<_>>()
        };
        input.chunks(weight.len()).flat_map(token).collect()
    }

    #[test]
    fn matches_the_reference_whatever_set_and_batch() {
        let mut random = Random::new(1);
        for cols in [1, 16, 45, 576] {
            let (weight, tokens) = (random.values(cols, 2.0), 19);
            let (input, addend) = (random.values(cols * tokens, 3.0), random.values(cols * tokens, 3.0));
            let sums: Vec<f32> = input.iter().zip(&addend).map(|(a, b)| a + b).collect();
            let mut first: Option<Vec<u32>> = None;
            for kernels in Kernels::available() {
                for threads in [1, 3] {
                    let pool = Pool::with_kernels(threads, kernels).unwrap();
                    let (mut residual, mut out, mut plain) = (input.clone(), vec![f32::NAN; input.len()], sums.clone());
                    add_rms_norm(&pool, &mut residual, &addend, &weight, 1e-5, &mut out);
                    assert_eq!(bits(&residual), bits(&sums));
                    assert!(relative_error(&out, &reference(&sums, &weight, 1e-5)) < 1e-6);
                    for (sums, plain) in sums.chunks(cols).zip(plain.chunks_mut(cols)) {
                        rms_norm(&pool, sums, &weight, 1e-5, plain);
                    }
                    assert_eq!(bits(&out), bits(&plain), "{} one by one", kernels.name());
                    assert_eq!(*first.get_or_insert(bits(&out)), bits(&out), "{}", kernels.name());
                }
            }
        }
    }
}
