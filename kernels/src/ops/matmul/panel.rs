//! Products of two tiles with many inputs: the tiles are unpacked once, a stretch of columns at a time.

use std::array;
use std::cell::RefCell;
use std::marker::PhantomData;

use super::PANEL_TILES;
use super::output::Columns;
use super::quantized::{accumulate, add_half, first_half, multiply_codes, run_of, scaled_sum, start};
use crate::Activations;
use crate::activations::Block;
use crate::simd::{Kernel, Kernels, LANES, Simd};
use crate::weights::cell::{BLOCK, Codes, QuantizedCell};

/// Blocks of columns in a stretch: with both tiles at most 96 KiB unpacked, which stay in the second-level cache beside
/// the inputs while all of those go by. Shorter ones that fit the first level lose more to their ends than they win.
const STRETCH_BLOCKS: usize = 64;

/// Inputs that are multiplied at a time: with two tiles as many dot products as hide each other's latency, and few
/// enough for them and their sums to stay in registers.
const GROUP: usize = 6;

/// The same where a block's first half waits for its second.
const GROUP_OF_HALVES: usize = 4;

/// One block of one tile unpacked: codes in bytes, scales in f32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct PanelBlock {
    codes: Codes,
    scales: [[f32; LANES]; 2],
    minimums: [[f32; LANES]; 2],
}

const EMPTY: PanelBlock = PanelBlock { codes: [[0; 64]; 8], scales: [[0.0; LANES]; 2], minimums: [[0.0; LANES]; 2] };

/// The results of one input.
type Sums = [[f32; LANES]; PANEL_TILES];

/// A worker's buffers.
#[derive(Default)]
struct Scratch {
    /// The stretch, `[block][tile]`.
    panel: Vec<PanelBlock>,
    /// Of each input, over the columns so far.
    sums: Vec<Sums>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Multiplies `tiles`, the second of which may be empty, with all inputs, and has the cache fetch the cells of `next`.
pub(super) fn multiply<C: QuantizedCell>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    next: &[C],
    activations: &Activations,
    mut out: Columns<'_>,
) {
    SCRATCH.with_borrow_mut(|Scratch { panel, sums }| {
        sums.clear();
        sums.resize(activations.inputs(), [[0.0; LANES]; PANEL_TILES]);
        let per_cell = C::COLS / BLOCK;
        let (cells, per_stretch) = (tiles[0].len(), STRETCH_BLOCKS / per_cell);
        panel.resize(STRETCH_BLOCKS * PANEL_TILES, EMPTY);
        for start in (0..cells).step_by(per_stretch) {
            let end = cells.min(start + per_stretch);
            let panel = &mut panel[..(end - start) * per_cell * PANEL_TILES];
            let part = |tile: &'_ [C]| start.min(tile.len())..end.min(tile.len());
            kernels.call(Unpack { tiles: tiles.map(|tile| &tile[part(tile)]), panel });
            let share = &next[next.len() * start / cells..next.len() * end / cells];
            let prefetch = Prefetch::new(share, (end - start) * per_cell);
            Groups { kernels, panel, activations, first_block: start * per_cell, prefetch, done: 0 }.run::<C>(sums);
        }
        for (input, sums) in sums.iter().enumerate() {
            out.put(activations.planes(), input, sums);
        }
    });
}

/// The products of a stretch, a few inputs at a time.
struct Groups<'a> {
    kernels: Kernels,
    panel: &'a [PanelBlock],
    activations: &'a Activations,
    /// Where the stretch starts in an input.
    first_block: usize,
    prefetch: Prefetch,
    /// Inputs multiplied.
    done: usize,
}

impl Groups<'_> {
    fn run<C: QuantizedCell>(&mut self, sums: &mut [Sums]) {
        loop {
            match sums.len() - self.done {
                0 => break,
                1 => self.multiply::<C, 1>(sums),
                2 | 3 => self.multiply::<C, 2>(sums),
                4.. if C::SCALES == 2 => self.multiply::<C, GROUP_OF_HALVES>(sums),
                4 | 5 => self.multiply::<C, 4>(sums),
                _ => self.multiply::<C, GROUP>(sums),
            }
        }
    }

    fn multiply<C: QuantizedCell, const INPUTS: usize>(&mut self, sums: &mut [Sums]) {
        let blocks = self.first_block..self.first_block + self.panel.len() / PANEL_TILES;
        let inputs = array::from_fn(|input| &self.activations.blocks(self.done + input)[blocks.clone()]);
        let ahead = self.prefetch.share(INPUTS, sums.len() - self.done);
        if let Some((sums, _)) = sums[self.done..].split_first_chunk_mut() {
            self.kernels.call(PanelProduct::<C, INPUTS> { panel: self.panel, inputs, ahead, sums, cell: PhantomData });
        }
        self.done += INPUTS;
    }
}

/// Weights that will be needed next, asked for bit by bit while others are multiplied.
struct Prefetch {
    start: *const u8,
    bytes: usize,
    /// Blocks of the stretch that is being multiplied.
    blocks: usize,
}

/// What one product asks for: `lines` cache lines with each block.
#[derive(Clone, Copy)]
struct Ahead {
    start: *const u8,
    lines: usize,
}

