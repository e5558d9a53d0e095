//! Inputs of products as their matrices want them.

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

/// Room for them: one input at a time.
#[derive(Debug)]
pub(super) struct InputRoom {
    /// For matrices whose columns have an order of their own (`desc_act`), and for experts of many tokens, whose inputs lie side by
    /// side, or the gates and ups that they give.
    sorted: Memory<bf16>,
    /// For matrices of 8 bits, where inputs are rounded to as many (W8A8), and for those of a GGUF file, where these are.
    codes: Memory<u8>,
    /// Of each token's codes, or of each 32 of them with their sums.
    scales: Memory<f32>,
    choices: ProductChoices,
    /// The library with its room; none where there is none, or nothing for it to do.
    library: Option<ProductLibrary>,
}

/// How inputs are multiplied, where that is a choice.
#[derive(Clone, Debug, Default)]
pub(super) struct ProductChoices {
    /// Whether they are rounded to 8 bits for matrices that have as many.
    pub rounds_activations: bool,
    /// Whether they are for a GGUF file's integers, in blocks of 32.
    pub int8_activations: bool,
    /// Whether sums may have another order where there are many tokens: a token's products then depend on what else is
    /// multiplied.
    pub allows_reordering: bool,
    /// What the machine has for many tokens with matrices in bf16, where they may.
    pub library: Option<Arc<dyn Products>>,
}

impl InputRoom {
    /// For steps of up to `tokens` tokens.
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

    /// Bytes of it.
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

    /// `out[t] = matrix · input[t]` of a layer's matrix.
    ///
    /// # Panics
    /// When a product is to gate that does not ([`InputRoom::gates`]).
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

    /// Whether the product of so many tokens with a matrix of gates and ups by eights also gates them.
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

    /// By the machine's library, where it has one for this, or by our own kernels.
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

    /// The same of the matrix that makes logits, whose inputs are never rounded by token, nor widely multiplied.
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

    /// How its matrices are multiplied.
    pub fn choices(&self) -> &ProductChoices {
        &self.choices
    }

    /// What experts give whose inputs are rounded ([`ExpertKernel::RoundedByToken`]): a row for each token and expert.
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

    /// `out[place] = matrix of the place's expert · input`, as the routes' tiles were chosen.
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

/// So many rows of values in 8 bits, as `quantize` leaves them in the room.
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
    /// What multiplies many tokens with matrices in bf16, where there are such and that is there.
    fn library_for(&self, weights: &CudaWeights) -> Option<&Arc<dyn Products>> {
        self.library.as_ref().filter(|_| weights.layer_matrices().any(Matrix::is_bf16))
    }

    /// How the experts of so many tokens are multiplied.
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

/// How experts are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertKernel {
    /// With sums in the order that they always have.
    InOrder,
    /// With sums in another order.
    Reordered,
    /// So, too, and with what they multiply rounded to codes as they have them.
    RoundedByToken(EightBits),
}

/// How an input is multiplied.
enum ProductKernel {
    /// In the order of the matrix's columns.
    ActOrder,
    /// Rounded to codes as the matrix has them.
    RoundedByToken(EightBits),
    /// Rounded to bytes, with a scale for each 32.
    Int8Blocks,
    /// With sums in another order.
    Reordered,
    InOrder,
}

/// Values of the buffers.
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

/// Those of the inputs of experts by warpgroups, where a step of so many tokens has such: of rounded ones the gates and ups lie where
/// others' inputs do.
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
