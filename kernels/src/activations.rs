//! Token activations in the forms that matrix products read.

use half::bf16;

use crate::simd::{Kernel, LANES, Simd, nearest_bf16, widened};
use crate::weights::cell::BLOCK;
use crate::weights::float::without_subnormals;
use crate::{PackedMatrix, Pool, WeightType};

/// Tokens that one worker converts at a time.
const CHUNK_TOKENS: usize = 8;

/// Blocks of smaller values count as zeros: 127 over less than this is not finite.
const NEGLIGIBLE: f32 = 1e-36;

/// How finely activations are rounded before they multiply quantized weights, or weights in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationType {
    /// To 8 bits in blocks of 32: the integer units' own width. To bf16, whose significands have 8 bits, for bf16.
    #[default]
    Int8,
    /// To 8 bits, and what that leaves over to 8 bits again: an error below 2⁻¹⁵ of a block's largest value, for twice
    /// the products. To bf16 and again to bf16: an error below 2⁻¹⁶ of each value.
    Int16,
}

impl ActivationType {
    /// Passes over the weights, one for each byte of a value.
    pub(crate) fn planes(self) -> usize {
        match self {
            ActivationType::Int8 => 1,
            ActivationType::Int16 => 2,
        }
    }
}

/// A reusable buffer of activations `[tokens, cols]`, converted once for all matrices that multiply them.
///
/// Quantized weights multiply signed bytes with one f32 scale for each 32 values, the finest grouping that any of the
/// formats has: one form serves them all, and it loses less than the 256-value groups that K-quants could do with.
/// Weights in bf16 multiply values in bf16, other float weights the values themselves.
#[derive(Debug, Default)]
pub struct Activations {
    kind: ActivationType,
    tokens: usize,
    cols: usize,
    /// `[tokens, planes, cols / 32]`, or empty.
    blocks: Vec<Block>,
    /// `[tokens, cols]`, or empty.
    values: Vec<f32>,
    /// `[tokens, planes, cols / 2]`, the last filled up with a zero, or empty.
    pairs: Vec<[bf16; 2]>,
    /// The input in the order of the matrices' columns, where they have one.
    sorted: Vec<f32>,
}

/// 32 values as bytes: value = code · scale.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C, align(16))]
pub(crate) struct Block {
    /// In fours, as the dot product takes them; none is -128.
    pub(crate) codes: [[i8; 4]; BLOCK / 4],
    /// The largest magnitude over 127.
    pub(crate) scale: f32,
    /// `scale · sum`.
    pub(crate) scaled_sum: f32,
    /// `-Σ codes`, for products with weight codes that have an offset.
    pub(crate) negated_sum: i32,
    /// `-Σ` of codes 16 to 31.
    pub(crate) negated_high_sum: i32,
}

impl Activations {
    /// An empty buffer; it grows to its largest load.
    pub fn new(kind: ActivationType) -> Self {
        Activations { kind, ..Self::default() }
    }

    /// Takes in `input`, `[tokens, cols]` row-major, in the forms that `matrices` need.
    ///
    /// # Panics
    /// When `matrices` is empty or they differ in `cols` or order, or when `input` is not whole tokens.
    pub fn load(&mut self, pool: &Pool, input: &[f32], matrices: &[&PackedMatrix]) {
        let cols = matrices[0].cols();
        assert!(matrices.iter().all(|matrix| matrix.cols() == cols), "matrices that share activations share cols");
        assert!(input.len().is_multiple_of(cols), "{} values are no whole tokens of {cols}", input.len());
        let order = matrices[0].order();
        assert!(
            matrices.iter().all(|matrix| matrix.order() == order),
            "matrices that share activations share an order"
        );
        self.tokens = input.len() / cols;
        self.cols = cols;
        let mut sorted = std::mem::take(&mut self.sorted);
        sorted.clear();
        if let Some(order) = order {
            sorted.extend(input.chunks_exact(cols).flat_map(|token| order.iter().map(|&col| token[col as usize])));
        }
        self.convert(pool, if order.is_some() { &sorted } else { input }, matrices);
        self.sorted = sorted;
    }

