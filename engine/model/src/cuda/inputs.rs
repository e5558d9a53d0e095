//! Products with weight matrices: chooses the kernel, and brings the input into the form that it reads.

use std::sync::Arc;

use half::bf16;
use windlass_kernels::cuda::ops::{
    self, ExpertInput, Gate, LIBRARY_TOKENS, Mixture, Output, ProductLibrary, Quantized, QuantizedMut, Rounded, Routes,
};
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{Device, DeviceFacts, DriverError, Matrix, Memory, Products, Stream, View, ViewMut};

use super::experts::mixture;
use super::input::Input;
use super::weights::{CudaWeights, GatedWeights};
use crate::config::DecoderConfig;

/// Buffers for one input at a time.
#[derive(Debug)]
pub(super) struct InputRoom {
    /// For matrices with columns in another order (`desc_act`), and for experts with many tokens, whose inputs are
    /// copied side by side, or whose gates and ups are stored here.
    sorted: Memory<bf16>,
    /// Codes of rounded inputs: of 8 bits for matrices of 8 bits (W8A8), and in blocks of 32 for integers of GGUF
    /// files.
    codes: Memory<u8>,
    /// Scales of the codes: one for each token, or for each block of 32 with the sum of the block.
    scales: Memory<f32>,
    choices: ProductChoices,
    /// The product library with its workspace; `None` if the machine has none or no matrix can use it.
    library: Option<ProductLibrary>,
}

/// Options of products.
#[derive(Clone, Debug, Default)]
pub(super) struct ProductChoices {
    /// Whether inputs are rounded to 8 bits, with a scale for each token, for matrices of 8 bits (W8A8).
    pub rounds_activations: bool,
    /// Whether inputs are rounded to int8 in blocks of 32 for the integers of GGUF files.
    pub int8_activations: bool,
    /// Whether sums may be computed in another order if there are many tokens. Then the products of a token depend on
    /// how many tokens are in the step.
    pub allows_reordering: bool,
    /// The machine's library for products of many tokens with bf16 matrices, if it may be used.
    pub library: Option<Arc<dyn Products>>,
}

impl InputRoom {
    /// Allocates buffers for steps of up to `tokens` tokens.
    pub fn new(
        device: &Device,
        config: &DecoderConfig,
        (weights, choices): (&CudaWeights, &ProductChoices),
        tokens: usize,
    ) -> Result<InputRoom, DriverError> {
        let Lengths { sorted, codes, scales } = Lengths::of(device.facts(), config, (weights, choices), tokens);
        let library =
            choices.library_for(weights).map(|products| ProductLibrary::new(device, products, LIBRARY_TOKENS));
        Ok(InputRoom {
            library: library.transpose()?,
            sorted: device.allocate(sorted)?,
            codes: device.allocate(codes)?,
            scales: device.allocate(scales)?,
            choices: choices.clone(),
        })
    }

    /// Bytes of the buffers.
    pub fn bytes(
        facts: &DeviceFacts,
        config: &DecoderConfig,
        (weights, choices): (&CudaWeights, &ProductChoices),
        tokens: usize,
    ) -> u64 {
        let Lengths { sorted, codes, scales } = Lengths::of(facts, config, (weights, choices), tokens);
        let library = choices.library_for(weights).map_or(0, |products| products.workspace_bytes());
        (2 * sorted + codes + 4 * scales + library) as u64
    }

