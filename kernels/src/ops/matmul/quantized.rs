//! Products with quantized weights: integer dot products of unsigned weight codes with signed activation codes.
//!
//! Block after block `sum += part · activation scale`, where the part is `dot · weight scale`, of each half where those have
//! scales of their own, and `minimum · Σ activation codes` for formats that have one. The order of these steps is fixed; the
//! dot products are exact, so theirs does not matter.

use super::PANEL_TILES;
use super::output::Columns;
use super::panel::{self, LINE, Scales};
use crate::Activations;
use crate::activations::blocks::{Block, Group, SPAN_BLOCKS};
use crate::activations::grouping::{FEW_INPUTS, Grouping};
use crate::simd::{Kernel, Kernels, LANES, Simd, longest_run};
use crate::weights::cell::{BLOCK, QuantizedCell};

/// Multiplies panel `panel` of `cells` with all inputs; panel `next` comes after it.
pub(super) fn multiply<C: QuantizedCell>(
    kernels: Kernels,
    cells: &[C],
    activations: &Activations,
    panel: usize,
    next: Option<usize>,
    mut out: Columns<'_>,
) {
    let per_tile = activations.cols() / C::COLS;
    let cells_of = |panel: usize| {
        let cells = &cells[panel * PANEL_TILES * per_tile..];
        &cells[..cells.len().min(PANEL_TILES * per_tile)]
    };
    let (first, second) = cells_of(panel).split_at(per_tile);
    let (blocks, planes) = (activations.blocks(), activations.planes());
    match blocks.grouping() {
        Grouping::Direct => {
            blocks.groups().for_each(|group| multiply_direct(kernels, [first, second], group, planes, &mut out))
        }
        Grouping::Panels => {
            let next = next.map_or(&[][..], cells_of);
            // No other cell can merge: what it would do is not compiled for them.
            let merges = C::COLS == SPAN_BLOCKS * BLOCK && C::CODE_BITS < 8 && activations.merges_columns();
            let scales = if merges { Scales::Merged } else { Scales::OfTheFormat };
            panel::multiply(kernels, [first, second], next, (blocks, scales), planes, out);
        }
    }
}

/// Multiplies two tiles with the inputs of a group.
fn multiply_direct<C: QuantizedCell>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    group: Group<'_>,
    planes: usize,
    out: &mut Columns<'_>,
) {
    match group.size {
        1 => direct_group::<C, 1>(kernels, tiles, group, planes, out),
        2 => direct_group::<C, 2>(kernels, tiles, group, planes, out),
        3 => direct_group::<C, 3>(kernels, tiles, group, planes, out),
        4 => direct_group::<C, 4>(kernels, tiles, group, planes, out),
        8 => direct_group::<C, 8>(kernels, tiles, group, planes, out),
        16 => direct_group::<C, 16>(kernels, tiles, group, planes, out),
        size => unreachable!("no group has {size} inputs"),
    }
}

fn direct_group<C: QuantizedCell, const INPUTS: usize>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    group: Group<'_>,
    planes: usize,
    out: &mut Columns<'_>,
) {
    let products = tiles.map(|cells| kernels.call(TileProduct::<C, INPUTS> { cells, blocks: group.blocks }));
    for input in 0..INPUTS {
        out.put(planes, group.first + input, &[products[0][input], products[1][input]]);
    }
}

/// Blocks of some inputs of a group, which have `size` inputs from one block of columns to the next.
#[derive(Clone, Copy)]
pub(super) struct Lanes<'a> {
    pub(super) blocks: &'a [Block],
    pub(super) size: usize,
    /// The first of them.
    pub(super) first: usize,
}

impl<'a> Lanes<'a> {
    /// Block `block` of `INPUTS` inputs.
    #[inline(always)]
    pub(super) fn at<const INPUTS: usize>(self, block: usize) -> &'a [Block; INPUTS] {
        match self.blocks[block * self.size + self.first..].first_chunk() {
            Some(blocks) => blocks,
            None => unreachable!("a group has whole blocks"),
        }
    }
}

/// How far the direct products ask ahead in the stream of cells.
const STREAM_AHEAD: usize = 8192;

/// One tile, straight from its cells, with the inputs of a group.
struct TileProduct<'a, C, const INPUTS: usize> {
    cells: &'a [C],
    /// `[cols / 32][INPUTS]`.
    blocks: &'a [Block],
}

impl<C: QuantizedCell, const INPUTS: usize> Kernel for TileProduct<'_, C, INPUTS> {
    type Output = [[f32; LANES]; INPUTS];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let lanes = Lanes { blocks: self.blocks, size: INPUTS, first: 0 };
        if S::REGISTERS && (S::MANY_REGISTERS || INPUTS <= FEW_INPUTS) {
            return together(simd, self.cells, lanes);
        }
        let mut out = [[0.0; LANES]; INPUTS];
        for (first, out) in out.iter_mut().enumerate() {
            *out = alone(simd, self.cells, Lanes { first, ..lanes });
        }
        out
    }
}

/// One input's sums, compiled once for any number of inputs.
#[inline(never)]
fn alone<S: Simd, C: QuantizedCell>(simd: S, cells: &[C], lanes: Lanes<'_>) -> [f32; LANES] {
    let [sums] = together(simd, cells, lanes);
    sums
}

