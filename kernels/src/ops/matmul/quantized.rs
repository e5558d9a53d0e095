//! Products with quantized weights: integer dot products of unsigned weight codes with signed activation codes.
//!
//! For each group of columns that shares a weight scale: `sum += (dot · activation scale) · weight scale`, and for
//! formats with a minimum `sum += minimum · (activation scale · Σ activation codes)`. The order of these steps is fixed;
//! the dot products are exact, so theirs does not matter.

use std::array;
use std::cell::RefCell;
use std::marker::PhantomData;

use super::output::Columns;
use super::{DIRECT_INPUTS, PANEL_TILES};
use crate::Activations;
use crate::activations::Block;
use crate::simd::{Kernel, Kernels, LANES, Simd};
use crate::weights::cell::{BLOCK, Codes, QuantizedCell};

/// One block of one tile unpacked: codes in bytes, scales in f32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct PanelBlock {
    codes: Codes,
    scales: [[f32; LANES]; 2],
    minimums: [[f32; LANES]; 2],
}

const EMPTY: PanelBlock = PanelBlock { codes: [[0; 64]; 8], scales: [[0.0; LANES]; 2], minimums: [[0.0; LANES]; 2] };

thread_local! {
    /// This worker's unpacked panel: `[block][tile]`.
    static PANEL: RefCell<Vec<PanelBlock>> = const { RefCell::new(Vec::new()) };
}

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
    if activations.inputs() <= DIRECT_INPUTS {
        multiply_direct(kernels, [first, second], activations, out);
    } else {
        let next = next.map_or(&[][..], cells_of);
        multiply_unpacked(kernels, [first, second], next, activations, out);
    }
}

fn multiply_direct<C: QuantizedCell>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    activations: &Activations,
    out: Columns<'_>,
) {
    match activations.inputs() {
        1 => direct_group::<C, 1>(kernels, tiles, activations, out),
        2 => direct_group::<C, 2>(kernels, tiles, activations, out),
        3 => direct_group::<C, 3>(kernels, tiles, activations, out),
        _ => direct_group::<C, DIRECT_INPUTS>(kernels, tiles, activations, out),
    }
}

fn direct_group<C: QuantizedCell, const INPUTS: usize>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    activations: &Activations,
    mut out: Columns<'_>,
) {
    let inputs = array::from_fn(|input| activations.blocks(input));
    let products = tiles.map(|cells| kernels.call(TileProduct::<C, INPUTS> { cells, inputs }));
    for input in 0..INPUTS {
        put(&mut out, activations.planes(), input, &[products[0][input], products[1][input]]);
    }
}

/// A token's result is the sum over its planes, which are inputs one after the other.
fn put(out: &mut Columns<'_>, planes: usize, input: usize, sums: &[[f32; LANES]; PANEL_TILES]) {
    match input % planes {
        0 => out.write(input / planes, sums),
        _ => out.add(input / planes, sums),
    }
}

fn multiply_unpacked<C: QuantizedCell>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    next: &[C],
    activations: &Activations,
    mut out: Columns<'_>,
) {
    PANEL.with_borrow_mut(|panel| {
        let blocks = activations.cols() / BLOCK;
        panel.resize(blocks * PANEL_TILES, EMPTY);
        kernels.call(Unpack { tiles, panel });
        let mut groups = Groups { kernels, panel, activations, prefetch: Prefetch::new(next, blocks), done: 0 };
        loop {
            match groups.left() {
                0 => break,
                1 => groups.multiply::<C, 1>(&mut out),
                2 | 3 => groups.multiply::<C, 2>(&mut out),
                _ => groups.multiply::<C, 4>(&mut out),
            }
        }
    });
}

/// The products of an unpacked panel, a few inputs at a time.
struct Groups<'a> {
    kernels: Kernels,
    panel: &'a [PanelBlock],
    activations: &'a Activations,
    prefetch: Prefetch,
    /// Inputs multiplied.
    done: usize,
}