    /// `out[t] = matrix · input[t]`, with a matrix of a layer.
    ///
    /// # Panics
    /// If the output is gated and the kernel does not gate ([`InputRoom::gates`]).
    pub fn multiply(
        &mut self,
        stream: &Stream,
        matrix: &Matrix,
        input: Input<'_>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        match self.kernel(stream.device().facts(), matrix, input.len() / matrix.inputs()) {
            ProductKernel::ActOrder => {
                ops::linear_ordered(stream, matrix, input.values(stream)?, &mut self.sorted, out)
            }
            ProductKernel::RoundedByToken(code) => self.multiply_rounded_by_token(stream, code, matrix, input, out),
            ProductKernel::Int8Blocks => self.multiply_int8_blocks(stream, matrix, input.values(stream)?, out),
            ProductKernel::Reordered => self.multiply_reordered(stream, matrix, input.values(stream)?, out),
            ProductKernel::InOrder => ops::linear(stream, matrix, input.values(stream)?, out),
        }
    }

    /// Whether the product of so many tokens with a matrix of gates and ups, in groups of eight rows, applies the gates
    /// too.
    pub fn gates(&self, facts: &DeviceFacts, matrix: &Matrix, tokens: usize) -> bool {
        matches!(
            self.kernel(facts, matrix, tokens),
            ProductKernel::ActOrder | ProductKernel::Int8Blocks | ProductKernel::InOrder
        )
    }

    fn kernel(&self, facts: &DeviceFacts, matrix: &Matrix, tokens: usize) -> ProductKernel {
        match (matrix.order(), matrix.code()) {
            (Some(_), _) => ProductKernel::ActOrder,
            (None, Some(code)) if self.choices.rounds_activations && ops::multiplies(facts, code) => {
                ProductKernel::RoundedByToken(code)
            }
            (None, _) if self.choices.int8_activations && ops::multiplies_rounded(matrix) => ProductKernel::Int8Blocks,
            (None, _) if self.choices.allows_reordering && ops::multiplies_widely(facts, matrix, tokens) => {
                ProductKernel::Reordered
            }
            (None, _) => ProductKernel::InOrder,
        }
    }

    /// Multiplies by the machine's library if it supports the product, else by our kernels.
    fn multiply_reordered(
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
        match ops::is_faster_widely(stream.device().facts(), matrix, input.len() / matrix.cols()) {
            true => ops::linear_wide(stream, matrix, input, out),
            false => ops::linear(stream, matrix, input, out),
        }
    }

    /// `out[t] = matrix · input[t]`, with the matrix that makes logits. Its inputs are not rounded by token, and its
    /// sums keep their order.
    pub fn multiply_head(
        &mut self,
        stream: &Stream,
        matrix: &Matrix,
        input: View<'_, bf16>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        match self.choices.int8_activations && ops::multiplies_rounded(matrix) {
            true => self.multiply_int8_blocks(stream, matrix, input, out),
            false => ops::linear(stream, matrix, input, out),
        }
    }

    fn multiply_int8_blocks(
        &mut self,
        stream: &Stream,
        matrix: &Matrix,
        input: View<'_, bf16>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        let cols = matrix.cols();
        let [codes, scales] = Rounded::lengths(input.len() / cols, cols);
        let (codes, scales) = (0..codes, 0..scales);
        let room = (self.codes.slice_mut(codes.clone()), self.scales.slice_mut(scales.clone()));
        ops::round_inputs(stream, cols, input, room.0, room.1)?;
        let rounded = Rounded { codes: self.codes.slice(codes), scales: self.scales.slice(scales) };
        ops::linear_rounded(stream, matrix, input, &rounded, out)
    }

    /// The options of products.
    pub fn choices(&self) -> &ProductChoices {
        &self.choices
    }

    /// The outputs of experts whose inputs are rounded ([`ExpertKernel::RoundedByToken`]): a row for each token and
    /// expert.
    pub fn multiply_experts_rounded(
        &mut self,
        stream: &Stream,
        code: EightBits,
        (experts, gate): (&GatedWeights, Gate),
        routes: &Routes,
        input: View<'_, bf16>,
        given: ViewMut<'_, bf16>,
    ) -> Result<(), DriverError> {
        let GatedWeights { gate_up, down, layout } = experts;
        let (hidden, wide) = (gate_up.cols(), down.cols());
        let rows = given.len() / hidden;
        let both = 0..2 * rows * wide;
        let quantize = |out: QuantizedMut<'_>| ops::quantize_routed(stream, routes, input, out);
        let quantized = quantized(&mut self.codes, &mut self.scales, code, [rows, hidden], quantize)?;
        let out = Output::Bf16(self.sorted.slice_mut(both.clone()));
        ops::linear_experts_w8a8(stream, gate_up, routes, &quantized, out)?;
        let gates = self.sorted.slice(both);
        let quantize = |out: QuantizedMut<'_>| ops::gate_mul_quantized(stream, gate, *layout, gates, out);
        let quantized = self::quantized(&mut self.codes, &mut self.scales, code, [rows, wide], quantize)?;
        ops::linear_experts_w8a8(stream, down, routes, &quantized, Output::Bf16(given))
    }

    /// `out[row] = matrix of the row's expert · input`, with the tiles that the routes were made for.
    pub fn multiply_experts(
        &mut self,
        stream: &Stream,
        matrix: &Matrix,
        routes: &Routes,
        input: ExpertInput<'_>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        match routes.are_wide() {
            true => ops::linear_experts_wide(stream, matrix, routes, input, &mut self.sorted, out),
            false => ops::linear_experts(stream, matrix, routes, input, out),
        }
    }

    fn multiply_rounded_by_token(
        &mut self,
        stream: &Stream,
        code: EightBits,
        matrix: &Matrix,
        input: Input<'_>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        let (tokens, cols) = (input.len() / matrix.cols(), matrix.cols());
        let quantize = |out: QuantizedMut<'_>| input.quantize(stream, out);
        let input = quantized(&mut self.codes, &mut self.scales, code, [tokens, cols], quantize)?;
        let multiply = if self.choices.allows_reordering { ops::linear_w8a8_wide } else { ops::linear_w8a8 };
        multiply(stream, matrix, &input, out)
    }
}

/// Rows of values in 8 bits, as `quantize` writes them to the buffers.
fn quantized<'a>(
    codes: &'a mut Memory<u8>,
    scales: &'a mut Memory<f32>,
    code: EightBits,
    [rows, cols]: [usize; 2],
    quantize: impl FnOnce(QuantizedMut<'_>) -> Result<(), DriverError>,
) -> Result<Quantized<'a>, DriverError> {
    let (values, rows) = (0..rows * cols, 0..rows);
    quantize(QuantizedMut { code, codes: codes.slice_mut(values.clone()), scales: scales.slice_mut(rows.clone()) })?;
    Ok(Quantized { codes: codes.slice(values), scales: scales.slice(rows) })
}

