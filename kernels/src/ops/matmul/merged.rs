//! Panels whose columns have scales by spans of 256 instead of their formats' own: codes are rounded to bytes for that.
//!
//! A product then scales a dot product once in 64 instructions and not in eight, or four. That rounds a weight by half a 127th of
//! its span's largest one at most, which costs about as much precision as rounding inputs by as many values does.

use std::marker::PhantomData;
use std::ops::Range;

use super::PANEL_TILES;
use super::panel::{LINE, LINES_AHEAD, PanelBlock, Sums};
use super::quantized::Lanes;
use crate::activations::blocks::{Block, NEGLIGIBLE, SPAN_BLOCKS};
use crate::simd::{Kernel, LANES, Simd};
use crate::weights::cell::{Codes, QuantizedCell};

/// What merged codes have added to them.
const BIAS: f32 = 128.0;

/// Added to a number below it, leaves the nearest integer in its lowest bits, ties to even.
const TO_INTEGER: f32 = 8_388_608.0;

/// A number for each row.
type Rows = [f32; LANES];

/// Rounds an unpacked panel's codes, whose cell names the format, to bytes with one scale for a span, which its first block
/// keeps.
pub(super) struct Merge<'a, C> {
    pub(super) panel: &'a mut [[PanelBlock; PANEL_TILES]],
    pub(super) cell: PhantomData<C>,
}

impl<C: QuantizedCell> Kernel for Merge<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        for span in self.panel.chunks_mut(SPAN_BLOCKS) {
            for tile in 0..PANEL_TILES {
                merge::<C>(span, tile);
            }
        }
    }
}

#[inline(always)]
fn merge<C: QuantizedCell>(span: &mut [[PanelBlock; PANEL_TILES]], tile: usize) {
    let mut largest = [0.0; LANES];
    for block in span.iter() {
        for half in 0..C::SCALES {
            raise::<C>(&mut largest, &block[tile], half);
        }
    }
    let (mut scales, mut inverses) = ([0.0; LANES], [0.0; LANES]);
    for row in 0..LANES {
        scales[row] = largest[row] / 127.0;
        inverses[row] = if largest[row] > NEGLIGIBLE { 127.0 / largest[row] } else { 0.0 };
    }
    for block in span.iter_mut() {
        for half in 0..C::SCALES {
            round::<C>(&mut block[tile], half, &inverses);
        }
    }
    span[0][tile].scales[0] = scales;
}

/// The vectors of codes that share scale `half`.
#[inline(always)]
fn vectors<C: QuantizedCell>(half: usize) -> Range<usize> {
    const VECTORS: usize = size_of::<Codes>() / 64;
    half * VECTORS / C::SCALES..(half + 1) * VECTORS / C::SCALES
}

/// What a half's weights are for each row: code · scale + base.
#[inline(always)]
fn terms<C: QuantizedCell>(block: &PanelBlock, half: usize) -> (Rows, Rows) {
    let (scales, mut bases) = (block.scales[half], [0.0; LANES]);
    for row in 0..LANES {
        let minimum = if C::MINIMUMS == 0 { 0.0 } else { block.minimums[half % C::MINIMUMS.max(1)][row] };
        bases[row] = minimum - C::OFFSET as f32 * scales[row];
    }
    (scales, bases)
}

/// Raises each row's largest magnitude to that of its weights in a half.
#[inline(always)]
fn raise<C: QuantizedCell>(largest: &mut Rows, block: &PanelBlock, half: usize) {
    let (mut least, mut most) = ([u8::MAX; 64], [0; 64]);
    for codes in &block.codes[vectors::<C>(half)] {
        for i in 0..64 {
            least[i] = least[i].min(codes[i]);
            most[i] = most[i].max(codes[i]);
        }
    }
    let (scales, bases) = terms::<C>(block, half);
    for row in 0..LANES {
        let of_row = 4 * row..4 * row + 4;
        let least = least[of_row.clone()].iter().fold(u8::MAX, |least, &code| least.min(code));
        let most = most[of_row].iter().fold(0, |most: u8, &code| most.max(code));
        for code in [least, most] {
            largest[row] = largest[row].max((f32::from(code) * scales[row] + bases[row]).abs());
        }
    }
}

/// Rounds a half's codes to bytes of which a row's inverse scale is given.
#[inline(always)]
fn round<C: QuantizedCell>(block: &mut PanelBlock, half: usize, inverses: &Rows) {
    let (mut scales, mut bases) = terms::<C>(block, half);
    for row in 0..LANES {
        scales[row] *= inverses[row];
        bases[row] = bases[row] * inverses[row] + BIAS;
    }
    for codes in &mut block.codes[vectors::<C>(half)] {
        let words: &mut [[u8; 4]] = codes.as_chunks_mut().0;
        for row in 0..LANES {
            let (word, mut merged) = (u32::from_le_bytes(words[row]), 0);
            for at in [0, 8, 16, 24] {
                let code = (word >> at & 0xff).cast_signed() as f32;
                let rounded = (code * scales[row] + bases[row] + TO_INTEGER).to_bits();
                merged |= (rounded & 0xff) << at;
            }
            words[row] = merged.to_le_bytes();
        }
    }
}