impl Groups<'_> {
    fn left(&self) -> usize {
        self.activations.inputs() - self.done
    }

    fn multiply<C: QuantizedCell, const INPUTS: usize>(&mut self, out: &mut Columns<'_>) {
        let inputs = array::from_fn(|input| self.activations.blocks(self.done + input));
        let ahead = self.prefetch.share(INPUTS, self.left());
        let product = PanelProduct::<C, INPUTS> { panel: self.panel, inputs, ahead, cell: PhantomData };
        for (input, sums) in self.kernels.call(product).iter().enumerate() {
            put(out, self.activations.planes(), self.done + input, sums);
        }
        self.done += INPUTS;
    }
}

/// Weights that will be needed next, asked for bit by bit while others are multiplied.
struct Prefetch {
    start: *const u8,
    bytes: usize,
    /// Blocks of the panel that is being multiplied.
    blocks: usize,
}

/// What one product asks for: `lines` cache lines with each block.
#[derive(Clone, Copy)]
struct Ahead {
    start: *const u8,
    lines: usize,
}

/// Bytes of a cache line.
const LINE: usize = 64;

impl Prefetch {
    fn new<C>(cells: &[C], blocks: usize) -> Self {
        Prefetch { start: cells.as_ptr().cast(), bytes: size_of_val(cells), blocks }
    }

    /// The share of a product with `inputs` of the `left` inputs.
    fn share(&mut self, inputs: usize, left: usize) -> Ahead {
        let lines = (self.bytes * inputs / left).div_ceil(LINE * self.blocks);
        let ahead = Ahead { start: self.start, lines };
        let asked = (lines * self.blocks * LINE).min(self.bytes);
        self.start = self.start.wrapping_add(asked);
        self.bytes -= asked;
        ahead
    }
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
                    let [mut low, mut high] = start::<S, C>(simd, activation);
                    for j in 0..4 {
                        low = dot::<S, C>(simd, low, codes[j], activation.codes[j]);
                        high = dot::<S, C>(simd, high, codes[4 + j], activation.codes[4 + j]);
                    }
                    if C::SCALES == 2 {
                        sums[input] = accumulate(simd, sums[input], low, activation, scale);
                        sums[input] = accumulate(simd, sums[input], high, activation, second_scale);
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
fn start<S: Simd, C: QuantizedCell>(simd: S, activation: &Block) -> [S::I; 2] {
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

#[inline(always)]
fn dot<S: Simd, C: QuantizedCell>(simd: S, sum: S::I, codes: S::U, values: [i8; 4]) -> S::I {
    if C::OFFSET == 128 { simd.dot_biased(sum, codes, values) } else { simd.dot(sum, codes, values) }
}

#[inline(always)]
fn accumulate<S: Simd>(simd: S, sum: S::F, dot: S::I, activation: &Block, scale: S::F) -> S::F {
    simd.fma(simd.mul(simd.to_f32(dot), simd.splat(activation.scale)), scale, sum)
}

/// What minimum `index` multiplies: the sum of the block's activations, or of a half's where each half has its own.
#[inline(always)]
fn scaled_sum<C: QuantizedCell>(activation: &Block, index: usize) -> f32 {
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

/// A panel's tiles, `[block][tile]`; a tile that the matrix lacks is left as it was, and its results are dropped.
struct Unpack<'a, C> {
    tiles: [&'a [C]; PANEL_TILES],
    panel: &'a mut [PanelBlock],
}

impl<C: QuantizedCell> Kernel for Unpack<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let per_cell = C::COLS / BLOCK;
        for (tile, cells) in self.tiles.iter().enumerate() {
            for (i, cell) in cells.iter().enumerate() {
                for block in 0..per_cell {
                    let to = &mut self.panel[(i * per_cell + block) * PANEL_TILES + tile];
                    let codes = cell.codes(simd, block);
                    for j in 0..8 {
                        simd.store_bytes(codes[j], &mut to.codes[j]);
                    }
                    for index in 0..C::SCALES {
                        simd.store(cell.scale(simd, block, index), &mut to.scales[index]);
                    }
                    for index in 0..C::MINIMUMS {
                        simd.store(cell.minimum(simd, block, index), &mut to.minimums[index]);
                    }
                }
            }
        }
    }
}

/// An unpacked panel with a few inputs; the cell names the format.
struct PanelProduct<'a, C, const INPUTS: usize> {
    panel: &'a [PanelBlock],
    inputs: [&'a [Block]; INPUTS],
    ahead: Ahead,
    cell: PhantomData<C>,
}

impl<C: QuantizedCell, const INPUTS: usize> Kernel for PanelProduct<'_, C, INPUTS> {
    type Output = [[[f32; LANES]; PANEL_TILES]; INPUTS];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let mut out = [[[0.0; LANES]; PANEL_TILES]; INPUTS];
        if S::MANY_REGISTERS {
            let sums = register_tile::<S, C, PANEL_TILES, INPUTS>(simd, self.panel, 0, self.inputs, self.ahead);
            for input in 0..INPUTS {
                for tile in 0..PANEL_TILES {
                    simd.store(sums[tile][input], &mut out[input][tile]);
                }
            }
        } else {
            let mut ahead = self.ahead;
            for tile in 0..PANEL_TILES {
                for input in (0..INPUTS).step_by(2) {
                    if input + 1 < INPUTS {
                        let inputs = [self.inputs[input], self.inputs[input + 1]];
                        let [sums] = register_tile::<S, C, 1, 2>(simd, self.panel, tile, inputs, ahead);
                        simd.store(sums[0], &mut out[input][tile]);
                        simd.store(sums[1], &mut out[input + 1][tile]);
                    } else {
                        let [[sum]] = register_tile::<S, C, 1, 1>(simd, self.panel, tile, [self.inputs[input]], ahead);
                        simd.store(sum, &mut out[input][tile]);
                    }
                    ahead.lines = 0;
                }
            }
        }
        out
    }
}