impl ProductChoices {
    /// The library for bf16 matrices, if there are such matrices and the machine has one.
    fn library_for(&self, weights: &CudaWeights) -> Option<&Arc<dyn Products>> {
        self.library.as_ref().filter(|_| weights.layer_matrices().any(Matrix::is_bf16))
    }

    /// The kernel for the experts of so many tokens.
    pub fn expert_kernel(
        &self,
        facts: &DeviceFacts,
        experts: &GatedWeights,
        mixture: &Mixture,
        tokens: usize,
    ) -> ExpertKernel {
        let both = |holds: &dyn Fn(&Matrix) -> bool| holds(&experts.gate_up) && holds(&experts.down);
        let rounded = |matrix: &Matrix| ops::multiplies_experts_rounded(facts, matrix, mixture, tokens);
        match experts.gate_up.code().filter(|_| self.rounds_activations && self.allows_reordering) {
            Some(code) if experts.down.code() == Some(code) && both(&rounded) => ExpertKernel::RoundedByToken(code),
            _ if !self.allows_reordering => ExpertKernel::InOrder,
            _ => match both(&|matrix| ops::multiplies_experts_widely(facts, matrix, mixture, tokens)) {
                true => ExpertKernel::Reordered,
                false => ExpertKernel::InOrder,
            },
        }
    }
}

/// The kernel of a product with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertKernel {
    /// Sums in a fixed order.
    InOrder,
    /// Sums in another order, for many tokens.
    Reordered,
    /// As `Reordered`, with the input of each token rounded to the code of the matrix.
    RoundedByToken(EightBits),
}

/// The kernel of a product with a matrix.
enum ProductKernel {
    /// The input is put in the order of the matrix's columns (`desc_act`).
    ActOrder,
    /// The input of each token is rounded to the code of the matrix.
    RoundedByToken(EightBits),
    /// The input is rounded to int8 in blocks of 32 with a scale each.
    Int8Blocks,
    /// Sums in another order, for many tokens.
    Reordered,
    /// Sums in a fixed order.
    InOrder,
}

/// Lengths of the buffers, in values.
#[derive(Default)]
struct Lengths {
    sorted: usize,
    codes: usize,
    scales: usize,
}

impl Lengths {
    fn max(self, other: Lengths) -> Lengths {
        Lengths {
            sorted: self.sorted.max(other.sorted),
            codes: self.codes.max(other.codes),
            scales: self.scales.max(other.scales),
        }
    }

    fn of(
        facts: &DeviceFacts,
        config: &DecoderConfig,
        (weights, choices): (&CudaWeights, &ProductChoices),
        tokens: usize,
    ) -> Lengths {
        let widest = |is_meant: &dyn Fn(&Matrix) -> bool| {
            weights.layer_matrices().filter(|matrix| is_meant(matrix)).map(Matrix::cols).max().unwrap_or(0)
        };
        let by_expert = by_expert(facts, config, (weights, choices), tokens);
        let sorted = (tokens * widest(&|matrix| matrix.order().is_some())).max(by_expert.sorted);
        let by_token = widest(&|matrix| choices.rounds_activations && matrix.code().is_some());
        let head = weights.output().map(|(_, output)| output);
        let int8_matrices = weights.layer_matrices().chain(head).filter(|matrix| ops::multiplies_rounded(matrix));
        let int8_columns = int8_matrices.filter(|_| choices.int8_activations).map(Matrix::cols).max();
        let [codes, scales] = int8_columns.map_or([0; 2], |cols| Rounded::lengths(tokens, cols));
        let by_token = [tokens * by_token, if by_token > 0 { tokens } else { 0 }];
        Lengths {
            sorted,
            codes: codes.max(by_token[0]).max(by_expert.codes),
            scales: scales.max(by_token[1]).max(by_expert.scales),
        }
    }
}

/// The lengths that experts need in a step of so many tokens. With rounded inputs, gates and ups are stored where other
/// kernels store inputs.
fn by_expert(
    facts: &DeviceFacts,
    config: &DecoderConfig,
    (weights, choices): (&CudaWeights, &ProductChoices),
    tokens: usize,
) -> Lengths {
    let Some(mixture) = config.experts.as_ref().map(mixture) else { return Lengths::default() };
    let rows = tokens * mixture.used;
    let of = |experts: &GatedWeights| {
        let [hidden, wide] = [experts.gate_up.cols(), experts.down.cols()];
        match choices.expert_kernel(facts, experts, &mixture, tokens) {
            ExpertKernel::InOrder => Lengths::default(),
            ExpertKernel::Reordered => Lengths { sorted: rows * hidden, ..Lengths::default() },
            ExpertKernel::RoundedByToken(_) => {
                Lengths { sorted: 2 * rows * wide, codes: rows * hidden.max(wide), scales: rows }
            }
        }
    };
    weights.experts().map(|experts| of(&experts.gated)).fold(Lengths::default(), Lengths::max)
}
