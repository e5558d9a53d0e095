//! Inputs of products as their matrices want them.

use half::bf16;
use windlass_kernels::cuda::ops::{self, LIBRARY_TOKENS, Output, ProductLibrary, Quantized};
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{Device, DriverError, Matrix, Memory, Stream, View};

use super::weights::Weights;

/// Room for them: one input at a time.
#[derive(Debug)]
pub(super) struct InputRoom {
    /// For matrices whose columns have an order of their own (`desc_act`).
    sorted: Memory<bf16>,
    /// For matrices of 8 bits, where inputs are rounded to as many (W8A8).
    codes: Memory<u8>,
    /// Of each token's codes.
    scales: Memory<f32>,
    rounds: bool,
    /// Whether sums may have another order where there are many tokens.
    widens: bool,
    /// What multiplies many tokens with matrices in bf16 then; none where the machine has none, or nothing for it to do.
    library: Option<ProductLibrary>,
}

impl InputRoom {
    /// For steps of up to `tokens` tokens.
    pub fn new(device: &Device, weights: &Weights, tokens: usize) -> Result<InputRoom, DriverError> {
        let Lengths { sorted, codes, scales } = Lengths::of(weights, tokens);
        let library = weights.library().map(|products| ProductLibrary::new(device, products, LIBRARY_TOKENS));
        Ok(InputRoom {
            library: library.transpose()?,
            sorted: device.allocate(sorted)?,
            codes: device.allocate(codes)?,
            scales: device.allocate(scales)?,
            rounds: weights.rounds_inputs,
            widens: !weights.batch_invariant,
        })
    }

    /// Bytes of it.
    pub fn bytes(weights: &Weights, tokens: usize) -> u64 {
        let Lengths { sorted, codes, scales } = Lengths::of(weights, tokens);
        let library = weights.library().map_or(0, |products| products.workspace_bytes());
        (2 * sorted + codes + 4 * scales + library) as u64
    }

    /// `out[t] = matrix · input[t]` of a layer's matrix.
    pub fn multiply(
        &mut self,
        stream: &Stream,
        matrix: &Matrix,
        input: View<'_, bf16>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        match (matrix.order(), matrix.code()) {
            (Some(_), _) => ops::linear_ordered(stream, matrix, input, &mut self.sorted, out),
            (None, Some(code)) if self.rounds && ops::multiplies(stream.device().facts(), code) => {
                self.multiply_rounded(stream, code, matrix, input, out)
            }
            (None, _) => self.multiply_plain(stream, matrix, input, out),
        }
    }

    fn multiply_plain(
        &mut self,
        stream: &Stream,
        matrix: &Matrix,
        input: View<'_, bf16>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        if let Some(library) = &mut self.library
            && library.multiplies(stream, matrix, input, &out)?
        {
            return library.linear(stream, matrix, input, out);
        }
        let (facts, tokens) = (stream.device().facts(), input.len() / matrix.cols());
        let wide = self.widens && ops::multiplies_widely(facts, matrix, tokens);
        let multiply = if wide { ops::linear_wide } else { ops::linear };
        multiply(stream, matrix, input, out)
    }

    fn multiply_rounded(
        &mut self,
        stream: &Stream,
        code: EightBits,
        matrix: &Matrix,
        input: View<'_, bf16>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        let (values, tokens) = (input.len(), input.len() / matrix.cols());
        let (codes, scales) = (self.codes.slice_mut(0..values), self.scales.slice_mut(0..tokens));
        ops::quantize_tokens(stream, code, input, codes, scales)?;
        let input = Quantized { codes: self.codes.slice(0..values), scales: self.scales.slice(0..tokens) };
        let multiply = if self.widens { ops::linear_w8a8_wide } else { ops::linear_w8a8 };
        multiply(stream, matrix, &input, out)
    }
}

/// Values of the buffers.
struct Lengths {
    sorted: usize,
    codes: usize,
    scales: usize,
}

impl Lengths {
    fn of(weights: &Weights, tokens: usize) -> Lengths {
        let widest = |is_meant: &dyn Fn(&Matrix) -> bool| {
            weights.layer_matrices().filter(|matrix| is_meant(matrix)).map(Matrix::cols).max().unwrap_or(0)
        };
        let rounded = widest(&|matrix| weights.rounds_inputs && matrix.code().is_some());
        let sorted = tokens * widest(&|matrix| matrix.order().is_some());
        Lengths { sorted, codes: tokens * rounded, scales: if rounded > 0 { tokens } else { 0 } }
    }
}
