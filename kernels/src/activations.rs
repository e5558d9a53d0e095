//! Token activations in the forms that matrix products read.

use crate::simd::{Kernel, LANES, Simd};
use crate::weights::cell::BLOCK;
use crate::{PackedMatrix, Pool, WeightType};

/// Tokens that one worker converts at a time.
const CHUNK_TOKENS: usize = 8;

/// A reusable buffer of activations `[tokens, cols]`, converted once for all matrices that multiply them.
///
/// Quantized weights multiply signed bytes with one f32 scale for each 32 values, the finest grouping that any of the
/// formats has: one form serves them all, and it loses less than the 256-value groups that K-quants could do with.
/// Float weights multiply the values themselves.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    /// `[tokens, cols / 32]`, or empty.
    blocks: Vec<Block>,
    /// `[tokens, cols]`, or empty.
    values: Vec<f32>,
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
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in `input`, `[tokens, cols]` row-major, in the forms that `matrices` need.
    ///
    /// # Panics
    /// When `matrices` is empty or they differ in `cols`, or when `input` is not whole tokens.
    pub fn load(&mut self, pool: &Pool, input: &[f32], matrices: &[&PackedMatrix]) {
        let cols = matrices[0].cols();
        assert!(matrices.iter().all(|matrix| matrix.cols() == cols), "matrices that share activations share cols");
        assert!(input.len().is_multiple_of(cols), "{} values are no whole tokens of {cols}", input.len());
        self.tokens = input.len() / cols;
        self.cols = cols;
        self.values.clear();
        self.blocks.clear();
        if matrices.iter().any(|matrix| multiplies_floats(matrix.weight_type())) {
            self.values.extend_from_slice(input);
        }
        if matrices.iter().any(|matrix| !multiplies_floats(matrix.weight_type())) {
            self.blocks.resize(input.len() / BLOCK, Block::default());
            let kernels = pool.kernels();
            let parts = input.chunks(CHUNK_TOKENS * cols).zip(self.blocks.chunks_mut(CHUNK_TOKENS * cols / BLOCK));
            pool.for_each_of(self.tokens.div_ceil(CHUNK_TOKENS), parts, |(values, blocks)| {
                kernels.call(Quantize { values: values.as_chunks().0, blocks });
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

    /// A token's blocks.
    pub(crate) fn blocks(&self, token: usize) -> &[Block] {
        let per_token = self.cols / BLOCK;
        assert!(self.blocks.len() == self.tokens * per_token, "activations were not loaded for quantized weights");
        &self.blocks[token * per_token..][..per_token]
    }

    /// A token's values.
    pub(crate) fn values(&self, token: usize) -> &[f32] {
        assert!(self.values.len() == self.tokens * self.cols, "activations were not loaded for float weights");
        &self.values[token * self.cols..][..self.cols]
    }
}

/// Whether products with these weights are computed in f32.
fn multiplies_floats(weight_type: WeightType) -> bool {
    weight_type.block_elements() == 1
}

struct Quantize<'a> {
    values: &'a [[f32; BLOCK]],
    blocks: &'a mut [Block],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (values, block) in self.values.iter().zip(self.blocks) {
            quantize(simd, values, block);
        }
    }
}

#[inline(always)]
fn quantize<S: Simd>(simd: S, values: &[f32; BLOCK], block: &mut Block) {
    let [low, high] = halves(values);
    let (low, high) = (simd.load(low), simd.load(high));
    let zero = simd.splat(0.0);
    let positive = simd.max(low, high);
    let negative = simd.max(simd.sub(zero, low), simd.sub(zero, high));
    let magnitude = simd.largest(simd.max(positive, negative));
    let inverse = simd.splat(if magnitude > 0.0 { 127.0 / magnitude } else { 0.0 });
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

#[inline(always)]
fn halves(values: &[f32; BLOCK]) -> [&[f32; LANES]; 2] {
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
        let mut reference: Option<Vec<Block>> = None;
        for kernels in Kernels::available() {
            let pool = Pool::with_kernels(1, kernels).unwrap();
            let matrix = packed(&pool, WeightType::Q8_0, 16, 64, 1);
            let mut activations = Activations::new();
            activations.load(&pool, &input, &[&matrix]);
            for (block, values) in activations.blocks.iter().zip(input.chunks(BLOCK)) {
                let codes = block.codes.as_flattened();
                for (&code, &value) in codes.iter().zip(values) {
                    let error = (f64::from(code) * f64::from(block.scale) - f64::from(value)).abs();
                    assert!(error <= 0.5001 * f64::from(block.scale), "{value} as {code} · {}", block.scale);
                }
                assert_eq!(-block.negated_sum, codes.iter().map(|&code| i32::from(code)).sum::<i32>());
                assert_eq!(-block.negated_high_sum, codes[16..].iter().map(|&code| i32::from(code)).sum::<i32>());
            }
            let reference = reference.get_or_insert_with(|| activations.blocks.clone());
            assert_eq!(*reference, activations.blocks, "{}", kernels.name());
        }
    }
}
