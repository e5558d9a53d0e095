//! Elementwise ops between the matrix products of a layer.

use super::norm::Add;
use crate::Pool;
use crate::simd::{Kernel, LANES, Simd};

/// Values that one worker takes at a time.
const CHUNK: usize = 8192;

/// `out = silu(gate) · up`, elementwise, with `silu(x) = x / (1 + e⁻ˣ)`.
///
/// # Panics
/// When the lengths differ.
pub fn silu_mul(pool: &Pool, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    assert_eq!(gate.len(), out.len(), "gate and out");
    let kernels = pool.kernels();
    let count = gate.len().div_ceil(CHUNK);
    let parts = gate.chunks(CHUNK).zip(up.chunks(CHUNK)).zip(out.chunks_mut(CHUNK));
    pool.for_each_of(count, parts, |((gate, up), out)| kernels.call(SiluMul { gate, up, out }));
}

/// `target += addend`, elementwise.
///
/// # Panics
/// When the lengths differ.
pub fn add(pool: &Pool, target: &mut [f32], addend: &[f32]) {
    assert_eq!(target.len(), addend.len(), "target and addend");
    let kernels = pool.kernels();
    let count = target.len().div_ceil(CHUNK);
    let parts = target.chunks_mut(CHUNK).zip(addend.chunks(CHUNK));
    pool.for_each_of(count, parts, |(target, addend)| kernels.call(Add { target, addend }));
}

struct SiluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let lanes = self.gate.chunks(LANES).zip(self.up.chunks(LANES)).zip(self.out.chunks_mut(LANES));
        for ((gate, up), out) in lanes {
            let gate = simd.load_partial(gate);
            let denominator = simd.add(simd.splat(1.0), simd.exp(simd.sub(simd.splat(0.0), gate)));
            let silu = simd.div(gate, denominator);
            simd.store_partial(simd.mul(silu, simd.load_partial(up)), out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernels;
    use crate::testing::{Random, bits, relative_error};

    #[test]
    fn silu_matches_the_reference_in_every_set() {
        let mut random = Random::new(1);
        for len in [1, 15, 33, 20_001] {
            let mut gate = random.values(len, 20.0);
            gate[0] = -200.0;
            let up = random.values(len, 2.0);
            let exact: Vec<f64> = gate
                .iter()
                .zip(&up)
                .map(|(&g, &u)| f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u))
                .collect();
            let mut first: Option<Vec<u32>> = None;
            for kernels in Kernels::available() {
                let pool = Pool::with_kernels(2, kernels).unwrap();
                let mut out = vec![f32::NAN; len];
                silu_mul(&pool, &gate, &up, &mut out);
                for (out, exact) in out.iter().zip(&exact) {
                    assert!((f64::from(*out) - exact).abs() <= 1e-6 * exact.abs() + 1e-30, "{out} for {exact}");
                }
                assert!(len == 1 || relative_error(&out, &exact) < 3e-7);
                assert_eq!(*first.get_or_insert(bits(&out)), bits(&out), "{}", kernels.name());
            }
        }
    }

    #[test]
    fn add_adds() {
        let pool = Pool::new(2).unwrap();
        let mut target: Vec<f32> = (0..10_000).map(|i| i as f32).collect();
        add(&pool, &mut target, &vec![0.5; 10_000]);
        assert!(target.iter().enumerate().all(|(i, &value)| value == i as f32 + 0.5));
    }
}
