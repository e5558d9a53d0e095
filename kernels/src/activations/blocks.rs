//! Activations in bytes: what quantized weights multiply.

use std::{mem, slice};

use super::grouping::Grouping;
use crate::Pool;
use crate::simd::{Kernel, LANES, Simd};
use crate::weights::cell::BLOCK;

/// Blocks of a span: the 256 columns of a K-quant's superblock.
pub(crate) const SPAN_BLOCKS: usize = 8;

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleOf {
    Block,
    Span,
}

/// Values that one worker converts at a time.
const PART_VALUES: usize = 16384;

/// What is smaller at its largest counts as zeros: 127 over less than this is not finite.
pub(crate) const NEGLIGIBLE: f32 = 1e-36;

/// 32 values as bytes: value = code · scale.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C, align(16))]
pub(crate) struct Block {
    /// In fours, as the dot product takes them; none is -128.
    pub(crate) codes: [[i8; 4]; BLOCK / 4],
    /// The largest magnitude of the block, or of its span, over 127.
    pub(crate) scale: f32,
    /// `Σ codes`.
    pub(crate) sum: f32,
    /// `-Σ codes`, for products with weight codes that have an offset.
    pub(crate) negated_sum: i32,
    /// `-Σ` of codes 16 to 31.
    pub(crate) negated_high_sum: i32,
}

/// Inputs in blocks, in the order in which products read them: group by group, `[cols / 32][inputs of the group]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Blocks {
    grouping: Grouping,
    inputs: usize,
    /// Blocks of an input.
    per_input: usize,
    blocks: Vec<Block>,
    /// Spans of an input.
    spans: usize,
    /// `-Σ codes` of spans: group by group, `[spans][inputs of the group]`.
    negated_sums: Vec<i32>,
}

/// Inputs that are multiplied together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group<'a> {
    /// The first.
    pub(crate) first: usize,
    /// How many.
    pub(crate) size: usize,
    /// `[cols / 32][size]`.
    pub(crate) blocks: &'a [Block],
    /// `[cols / 256][size]`: `-Σ codes` of spans, the last of which may have fewer columns.
    pub(crate) negated_sums: &'a [i32],
}

impl Blocks {
    /// How many there are; none where the weights do not multiply such blocks.
    pub(crate) fn inputs(&self) -> usize {
        self.blocks.len().checked_div(self.per_input).unwrap_or_default()
    }

    pub(crate) fn grouping(&self) -> Grouping {
        self.grouping
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
    }

    /// Every input is in one group.
    pub(crate) fn groups(&self) -> impl Iterator<Item = Group<'_>> {
        self.grouping.groups(self.inputs).map(|group| {
            let blocks = &self.blocks[group.start * self.per_input..group.end * self.per_input];
            let negated_sums = &self.negated_sums[group.start * self.spans..group.end * self.spans];
            Group { first: group.start, size: group.len(), blocks, negated_sums }
        })
    }

    /// Takes in `values`, whole tokens of `cols`, each as so many planes; a scale is of a block, or of a span.
    pub(super) fn load(&mut self, pool: &Pool, values: &[f32], cols: usize, planes: usize, scale: ScaleOf) {
        self.inputs = values.len() / cols * planes;
        (self.per_input, self.spans) = (cols / BLOCK, (cols / BLOCK).div_ceil(SPAN_BLOCKS));
        self.grouping = Grouping::of(pool.kernels(), self.inputs);
        self.blocks.resize(self.inputs * self.per_input, Block::default());
        self.negated_sums.resize(self.inputs * self.spans, 0);
        let (per_input, spans, grouping, inputs) = (self.per_input, self.spans, self.grouping, self.inputs);
        let spans_at_once = |size: usize| (PART_VALUES / BLOCK / SPAN_BLOCKS / size).max(1);
        let count = grouping.groups(inputs).map(|group| spans.div_ceil(spans_at_once(group.len()))).sum();
        let (mut blocks_left, mut sums_left) = (self.blocks.as_mut_slice(), self.negated_sums.as_mut_slice());
        let parts = grouping.groups(inputs).flat_map(move |group| {
            let (size, at_once) = (group.len(), spans_at_once(group.len()));
            let blocks = take_first(&mut blocks_left, size * per_input).chunks_mut(at_once * SPAN_BLOCKS * size);
            let sums = take_first(&mut sums_left, size * spans).chunks_mut(at_once * size);
            let tokens = &values[group.start / planes * cols..group.end / planes * cols];
            (0..).step_by(at_once * SPAN_BLOCKS).zip(blocks.zip(sums)).map(move |(first, (blocks, negated_sums))| {
                Quantize { tokens, cols, blocks, negated_sums, first, planes, scale }
            })
        });
        pool.for_each_of(count, parts, |part| pool.kernels().call(part));
    }

    /// The blocks of one input.
    #[cfg(test)]
    pub(crate) fn of_input(&self, input: usize) -> impl Iterator<Item = &Block> {
        let group = self.groups().find(|group| (group.first..group.first + group.size).contains(&input)).unwrap();
        group.blocks.iter().skip(input - group.first).step_by(group.size)
    }
}

