//! The input of a product, which may not be computed yet.

use half::bf16;
use windlass_kernels::cuda::ops::{self, Gate, GateLayout, QuantizedMut};
use windlass_kernels::cuda::{DriverError, Memory, Stream, View, ViewMut};

/// The input of a product, a row for each token. If it is not computed yet, it is computed for the product: in bf16 in
/// the buffer beside it, or directly as the codes of a product of 8 bits.
#[derive(Debug)]
pub(super) enum Input<'a> {
    /// The values.
    Values(View<'a, bf16>),
    /// A norm, and a buffer for it.
    Norm(Norm<'a>, &'a mut Memory<bf16>),
    /// A gated activation, and a buffer for it.
    Gates(Gates<'a>, &'a mut Memory<bf16>),
}

/// A norm of the residual stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm<'a> {
    pub residual: View<'a, f32>,
    pub weight: View<'a, f32>,
    pub epsilon: f32,
}

/// Gates and ups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gates<'a> {
    pub gate: Gate,
    pub layout: GateLayout,
    pub gate_up: View<'a, bf16>,
    /// Number of gates of a token.
    pub width: usize,
}

impl<'a> Input<'a> {
    /// Number of values of all tokens.
    pub fn len(&self) -> usize {
        match self {
            Input::Values(values) => values.len(),
            Input::Norm(norm, _) => norm.residual.len(),
            Input::Gates(gates, _) => gates.gate_up.len() / 2,
        }
    }

    /// The values in bf16, computed if necessary.
    pub fn values(self, stream: &Stream) -> Result<View<'a, bf16>, DriverError> {
        let place = 0..self.len();
        match self {
            Input::Values(values) => Ok(values),
            Input::Norm(norm, room) => {
                norm.compute(stream, room.slice_mut(place.clone()))?;
                Ok(room.slice(place))
            }
            Input::Gates(gates, room) => {
                gates.compute(stream, room.slice_mut(place.clone()))?;
                Ok(room.slice(place))
            }
        }
    }

    /// Rounds the input to 8 bits. The codes are the same whether or not the input was computed before.
    pub fn quantize(self, stream: &Stream, out: QuantizedMut<'_>) -> Result<(), DriverError> {
        match self {
            Input::Values(values) => ops::quantize_tokens(stream, values, out),
            Input::Norm(Norm { residual, weight, epsilon }, _) => {
                ops::rms_norm_quantized(stream, residual, weight, epsilon, out)
            }
            Input::Gates(Gates { gate, layout, gate_up, .. }, _) => {
                ops::gate_mul_quantized(stream, gate, layout, gate_up, out)
            }
        }
    }
}

impl Norm<'_> {
    pub fn compute(self, stream: &Stream, out: ViewMut<'_, bf16>) -> Result<(), DriverError> {
        ops::rms_norm(stream, self.residual, self.weight, self.epsilon, out)
    }
}

impl Gates<'_> {
    fn compute(self, stream: &Stream, out: ViewMut<'_, bf16>) -> Result<(), DriverError> {
        ops::gate_mul(stream, self.gate, self.layout, self.gate_up, self.width, out)
    }
}
