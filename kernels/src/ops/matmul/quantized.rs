//! Products with quantized weights: integer dot products of unsigned weight codes with signed activation codes.
//!
//! For each block of columns: `sum += (dot · activation scale) · weight scale`, or where its halves have scales of their own
//! `sum += (low dot · low scale + high dot · high scale) · activation scale`, which is a product less; and for formats with a
//! minimum `sum += minimum · (activation scale · Σ activation codes)`. The order of these steps is fixed;
//! the dot products are exact, so theirs does not matter.

use std::array;

use super::output::Columns;
use super::panel::{self, LINE};
use super::{FEW_INPUTS, MANY_INPUTS, PANEL_TILES, direct_inputs};
use crate::Activations;
use crate::activations::Block;
use crate::simd::{Kernel, Kernels, LANES, Simd, longest_run};
use crate::weights::cell::{BLOCK, QuantizedCell};

/// Multiplies panel `panel` of `cells` with all inputs; panel `next` comes after it.
pub(super) fn multiply<C: QuantizedCell>(
    kernels: Kernels,
    cells: &[C],
    activations: &Activations,
    panel: usize,
    next: Option<usize>,
    out: Columns<'_>,
) {
    let per_tile = activations.cols() / C::COLS;
    let cells_of = |panel: usize| {
        let cells = &cells[panel * PANEL_TILES * per_tile..];
        &cells[..cells.len().min(PANEL_TILES * per_tile)]
    };
    let (first, second) = cells_of(panel).split_at(per_tile);
    if activations.inputs() <= direct_inputs(kernels) {
        multiply_direct(kernels, [first, second], activations, out);
    } else {
        let next = next.map_or(&[][..], cells_of);
        panel::multiply(kernels, [first, second], next, activations, out);
    }
}

fn multiply_direct<C: QuantizedCell>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    activations: &Activations,
    mut out: Columns<'_>,
) {
    let mut done = 0;
    loop {
        done += match activations.inputs() - done {
            0 => break,
            1 => direct_group::<C, 1>(kernels, tiles, activations, done, &mut out),
            2 => direct_group::<C, 2>(kernels, tiles, activations, done, &mut out),
            3 => direct_group::<C, 3>(kernels, tiles, activations, done, &mut out),
            FEW_INPUTS..8 => direct_group::<C, FEW_INPUTS>(kernels, tiles, activations, done, &mut out),
            8..MANY_INPUTS => direct_group::<C, 8>(kernels, tiles, activations, done, &mut out),
            MANY_INPUTS.. => direct_group::<C, MANY_INPUTS>(kernels, tiles, activations, done, &mut out),
        };
    }
}

/// Multiplies `INPUTS` inputs from `first` on; returns how many.
fn direct_group<C: QuantizedCell, const INPUTS: usize>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    activations: &Activations,
    first: usize,
    out: &mut Columns<'_>,
) -> usize {
    let inputs = array::from_fn(|input| activations.blocks(first + input));
    let products = tiles.map(|cells| kernels.call(TileProduct::<C, INPUTS> { cells, inputs }));
    for input in 0..INPUTS {
        out.put(activations.planes(), first + input, &[products[0][input], products[1][input]]);
    }
    INPUTS
}

/// How far the direct products ask ahead in the stream of cells.
const STREAM_AHEAD: usize = 8192;

/// One tile, straight from its cells, with a few inputs.
struct TileProduct<'a, C, const INPUTS: usize> {
    cells: &'a [C],
    inputs: [&'a [Block]; INPUTS],
}

impl<C: QuantizedCell, const INPUTS: usize> Kernel for TileProduct<'_, C, INPUTS> {
    type Output = [[f32; LANES]; INPUTS];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let fit = S::REGISTERS && (S::MANY_REGISTERS || INPUTS <= FEW_INPUTS);
        if fit { self.together(simd) } else { self.inputs.map(|input| alone(simd, self.cells, input)) }
    }
}

/// One input's sums, compiled once for any number of inputs.
#[inline(never)]
fn alone<S: Simd, C: QuantizedCell>(simd: S, cells: &[C], input: &[Block]) -> [f32; LANES] {
    let [sums] = TileProduct { cells, inputs: [input] }.together(simd);
    sums
}

impl<C: QuantizedCell, const INPUTS: usize> TileProduct<'_, C, INPUTS> {
    /// The sums of all inputs while the cells go by.
    #[inline(always)]
    fn together<S: Simd>(self, simd: S) -> [[f32; LANES]; INPUTS] {
        let per_cell = C::COLS / BLOCK;
        let mut sums = [simd.splat(0.0); INPUTS];
        for (i, cell) in self.cells.iter().enumerate() {
            let ahead = std::ptr::from_ref(cell).cast::<u8>().wrapping_add(STREAM_AHEAD);
            for block in 0..per_cell {
                let share = size_of::<C>() / per_cell;
                simd.prefetch(ahead.wrapping_add(block * share), share.div_ceil(LINE));
                let codes = cell.codes(simd, block);
                let scale = cell.scale(simd, block, 0);
                let second_scale = if C::SCALES == 2 { cell.scale(simd, block, 1) } else { scale };
                let mut minimums = [scale; 2];
                for index in 0..C::MINIMUMS {
                    minimums[index] = cell.minimum(simd, block, index);
                }
                for input in 0..INPUTS {
                    let activation = &self.inputs[input][i * per_cell + block];
                    let [low, high] = start::<S, C>(simd, activation);
                    let low = half_dot::<S, C>(simd, low, &codes, activation, 0);
                    let high = half_dot::<S, C>(simd, high, &codes, activation, 4);
                    if C::SCALES == 2 {
                        let part = add_half(simd, first_half(simd, low, scale), high, second_scale);
                        sums[input] = simd.fma(part, simd.splat(activation.scale), sums[input]);
                    } else {
                        sums[input] = accumulate(simd, sums[input], simd.add_i32(low, high), activation, scale);
                    }
                    for index in 0..C::MINIMUMS {
                        let scaled_sum = simd.splat(scaled_sum::<C>(activation, index));
                        sums[input] = simd.fma(minimums[index], scaled_sum, sums[input]);
                    }
                }
            }
        }
        store_all(simd, sums)
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

#[inline(always)]
pub(super) fn accumulate<S: Simd>(simd: S, sum: S::F, dot: S::I, activation: &Block, scale: S::F) -> S::F {
    simd.fma(simd.mul(simd.to_f32(dot), simd.splat(activation.scale)), scale, sum)
}

/// What the first half of a block gives before the activation's scale.
#[inline(always)]
pub(super) fn first_half<S: Simd>(simd: S, dot: S::I, scale: S::F) -> S::F {
    simd.mul(simd.to_f32(dot), scale)
}

/// Adds what the second half gives.
#[inline(always)]
pub(super) fn add_half<S: Simd>(simd: S, first: S::F, dot: S::I, scale: S::F) -> S::F {
    simd.fma(simd.to_f32(dot), scale, first)
}

/// What minimum `index` multiplies: the sum of the block's activations, or of a half's where each half has its own.
#[inline(always)]
pub(super) fn scaled_sum<C: QuantizedCell>(activation: &Block, index: usize) -> f32 {
    match (C::MINIMUMS, index) {
        (2, 0) => activation.scale * (activation.negated_high_sum - activation.negated_sum) as f32,
        (2, _) => activation.scale * -activation.negated_high_sum as f32,
        _ => activation.scaled_sum,
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