/// `TILES · INPUTS` sums in registers while the columns go by.
#[inline(always)]
fn register_tile<S: Simd, C: QuantizedCell, const TILES: usize, const INPUTS: usize>(
    simd: S,
    panel: &[PanelBlock],
    first_tile: usize,
    inputs: [&[Block]; INPUTS],
    ahead: Ahead,
) -> [[S::F; INPUTS]; TILES] {
    let blocks = panel.len() / PANEL_TILES;
    let mut sums = [[simd.splat(0.0); INPUTS]; TILES];
    for block in 0..blocks {
        simd.prefetch(ahead.start.wrapping_add(block * ahead.lines * LINE), ahead.lines);
        let weights = &panel[block * PANEL_TILES + first_tile..][..TILES];
        let mut dots = [[simd.splat_i32(0); INPUTS]; TILES];
        let mut activations = [&inputs[0][block]; INPUTS];
        for input in 0..INPUTS {
            activations[input] = &inputs[input][block];
        }
        for half in 0..C::SCALES {
            for input in 0..INPUTS {
                let begin = start::<S, C>(simd, activations[input])[half];
                for tile in 0..TILES {
                    dots[tile][input] = begin;
                }
            }
            for j in half * 8 / C::SCALES..(half + 1) * 8 / C::SCALES {
                let mut codes = [simd.load_bytes(&weights[0].codes[j]); TILES];
                for tile in 0..TILES {
                    codes[tile] = simd.load_bytes(&weights[tile].codes[j]);
                }
                for input in 0..INPUTS {
                    for tile in 0..TILES {
                        dots[tile][input] =
                            dot::<S, C>(simd, dots[tile][input], codes[tile], activations[input].codes[j]);
                    }
                }
            }
            for tile in 0..TILES {
                let scale = simd.load(&weights[tile].scales[half]);
                for input in 0..INPUTS {
                    sums[tile][input] =
                        accumulate(simd, sums[tile][input], dots[tile][input], activations[input], scale);
                }
            }
        }
        for index in 0..C::MINIMUMS {
            for tile in 0..TILES {
                let minimum = simd.load(&weights[tile].minimums[index]);
                for input in 0..INPUTS {
                    let scaled_sum = simd.splat(scaled_sum::<C>(activations[input], index));
                    sums[tile][input] = simd.fma(minimum, scaled_sum, sums[tile][input]);
                }
            }
        }
    }
    sums
}
