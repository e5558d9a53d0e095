//! Elementwise ops between the matrix products of a layer.

use crate::Pool;

/// `out = silu(gate) · up`, elementwise.
///
/// # Panics
/// When the lengths differ.
pub fn silu_mul(_pool: &Pool, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    assert_eq!(gate.len(), out.len(), "gate and out");
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + (-gate).exp()) * up;
    }
}

/// `target += addend`, elementwise.
///
/// # Panics
/// When the lengths differ.
pub fn add(_pool: &Pool, target: &mut [f32], addend: &[f32]) {
    assert_eq!(target.len(), addend.len(), "target and addend");
    for (target, addend) in target.iter_mut().zip(addend) {
        *target += addend;
    }
}