    fn convert(&mut self, pool: &Pool, input: &[f32], matrices: &[&PackedMatrix]) {
        let cols = self.cols;
        let any = |form: Form| matrices.iter().any(|matrix| Form::of(matrix.weight_type()) == form);
        self.values.clear();
        self.pairs.clear();
        self.blocks.clear();
        if any(Form::Values) {
            self.values.extend_from_slice(input);
        }
        let (planes, parts) = (self.kind.planes(), self.tokens.div_ceil(CHUNK_TOKENS));
        let (kernels, tokens) = (pool.kernels(), input.chunks(CHUNK_TOKENS * cols));
        if any(Form::Pairs) {
            let per_token = planes * cols.div_ceil(2);
            self.pairs.resize(self.tokens * per_token, [bf16::ZERO; 2]);
            let pairs = self.pairs.chunks_mut(CHUNK_TOKENS * per_token);
            pool.for_each_of(parts, tokens.clone().zip(pairs), |(values, pairs)| {
                kernels.call(Round { values, pairs, planes, cols });
            });
        }
        if any(Form::Blocks) {
            let per_token = cols / BLOCK;
            self.blocks.resize(self.tokens * planes * per_token, Block::default());
            let blocks = self.blocks.chunks_mut(CHUNK_TOKENS * planes * per_token);
            pool.for_each_of(parts, tokens.zip(blocks), |(values, blocks)| {
                kernels.call(Quantize { values: values.as_chunks().0, blocks, planes, per_token });
            });
        }
    }

    /// Tokens loaded.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Values per token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Inputs that stand for one token: their products are added up.
    pub(crate) fn planes(&self) -> usize {
        self.kind.planes()
    }

    /// What weights are multiplied with that are no plain floats: all planes of all tokens.
    pub(crate) fn inputs(&self) -> usize {
        self.tokens * self.planes()
    }

    /// The blocks of an input: plane `input % planes` of token `input / planes`.
    pub(crate) fn blocks(&self, input: usize) -> &[Block] {
        let per_input = self.cols / BLOCK;
        assert!(self.blocks.len() == self.inputs() * per_input, "activations were not loaded for quantized weights");
        &self.blocks[input * per_input..][..per_input]
    }

    /// The pairs of an input: plane `input % planes` of token `input / planes`.
    pub(crate) fn pairs(&self, input: usize) -> &[[bf16; 2]] {
        let per_input = self.cols.div_ceil(2);
        assert!(self.pairs.len() == self.inputs() * per_input, "activations were not loaded for weights in bf16");
        &self.pairs[input * per_input..][..per_input]
    }

    /// A token's values.
    pub(crate) fn values(&self, token: usize) -> &[f32] {
        assert!(self.values.len() == self.tokens * self.cols, "activations were not loaded for weights in f32 or f16");
        &self.values[token * self.cols..][..self.cols]
    }
}

/// What weights multiply.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Values,
    Pairs,
    Blocks,
}

impl Form {
    fn of(weight_type: WeightType) -> Form {
        match weight_type {
            WeightType::F32 | WeightType::F16 => Form::Values,
            WeightType::BF16 => Form::Pairs,
            _ => Form::Blocks,
        }
    }
}

/// Some tokens' pairs: a token's planes lie one after the other.
struct Round<'a> {
    values: &'a [f32],
    pairs: &'a mut [[bf16; 2]],
    planes: usize,
    cols: usize,
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let per_token = self.planes * self.cols.div_ceil(2);
        for (values, pairs) in self.values.chunks(self.cols).zip(self.pairs.chunks_mut(per_token)) {
            let (coarse, fine) = pairs.split_at_mut(self.cols.div_ceil(2));
            let coarse = &mut coarse.as_flattened_mut()[..self.cols];
            for i in 0..self.cols {
                coarse[i] = without_subnormals(nearest_bf16(values[i]));
            }
            if !fine.is_empty() {
                let fine = &mut fine.as_flattened_mut()[..self.cols];
                for i in 0..self.cols {
                    fine[i] = without_subnormals(nearest_bf16(values[i] - widened(coarse[i])));
                }
            }
        }
    }
}

/// Some tokens' blocks: a token's planes lie one after the other.
struct Quantize<'a> {
    values: &'a [[f32; BLOCK]],
    blocks: &'a mut [Block],
    planes: usize,
    per_token: usize,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let tokens = self.values.chunks(self.per_token).zip(self.blocks.chunks_mut(self.planes * self.per_token));
        for (values, blocks) in tokens {
            let (coarse, fine) = blocks.split_at_mut(self.per_token);
            for (i, values) in values.iter().enumerate() {
                let [low, high] = halves(values);
                let values = [simd.load(low), simd.load(high)];
                quantize(simd, values, &mut coarse[i]);
                if let Some(fine) = fine.get_mut(i) {
                    quantize(simd, rest(simd, values, &coarse[i]), fine);
                }
            }
        }
    }
}

