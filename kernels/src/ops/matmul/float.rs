//! Products with float weights: f32 fused multiply-adds, cell by cell; of bf16 in pairs, with activations rounded to bf16.

use std::array;

use super::PANEL_TILES;
use super::output::Columns;
use crate::Activations;
use crate::simd::{Kernel, Kernels, LANES, Simd};
use crate::weights::float::FloatCell;

/// Multiplies panel `panel` of `cells` with all inputs.
pub(super) fn multiply<C: FloatCell>(
    kernels: Kernels,
    cells: &[C],
    activations: &Activations,
    panel: usize,
    mut out: Columns<'_>,
) {
    let per_tile = activations.cols().div_ceil(C::COLS);
    let tiles_here = out.count().div_ceil(LANES);
    // The last panel may have one tile; its second is then the first again, and dropped.
    let tiles =
        array::from_fn(|tile| &cells[(panel * PANEL_TILES + tile.min(tiles_here - 1)) * per_tile..][..per_tile]);
    let inputs = activations.tokens() * C::planes(activations);
    let mut done = 0;
    loop {
        match inputs - done {
            0 => break,
            1 => done += group::<C, 1>(kernels, tiles, activations, done, &mut out),
            2 | 3 => done += group::<C, 2>(kernels, tiles, activations, done, &mut out),
            4 | 5 => done += group::<C, 4>(kernels, tiles, activations, done, &mut out),
            _ => done += group::<C, 6>(kernels, tiles, activations, done, &mut out),
        }
    }
}

/// Multiplies `INPUTS` inputs from `first` on; returns how many.
fn group<C: FloatCell, const INPUTS: usize>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    activations: &Activations,
    first: usize,
    out: &mut Columns<'_>,
) -> usize {
    let inputs: [&[C::Value]; INPUTS] = array::from_fn(|input| C::values(activations, first + input));
    let sums = kernels.call_floats(PanelProduct { tiles, inputs });
    sums.iter().enumerate().for_each(|(input, sums)| out.put(C::planes(activations), first + input, sums));
    INPUTS
}

/// Two tiles with a few inputs.
struct PanelProduct<'a, C: FloatCell, const INPUTS: usize> {
    tiles: [&'a [C]; PANEL_TILES],
    inputs: [&'a [C::Value]; INPUTS],
}

impl<C: FloatCell, const INPUTS: usize> Kernel for PanelProduct<'_, C, INPUTS> {
    type Output = [[[f32; LANES]; PANEL_TILES]; INPUTS];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let mut out = [[[0.0; LANES]; PANEL_TILES]; INPUTS];
        if !S::REGISTERS {
            one_by_one(simd, self.tiles, &self.inputs, &mut out);
        } else if S::MANY_REGISTERS {
            register_tile(simd, self.tiles, self.inputs, &mut out);
        } else {
            // Sixteen hold the sums of two inputs beside what they are made of.
            for (inputs, out) in self.inputs.chunks(2).zip(out.chunks_mut(2)) {
                match (inputs, out) {
                    ([a, b], [to_a, to_b]) => {
                        let mut pair = [[[0.0; LANES]; PANEL_TILES]; 2];
                        register_tile(simd, self.tiles, [*a, *b], &mut pair);
                        [*to_a, *to_b] = pair;
                    }
                    ([input], [out]) => register_tile(simd, self.tiles, [*input], array::from_mut(out)),
                    _ => unreachable!("chunks of two"),
                }
            }
        }
        out
    }
}

/// Every input alone, compiled once for any number.
#[inline(never)]
fn one_by_one<S: Simd, C: FloatCell>(
    simd: S,
    tiles: [&[C]; PANEL_TILES],
    inputs: &[&[C::Value]],
    out: &mut [[[f32; LANES]; PANEL_TILES]],
) {
    for (input, out) in inputs.iter().zip(out) {
        register_tile(simd, tiles, [input], array::from_mut(out));
    }
}

/// Two tiles with a few inputs: their sums stay in registers while the cells go by.
#[inline(always)]
fn register_tile<S: Simd, C: FloatCell, const INPUTS: usize>(
    simd: S,
    tiles: [&[C]; PANEL_TILES],
    inputs: [&[C::Value]; INPUTS],
    to: &mut [[[f32; LANES]; PANEL_TILES]; INPUTS],
) {
    let mut sums = [[simd.splat(0.0); INPUTS]; PANEL_TILES];
    for cell in 0..tiles[0].len() {
        for input in 0..INPUTS {
            let value = inputs[input][cell];
            for tile in 0..PANEL_TILES {
                sums[tile][input] = tiles[tile][cell].multiply(simd, value, sums[tile][input]);
            }
        }
    }
    for input in 0..INPUTS {
        for tile in 0..PANEL_TILES {
            simd.store(sums[tile][input], &mut to[input][tile]);
        }
    }
}
