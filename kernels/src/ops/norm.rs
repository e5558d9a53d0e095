//! Root-mean-square normalization (Zhang and Sennrich 2019).

use crate::Pool;

/// `out[t] = input[t] / sqrt(mean(input[t]²) + epsilon) · weight` for each token of `weight.len()` values.
///
/// # Panics
/// When the lengths are no whole tokens or differ.
pub fn rms_norm(_pool: &Pool, input: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    check(input.len(), weight.len(), out.len());
    for (input, out) in input.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        normalize(input, weight, epsilon, out);
    }
}

/// `residual += addend`, then [`rms_norm`] of the sum into `out`: one pass over each token.
///
/// # Panics
/// When the lengths are no whole tokens or differ.
pub fn add_rms_norm(pool: &Pool, residual: &mut [f32], addend: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    check(residual.len(), weight.len(), out.len());
    super::add(pool, residual, addend);
    rms_norm(pool, residual, weight, epsilon, out);
}

fn check(values: usize, cols: usize, out: usize) {
    assert!(cols > 0 && values.is_multiple_of(cols), "{values} values are no whole tokens of {cols}");
    assert_eq!(values, out, "input and out");
}

fn normalize(input: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let mean = input.iter().map(|x| x * x).sum::<f32>() / input.len() as f32;
    let factor = 1.0 / (mean + epsilon).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(input).zip(weight) {
        *out = x * factor * weight;
    }
}