impl Ahead {
    const NOTHING: Ahead = Ahead { start: std::ptr::null(), lines: 0 };
}

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

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

/// A stretch of both tiles, `[block][tile]`; a tile that the matrix lacks is left as it was, and its results are dropped.
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

/// An unpacked stretch with a few inputs, whose sums go on; the cell names the format.
struct PanelProduct<'a, C, const INPUTS: usize> {
    panel: &'a [PanelBlock],
    inputs: [&'a [Block]; INPUTS],
    ahead: Ahead,
    sums: &'a mut [Sums; INPUTS],
    cell: PhantomData<C>,
}

impl<C: QuantizedCell, const INPUTS: usize> Kernel for PanelProduct<'_, C, INPUTS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if !S::REGISTERS {
            return one_by_one::<S, C>(simd, self.panel, &self.inputs, self.sums);
        }
        if S::MANY_REGISTERS {
            return register_tile::<S, C, PANEL_TILES, INPUTS>(simd, self.panel, 0, self.inputs, self.ahead, self.sums);
        }
        let mut ahead = self.ahead;
        for tile in 0..PANEL_TILES {
            for (inputs, sums) in self.inputs.chunks(2).zip(self.sums.chunks_mut(2)) {
                match (inputs, sums) {
                    ([a, b], [to_a, to_b]) => {
                        let mut pair = [*to_a, *to_b];
                        register_tile::<S, C, 1, 2>(simd, self.panel, tile, [a, b], ahead, &mut pair);
                        [*to_a, *to_b] = pair;
                    }
                    (inputs, sums) => {
                        for (input, sum) in inputs.iter().zip(sums) {
                            let mut only = [*sum];
                            register_tile::<S, C, 1, 1>(simd, self.panel, tile, [input], ahead, &mut only);
                            [*sum] = only;
                        }
                    }
                }
                ahead.lines = 0;
            }
        }
    }
}

/// Every sum alone, compiled once for any number of inputs.
#[inline(never)]
fn one_by_one<S: Simd, C: QuantizedCell>(simd: S, panel: &[PanelBlock], inputs: &[&[Block]], sums: &mut [Sums]) {
    for (input, sums) in inputs.iter().zip(sums) {
        for tile in 0..PANEL_TILES {
            register_tile::<S, C, 1, 1>(simd, panel, tile, [input], Ahead::NOTHING, array::from_mut(sums));
        }
    }
}

/// `TILES · INPUTS` sums in registers while the columns go by, from tile `first_tile` on.
#[inline(always)]
fn register_tile<S: Simd, C: QuantizedCell, const TILES: usize, const INPUTS: usize>(
    simd: S,
    panel: &[PanelBlock],
    first_tile: usize,
    inputs: [&[Block]; INPUTS],
    ahead: Ahead,
    to: &mut [Sums; INPUTS],
) {
    let blocks = panel.len() / PANEL_TILES;
    let mut sums = [[simd.splat(0.0); INPUTS]; TILES];
    for tile in 0..TILES {
        for input in 0..INPUTS {
            sums[tile][input] = simd.load(&to[input][first_tile + tile]);
        }
    }
    for block in 0..blocks {
        simd.prefetch(ahead.start.wrapping_add(block * ahead.lines * LINE), ahead.lines);
        let weights = &panel[block * PANEL_TILES + first_tile..][..TILES];
        let mut dots = [[simd.splat_i32(0); INPUTS]; TILES];
        let mut halves = sums;
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
            let run = const { run_of::<S, C>(8 / C::SCALES) };
            for from in (half * 8 / C::SCALES..(half + 1) * 8 / C::SCALES).step_by(run) {
                let mut products = [[simd.open(dots[0][0]); INPUTS]; TILES];
                for input in 0..INPUTS {
                    for tile in 0..TILES {
                        products[tile][input] = simd.open(dots[tile][input]);
                    }
                }
                for j in from..from + run {
                    let mut codes = [simd.load_bytes(&weights[0].codes[j]); TILES];
                    for tile in 0..TILES {
                        codes[tile] = simd.load_bytes(&weights[tile].codes[j]);
                    }
                    for input in 0..INPUTS {
                        let values = activations[input].codes[j];
                        for tile in 0..TILES {
                            products[tile][input] =
                                multiply_codes::<S, C>(simd, products[tile][input], codes[tile], values);
                        }
                    }
                }
                for input in 0..INPUTS {
                    for tile in 0..TILES {
                        dots[tile][input] = simd.close(dots[tile][input], products[tile][input]);
                    }
                }
            }
            for tile in 0..TILES {
                let scale = simd.load(&weights[tile].scales[half]);
                for input in 0..INPUTS {
                    let (sum, dot, activation) = (sums[tile][input], dots[tile][input], activations[input]);
                    if C::SCALES == 1 {
                        sums[tile][input] = accumulate(simd, sum, dot, activation, scale);
                    } else if half == 0 {
                        halves[tile][input] = first_half(simd, dot, scale);
                    } else {
                        let part = add_half(simd, halves[tile][input], dot, scale);
                        sums[tile][input] = simd.fma(part, simd.splat(activation.scale), sum);
                    }
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
    for tile in 0..TILES {
        for input in 0..INPUTS {
            simd.store(sums[tile][input], &mut to[input][first_tile + tile]);
        }
    }
}