/// The first `count`, which are gone from what is left.
fn take_first<'a, T>(left: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let (first, rest) = mem::take(left).split_at_mut(count);
    *left = rest;
    first
}

/// Some blocks of the inputs of a group, in whole spans but for the last of a row.
struct Quantize<'a> {
    /// `[tokens, cols]`, whose planes are the group's inputs.
    tokens: &'a [f32],
    cols: usize,
    /// `[blocks][inputs of the group]`, from block `first` of each input on.
    blocks: &'a mut [Block],
    /// `[spans][inputs of the group]`.
    negated_sums: &'a mut [i32],
    first: usize,
    planes: usize,
    scale: ScaleOf,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let size = self.tokens.len() / self.cols * self.planes;
        for (token, values) in self.tokens.chunks_exact(self.cols).enumerate() {
            let values = &values.as_chunks().0[self.first..][..self.blocks.len() / size];
            let input = token * self.planes;
            let spans = self.blocks.chunks_mut(size * SPAN_BLOCKS).zip(self.negated_sums.chunks_exact_mut(size));
            for (values, (blocks, negated_sums)) in values.chunks(SPAN_BLOCKS).zip(spans) {
                let of_span = (self.scale == ScaleOf::Span).then(|| largest(simd, values));
                negated_sums[input..][..self.planes].fill(0);
                for (values, blocks) in values.iter().zip(blocks.chunks_exact_mut(size)) {
                    let magnitude = of_span.unwrap_or_else(|| largest(simd, slice::from_ref(values)));
                    blocks[input] = quantize(simd, values, magnitude);
                    if self.planes == 2 {
                        let rest = rest(simd, values, &blocks[input]);
                        blocks[input + 1] = quantize(simd, &rest, largest(simd, slice::from_ref(&rest)));
                    }
                    for plane in input..input + self.planes {
                        negated_sums[plane] += blocks[plane].negated_sum;
                    }
                }
            }
        }
    }
}

/// The largest magnitude.
#[inline(always)]
fn largest<S: Simd>(simd: S, blocks: &[[f32; BLOCK]]) -> f32 {
    let mut most = simd.splat(0.0);
    for values in blocks {
        let [low, high] = halves(values);
        let (low, high) = (magnitudes(simd, simd.load(low)), magnitudes(simd, simd.load(high)));
        most = simd.max(simd.max(low, high), most);
    }
    simd.largest(most)
}

/// Values of which none is greater than `magnitude`.
#[inline(always)]
fn quantize<S: Simd>(simd: S, values: &[f32; BLOCK], magnitude: f32) -> Block {
    let [low, high] = halves(values).map(|half| simd.load(half));
    let inverse = simd.splat(if magnitude > NEGLIGIBLE { 127.0 / magnitude } else { 0.0 });
    let (low, high) = (simd.round(simd.mul(low, inverse)), simd.round(simd.mul(high, inverse)));
    let mut block = Block::default();
    let [low_codes, high_codes] = halves_mut(block.codes.as_flattened_mut());
    simd.store_i8(low, low_codes);
    simd.store_i8(high, high_codes);
    let (low_sum, high_sum) = (simd.sum_i32(low), simd.sum_i32(high));
    block.scale = magnitude / 127.0;
    block.sum = (low_sum + high_sum) as f32;
    block.negated_sum = -(low_sum + high_sum);
    block.negated_high_sum = -high_sum;
    block
}

#[inline(always)]
fn magnitudes<S: Simd>(simd: S, values: S::F) -> S::F {
    simd.max(values, simd.sub(simd.splat(0.0), values))
}

/// What the block's codes leave of the values.
#[inline(always)]
fn rest<S: Simd>(simd: S, values: &[f32; BLOCK], block: &Block) -> [f32; BLOCK] {
    let mut left = [0.0; BLOCK];
    let [low_codes, high_codes] = halves(block.codes.as_flattened());
    let ([low, high], [left_low, left_high]) = (halves(values), halves_mut(&mut left));
    let scale = simd.splat(-block.scale);
    simd.store(simd.fma(simd.load_i8(low_codes), scale, simd.load(low)), left_low);
    simd.store(simd.fma(simd.load_i8(high_codes), scale, simd.load(high)), left_high);
    left
}

#[inline(always)]
fn halves<T>(values: &[T]) -> [&[T; LANES]; 2] {
    match values.as_chunks().0 {
        [low, high] => [low, high],
        _ => unreachable!("a block is two vectors"),
    }
}

#[inline(always)]
fn halves_mut<T>(values: &mut [T]) -> [&mut [T; LANES]; 2] {
    match values.as_chunks_mut().0 {
        [low, high] => [low, high],
        _ => unreachable!("a block is two vectors"),
    }
}

#[cfg(test)]
mod tests;
