//! Products with float weights: f32 fused multiply-adds, column by column.

use std::array;

use super::PANEL_TILES;
use super::output::Columns;
use crate::Activations;
use crate::simd::{Kernel, Kernels, LANES, Simd};
use crate::weights::cell::FloatCell;

/// Multiplies panel `panel` of `cells` with all tokens.
pub(super) fn multiply<C: FloatCell>(
    kernels: Kernels,
    cells: &[C],
    activations: &Activations,
    panel: usize,
    mut out: Columns<'_>,
) {
    let cols = activations.cols();
    let tiles_here = out.count().div_ceil(LANES);
    // The last panel may have one tile; its second is then the first again, and dropped.
    let tiles = array::from_fn(|tile| &cells[(panel * PANEL_TILES + tile.min(tiles_here - 1)) * cols..][..cols]);
    let mut done = 0;
    loop {
        match activations.tokens() - done {
            0 => break,
            1 => done += group::<C, 1>(kernels, tiles, activations, done, &mut out),
            2 | 3 => done += group::<C, 2>(kernels, tiles, activations, done, &mut out),
            4 | 5 => done += group::<C, 4>(kernels, tiles, activations, done, &mut out),
            _ => done += group::<C, 6>(kernels, tiles, activations, done, &mut out),
        }
    }
}

/// Multiplies `TOKENS` tokens from `first` on; returns how many.
fn group<C: FloatCell, const TOKENS: usize>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    activations: &Activations,
    first: usize,
    out: &mut Columns<'_>,
) -> usize {
    let tokens: [&[f32]; TOKENS] = array::from_fn(|t| activations.values(first + t));
    let sums = kernels.call(PanelProduct { tiles, tokens });
    sums.iter().enumerate().for_each(|(t, sums)| out.write(first + t, sums));
    TOKENS
}

/// Two tiles with a few tokens.
struct PanelProduct<'a, C, const TOKENS: usize> {
    tiles: [&'a [C]; PANEL_TILES],
    tokens: [&'a [f32]; TOKENS],
}

impl<C: FloatCell, const TOKENS: usize> Kernel for PanelProduct<'_, C, TOKENS> {
    type Output = [[[f32; LANES]; PANEL_TILES]; TOKENS];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let mut out = [[[0.0; LANES]; PANEL_TILES]; TOKENS];
        if S::MANY_REGISTERS {
            let sums = register_tile(simd, self.tiles, self.tokens);
            for t in 0..TOKENS {
                for tile in 0..PANEL_TILES {
                    simd.store(sums[tile][t], &mut out[t][tile]);
                }
            }
        } else {
            for t in 0..TOKENS {
                let sums = register_tile(simd, self.tiles, [self.tokens[t]]);
                for tile in 0..PANEL_TILES {
                    simd.store(sums[tile][0], &mut out[t][tile]);
                }
            }
        }
        out
    }
}

#[inline(always)]
fn register_tile<S: Simd, C: FloatCell, const TOKENS: usize>(
    simd: S,
    tiles: [&[C]; PANEL_TILES],
    tokens: [&[f32]; TOKENS],
) -> [[S::F; TOKENS]; PANEL_TILES] {
    let mut sums = [[simd.splat(0.0); TOKENS]; PANEL_TILES];
    for col in 0..tiles[0].len() {
        let weights = [tiles[0][col].load(simd), tiles[1][col].load(simd)];
        for t in 0..TOKENS {
            let value = simd.splat(tokens[t][col]);
            for tile in 0..PANEL_TILES {
                sums[tile][t] = simd.fma(weights[tile], value, sums[tile][t]);
            }
        }
    }
    sums
}