/// A merged stretch with the inputs of a group, whose sums go on.
pub(super) struct MergedProduct<'a, const INPUTS: usize> {
    pub(super) panel: &'a [[PanelBlock; PANEL_TILES]],
    /// `[block of columns][INPUTS]`, with one scale for a span.
    pub(super) blocks: &'a [Block],
    /// `[span][INPUTS]`.
    pub(super) negated_sums: &'a [i32],
    pub(super) ahead: *const u8,
    pub(super) sums: &'a mut [Sums; INPUTS],
}

impl<const INPUTS: usize> Kernel for MergedProduct<'_, INPUTS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let MergedProduct { panel, blocks, negated_sums, ahead, sums } = self;
        let inputs = Inputs { lanes: Lanes { blocks, size: INPUTS, first: 0 }, negated_sums };
        if S::MANY_REGISTERS {
            return spans::<S, PANEL_TILES, INPUTS>(simd, panel, 0, inputs, Some(ahead), sums);
        }
        for (first, sums) in sums.iter_mut().enumerate() {
            one_by_one(simd, panel, Inputs { lanes: Lanes { first, ..inputs.lanes }, ..inputs }, sums);
        }
    }
}

/// Some inputs of a group.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    lanes: Lanes<'a>,
    /// `[span][inputs of the group]`.
    negated_sums: &'a [i32],
}

impl Inputs<'_> {
    /// Where the dot products of span `span` start, so that the codes' bias cancels out.
    #[inline(always)]
    fn start<S: Simd, const INPUTS: usize>(self, simd: S, span: usize) -> [S::I; INPUTS] {
        let Some(sums) = self.negated_sums[span * self.lanes.size + self.lanes.first..].first_chunk::<INPUTS>() else {
            unreachable!("a span has sums for all inputs")
        };
        let mut start = [simd.splat_i32(0); INPUTS];
        for input in 0..INPUTS {
            start[input] = simd.start_biased(simd.splat_i32(sums[input]));
        }
        start
    }
}

/// An input's sums alone, compiled once for any number of inputs.
#[inline(never)]
fn one_by_one<S: Simd>(simd: S, panel: &[[PanelBlock; PANEL_TILES]], inputs: Inputs<'_>, sums: &mut Sums) {
    for tile in 0..PANEL_TILES {
        spans::<S, 1, 1>(simd, panel, tile, inputs, None, std::array::from_mut(sums));
    }
}

/// Adds the products of all spans to `TILES · INPUTS` sums, from tile `first_tile` on.
#[inline(always)]
fn spans<S: Simd, const TILES: usize, const INPUTS: usize>(
    simd: S,
    panel: &[[PanelBlock; PANEL_TILES]],
    first_tile: usize,
    inputs: Inputs<'_>,
    ahead: Option<*const u8>,
    to: &mut [Sums; INPUTS],
) {
    for (index, span) in panel.chunks(SPAN_BLOCKS).enumerate() {
        let first = index * SPAN_BLOCKS;
        if let Some(ahead) = ahead {
            simd.prefetch(ahead.wrapping_add(first * LINES_AHEAD * LINE), LINES_AHEAD * span.len());
        }
        let start = inputs.start::<S, INPUTS>(simd, index);
        let dots = dots::<S, TILES, INPUTS>(simd, span, first_tile, inputs.lanes, (first, start));
        let activations: &[Block; INPUTS] = inputs.lanes.at(first);
        for tile in 0..TILES {
            let scale = simd.load(&span[0][first_tile + tile].scales[0]);
            for input in 0..INPUTS {
                let part = simd.mul(simd.to_f32(dots[tile][input]), scale);
                let sum = &mut to[input][first_tile + tile];
                simd.store(simd.fma(part, simd.splat(activations[input].scale), simd.load(sum)), sum);
            }
        }
    }
}

/// The dot products of a span, which is block `first` of the inputs and those behind it.
#[inline(always)]
fn dots<S: Simd, const TILES: usize, const INPUTS: usize>(
    simd: S,
    span: &[[PanelBlock; PANEL_TILES]],
    first_tile: usize,
    lanes: Lanes<'_>,
    (first, start): (usize, [S::I; INPUTS]),
) -> [[S::I; INPUTS]; TILES] {
    let mut dots = [start; TILES];
    for (block, weights) in span.iter().enumerate() {
        let activations: &[Block; INPUTS] = lanes.at(first + block);
        for j in 0..8 {
            let mut codes = [simd.load_bytes(&weights[first_tile].codes[j]); TILES];
            for tile in 1..TILES {
                codes[tile] = simd.load_bytes(&weights[first_tile + tile].codes[j]);
            }
            for input in 0..INPUTS {
                let values = activations[input].codes[j];
                for tile in 0..TILES {
                    let products = simd.multiply_biased(simd.open(dots[tile][input]), codes[tile], values);
                    dots[tile][input] = simd.close(dots[tile][input], products);
                }
            }
        }
    }
    dots
}