/// The sums of `INPUTS` inputs while the cells go by.
#[inline(always)]
fn together<S: Simd, C: QuantizedCell, const INPUTS: usize>(
    simd: S,
    cells: &[C],
    lanes: Lanes<'_>,
) -> [[f32; LANES]; INPUTS] {
    let per_cell = C::PARTS * C::COLS / BLOCK;
    let mut sums = [simd.splat(0.0); INPUTS];
    for (i, cell) in cells.iter().enumerate() {
        let ahead = std::ptr::from_ref(cell).cast::<u8>().wrapping_add(STREAM_AHEAD);
        for block in 0..per_cell {
            let share = size_of::<C>() / per_cell;
            simd.prefetch(ahead.wrapping_add(block * share), share.div_ceil(LINE));
            add_block(simd, cell, block, lanes.at((i * per_cell + block) / C::PARTS), &mut sums);
        }
    }
    store_all(simd, sums)
}

/// Adds the products of a cell's block to the sums.
#[inline(always)]
fn add_block<S: Simd, C: QuantizedCell, const INPUTS: usize>(
    simd: S,
    cell: &C,
    block: usize,
    activations: &[Block; INPUTS],
    sums: &mut [S::F; INPUTS],
) {
    let codes = cell.codes(simd, block);
    let scale = cell.scale(simd, block, 0);
    let second_scale = if C::SCALES == 2 { cell.scale(simd, block, 1) } else { scale };
    let mut minimums = [scale; 2];
    for index in 0..C::MINIMUMS {
        minimums[index] = cell.minimum(simd, block, index);
    }
    for input in 0..INPUTS {
        let activation = &activations[input];
        let [low, high] = start::<S, C>(simd, activation);
        let low = half_dot::<S, C>(simd, low, &codes, activation, 0);
        let high = half_dot::<S, C>(simd, high, &codes, activation, 4);
        let mut part = if C::SCALES == 2 {
            simd.fma(simd.to_f32(high), second_scale, simd.mul(simd.to_f32(low), scale))
        } else {
            simd.mul(simd.to_f32(simd.add_i32(low, high)), scale)
        };
        for index in 0..C::MINIMUMS {
            part = simd.fma(minimums[index], sum_of::<S, C>(simd, activation, index), part);
        }
        sums[input] = simd.fma(part, simd.splat(activation.scale), sums[input]);
    }
}

/// Where the sums over the first and the last 16 columns start, so that the codes' offset cancels out.
#[inline(always)]
pub(super) fn start<S: Simd, C: QuantizedCell>(simd: S, activation: &Block) -> [S::I; 2] {
    let zero = simd.splat_i32(0);
    if C::OFFSET == 0 {
        return [zero; 2];
    }
    let all = simd.splat_i32(activation.negated_sum);
    if C::SCALES == 1 {
        return [start_from::<S, C>(simd, all), zero];
    }
    let high = simd.splat_i32(activation.negated_high_sum);
    [start_from::<S, C>(simd, simd.sub_i32(all, high)), start_from::<S, C>(simd, high)]
}

#[inline(always)]
fn start_from<S: Simd, C: QuantizedCell>(simd: S, negated_sum: S::I) -> S::I {
    match C::OFFSET {
        4 => simd.shift_left::<2>(negated_sum),
        8 => simd.shift_left::<3>(negated_sum),
        16 => simd.shift_left::<4>(negated_sum),
        32 => simd.shift_left::<5>(negated_sum),
        128 => simd.start_biased(negated_sum),
        _ => unreachable!("no format has offset {}", C::OFFSET),
    }
}

/// Vectors of `vectors`, a power of two, whose products are added before they are widened: as many as may be.
pub(super) const fn run_of<S: Simd, C: QuantizedCell>(vectors: usize) -> usize {
    let mut run = vectors;
    while !S::WIDE_PRODUCTS && run > longest_run(C::CODE_BITS) {
        run /= 2;
    }
    run
}

/// The products of four vectors of a block, from vector `first` on, added to `sum`.
#[inline(always)]
fn half_dot<S: Simd, C: QuantizedCell>(
    simd: S,
    mut sum: S::I,
    codes: &[S::U; 8],
    activation: &Block,
    first: usize,
) -> S::I {
    let run = const { run_of::<S, C>(4) };
    for from in (0..4).step_by(run) {
        let mut products = simd.open(sum);
        for j in from..from + run {
            products = multiply_codes::<S, C>(simd, products, codes[first + j], activation.codes[first + j]);
        }
        sum = simd.close(sum, products);
    }
    sum
}

#[inline(always)]
pub(super) fn multiply_codes<S: Simd, C: QuantizedCell>(simd: S, products: S::P, codes: S::U, values: [i8; 4]) -> S::P {
    match C::CODE_BITS {
        8 => simd.multiply_biased(products, codes, values),
        _ => simd.multiply(products, codes, values),
    }
}

/// What minimum `index` multiplies: the sum of the block's codes, or of a half's where each half has its own.
#[inline(always)]
pub(super) fn sum_of<S: Simd, C: QuantizedCell>(simd: S, activation: &Block, index: usize) -> S::F {
    if C::MINIMUMS == 1 {
        return simd.splat(activation.sum);
    }
    let high = simd.splat_i32(activation.negated_high_sum);
    match index {
        0 => simd.to_f32(simd.sub_i32(high, simd.splat_i32(activation.negated_sum))),
        _ => simd.to_f32(simd.sub_i32(simd.splat_i32(0), high)),
    }
}

#[inline(always)]
fn store_all<S: Simd, const N: usize>(simd: S, sums: [S::F; N]) -> [[f32; LANES]; N] {
    let mut out = [[0.0; LANES]; N];
    for i in 0..N {
        simd.store(sums[i], &mut out[i]);
    }
    out
}
