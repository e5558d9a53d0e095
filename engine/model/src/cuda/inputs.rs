//! Inputs of products as their matrices want them.

use half::bf16;
use windlass_kernels::cuda::ops::{self, Output};
use windlass_kernels::cuda::{Device, DriverError, Matrix, Memory, Stream, View};

use super::weights::Weights;

/// Room for them: one input at a time.
#[derive(Debug)]
pub(super) struct InputRoom {
    /// For matrices whose columns have an order of their own (`desc_act`).
    sorted: Memory<bf16>,
}

impl InputRoom {
    /// For steps of up to `tokens` tokens.
    pub fn new(device: &Device, weights: &Weights, tokens: usize) -> Result<InputRoom, DriverError> {
        Ok(InputRoom { sorted: device.allocate(tokens * sorted_width(weights))? })
    }

    /// Bytes of it.
    pub fn bytes(weights: &Weights, tokens: usize) -> u64 {
        (size_of::<bf16>() * tokens * sorted_width(weights)) as u64
    }

    /// `out[t] = matrix · input[t]` of a layer's matrix.
    pub fn multiply(
        &mut self,
        stream: &Stream,
        matrix: &Matrix,
        input: View<'_, bf16>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        match matrix.order() {
            None => ops::linear(stream, matrix, input, out),
            Some(_) => ops::linear_ordered(stream, matrix, input, &mut self.sorted, out),
        }
    }
}

/// Columns of the widest matrix whose columns have an order of their own.
fn sorted_width(weights: &Weights) -> usize {
    weights.layer_matrices().filter(|matrix| matrix.order().is_some()).map(Matrix::cols).max().unwrap_or(0)
}
