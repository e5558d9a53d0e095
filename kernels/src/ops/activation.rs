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

/// `out = gelu(gate) · up`, elementwise, with `gelu` by its hyperbolic tangent (Hendrycks and Gimpel 2016).
///
/// # Panics
/// When the lengths differ.
pub fn gelu_mul(pool: &Pool, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    assert_eq!(gate.len(), out.len(), "gate and out");
    let kernels = pool.kernels();
    let count = gate.len().div_ceil(CHUNK);
    let parts = gate.chunks(CHUNK).zip(up.chunks(CHUNK)).zip(out.chunks_mut(CHUNK));
    pool.for_each_of(count, parts, |((gate, up), out)| kernels.call(GeluMul { gate, up, out }));
}

/// `values = cap · tanh(values / cap)`, elementwise: no value leaves `-cap..cap`.
///
/// # Panics
/// When `cap` is not positive.
pub fn soft_cap(pool: &Pool, cap: f32, values: &mut [f32]) {
    assert!(cap > 0.0, "a cap of {cap}");
    let kernels = pool.kernels();
    let count = values.len().div_ceil(CHUNK);
    pool.for_each_of(count, values.chunks_mut(CHUNK), |values| kernels.call(SoftCap { cap, values }));
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

struct GeluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for GeluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let lanes = self.gate.chunks(LANES).zip(self.up.chunks(LANES)).zip(self.out.chunks_mut(LANES));
        for ((gate, up), out) in lanes {
            let x = simd.load_partial(gate);
            // (1 + tanh z) / 2 is 1 / (1 + e^-2z), with z = √(2/π) · (x + 0.044715 x³).
            let cubic = simd.fma(simd.mul(x, x), simd.splat(0.044_715), simd.splat(1.0));
            let negated = simd.mul(simd.mul(x, cubic), simd.splat(-1.595_769));
            let gelu = simd.div(x, simd.add(simd.splat(1.0), simd.exp(negated)));
            simd.store_partial(simd.mul(gelu, simd.load_partial(up)), out);
        }
    }
}

struct SoftCap<'a> {
    cap: f32,
    values: &'a mut [f32],
}

impl Kernel for SoftCap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for values in self.values.chunks_mut(LANES) {
            simd.store_partial(capped(simd, simd.load_partial(values), self.cap), values);
        }
    }
}

/// `cap · tanh(value / cap)`, off by at most a few millionths of the cap.
#[inline(always)]
pub(super) fn capped<S: Simd>(simd: S, value: S::F, cap: f32) -> S::F {
    // tanh x is 1 - 2 / (e^2x + 1).
    let power = simd.exp(simd.mul(value, simd.splat(2.0 / cap)));
    let rest = simd.div(simd.splat(-2.0 * cap), simd.add(power, simd.splat(1.0)));
    simd.add(rest, simd.splat(cap))
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
    fn gelu_and_caps_match_the_reference_in_every_set() {
        let mut random = Random::new(2);
        let mut gate = random.values(10_001, 8.0);
        gate[..2].copy_from_slice(&[-150.0, 150.0]);
        let up = random.values(gate.len(), 2.0);
        let tanh_gelu =
            |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
        let mut first: Option<[Vec<u32>; 2]> = None;
        for kernels in Kernels::available() {
            let pool = Pool::with_kernels(2, kernels).unwrap();
            let (mut out, mut bent) = (vec![f32::NAN; gate.len()], gate.clone());
            gelu_mul(&pool, &gate, &up, &mut out);
            soft_cap(&pool, 5.0, &mut bent);
            for (i, &x) in gate.iter().enumerate() {
                let exact = tanh_gelu(x.into()) * f64::from(up[i]);
                assert!((f64::from(out[i]) - exact).abs() <= 2e-6 * exact.abs() + 1e-6, "{} for {exact}", out[i]);
                let exact = 5.0 * (f64::from(x) / 5.0).tanh();
                assert!((f64::from(bent[i]) - exact).abs() <= 3e-6, "{} for {exact}", bent[i]);
            }
            let found = [bits(&out), bits(&bent)];
            assert_eq!(*first.get_or_insert(found.clone()), found, "{}", kernels.name());
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