#[inline(always)]
fn quantize<S: Simd>(simd: S, [low, high]: [S::F; 2], block: &mut Block) {
    let zero = simd.splat(0.0);
    let positive = simd.max(low, high);
    let negative = simd.max(simd.sub(zero, low), simd.sub(zero, high));
    let magnitude = simd.largest(simd.max(positive, negative));
    let inverse = simd.splat(if magnitude > NEGLIGIBLE { 127.0 / magnitude } else { 0.0 });
    let (low, high) = (simd.round(simd.mul(low, inverse)), simd.round(simd.mul(high, inverse)));

    let mut codes = [[0; LANES]; 2];
    simd.store_i8(low, &mut codes[0]);
    simd.store_i8(high, &mut codes[1]);
    for (four, codes) in block.codes.iter_mut().zip(codes.as_flattened().as_chunks().0) {
        *four = *codes;
    }
    let (low_sum, high_sum) = (simd.sum_i32(low), simd.sum_i32(high));
    block.negated_sum = -(low_sum + high_sum);
    block.negated_high_sum = -high_sum;
    block.scale = magnitude / 127.0;
    block.scaled_sum = block.scale * (low_sum + high_sum) as f32;
}

/// What the block's codes leave of the values.
#[inline(always)]
fn rest<S: Simd>(simd: S, [low, high]: [S::F; 2], block: &Block) -> [S::F; 2] {
    let [low_codes, high_codes] = halves(block.codes.as_flattened());
    let scale = simd.splat(-block.scale);
    [simd.fma(simd.load_i8(low_codes), scale, low), simd.fma(simd.load_i8(high_codes), scale, high)]
}

#[inline(always)]
fn halves<T>(values: &[T]) -> [&[T; LANES]; 2] {
    match values.as_chunks().0 {
        [low, high] => [low, high],
        _ => unreachable!("a block is two vectors"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernels;
    use crate::testing::{Random, packed};

    #[test]
    fn codes_are_nearest_and_equal_in_every_set() {
        let mut random = Random::new(3);
        let mut input = random.values(64 * 7, 5.0);
        input[..BLOCK].fill(0.0);
        input[BLOCK] = -1e30;
        input[2 * BLOCK..3 * BLOCK].fill(1e-38);
        let mut reference: Option<Vec<Block>> = None;
        for kernels in Kernels::available() {
            let pool = Pool::with_kernels(1, kernels).unwrap();
            let matrix = packed(&pool, WeightType::Q8_0, 16, 64, 1);
            let mut activations = Activations::new(ActivationType::Int8);
            activations.load(&pool, &input, &[&matrix]);
            for (block, values) in activations.blocks.iter().zip(input.chunks(BLOCK)) {
                let codes = block.codes.as_flattened();
                for (&code, &value) in codes.iter().zip(values) {
                    let error = (f64::from(code) * f64::from(block.scale) - f64::from(value)).abs();
                    assert!(
                        error <= 1e-36f64.max(0.5001 * f64::from(block.scale)),
                        "{value} as {code} · {}",
                        block.scale
                    );
                }
                assert_eq!(-block.negated_sum, codes.iter().map(|&code| i32::from(code)).sum::<i32>());
                assert_eq!(-block.negated_high_sum, codes[16..].iter().map(|&code| i32::from(code)).sum::<i32>());
            }
            let reference = reference.get_or_insert_with(|| activations.blocks.clone());
            assert_eq!(*reference, activations.blocks, "{}", kernels.name());
        }
    }

    #[test]
    fn two_planes_leave_an_error_below_two_to_the_minus_15_in_every_set() {
        let mut random = Random::new(4);
        let input = random.values(64 * 7, 5.0);
        let mut reference: Option<Vec<Block>> = None;
        for kernels in Kernels::available() {
            let pool = Pool::with_kernels(1, kernels).unwrap();
            let matrix = packed(&pool, WeightType::Q8_0, 16, 64, 1);
            let mut activations = Activations::new(ActivationType::Int16);
            activations.load(&pool, &input, &[&matrix]);
            for (token, values) in input.chunks(64).enumerate() {
                let (coarse, fine) = (activations.blocks(2 * token), activations.blocks(2 * token + 1));
                for (i, values) in values.chunks(BLOCK).enumerate() {
                    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                    for (c, &value) in values.iter().enumerate() {
                        let of = |block: &Block| f64::from(block.codes.as_flattened()[c]) * f64::from(block.scale);
                        let error = (of(&coarse[i]) + of(&fine[i]) - f64::from(value)).abs();
                        assert!(error <= f64::from(largest) / 32768.0, "{value} missed by {error}");
                    }
                }
            }
            let reference = reference.get_or_insert_with(|| activations.blocks.clone());
            assert_eq!(*reference, activations.blocks, "{}", kernels.name());
        }
    }
}
