//! Products of two tiles with many inputs: the tiles are unpacked once, a stretch of columns at a time.

use std::cell::RefCell;
use std::marker::PhantomData;

use super::PANEL_TILES;
use super::merged::{Merge, MergedProduct};
use super::output::Columns;
use super::quantized::{Lanes, multiply_codes, run_of, start, sum_of};
use crate::activations::blocks::{Block, Blocks, Group, SPAN_BLOCKS};
use crate::activations::grouping::PANEL_INPUTS;
use crate::simd::{Kernel, Kernels, LANES, Simd};
use crate::weights::cell::{BLOCK, Codes, QuantizedCell};

/// Blocks of columns in a stretch: with both tiles at most 96 KiB unpacked, which stay in the second-level cache beside
/// the inputs while all of those go by. Shorter ones that fit the first level lose more to their ends than they win.
const STRETCH_BLOCKS: usize = 64;

/// One block of one tile unpacked: codes in bytes, scales in f32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct PanelBlock {
    pub(super) codes: Codes,
    pub(super) scales: [[f32; LANES]; 2],
    pub(super) minimums: [[f32; LANES]; 2],
}

const EMPTY: PanelBlock = PanelBlock { codes: [[0; 64]; 8], scales: [[0.0; LANES]; 2], minimums: [[0.0; LANES]; 2] };

/// The results of one input.
pub(super) type Sums = [[f32; LANES]; PANEL_TILES];

/// A worker's buffers.
#[derive(Default)]
struct Scratch {
    /// The stretch, `[block][tile]`.
    panel: Vec<[PanelBlock; PANEL_TILES]>,
    /// Of each input, over the columns so far.
    sums: Vec<Sums>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// How a panel's columns are scaled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// As the format has them.
    OfTheFormat,
    /// By spans: codes are rounded to bytes for it.
    Merged,
}

/// Multiplies `tiles`, the second of which may be empty, with all inputs, and has the cache fetch the cells of `next`.
pub(super) fn multiply<C: QuantizedCell>(
    kernels: Kernels,
    tiles: [&[C]; PANEL_TILES],
    next: &[C],
    (inputs, scales): (&Blocks, Scales),
    planes: usize,
    mut out: Columns<'_>,
) {
    SCRATCH.with_borrow_mut(|Scratch { panel, sums }| {
        sums.clear();
        sums.resize(inputs.inputs(), [[0.0; LANES]; PANEL_TILES]);
        panel.resize(STRETCH_BLOCKS, [EMPTY; PANEL_TILES]);
        let per_cell = C::PARTS * C::COLS / BLOCK;
        let (cells, per_stretch) = (tiles[0].len(), STRETCH_BLOCKS / per_cell);
        for start in (0..cells).step_by(per_stretch) {
            let end = cells.min(start + per_stretch);
            let panel = &mut panel[..(end - start) * per_cell];
            let part = |tile: &'_ [C]| start.min(tile.len())..end.min(tile.len());
            kernels.call(Unpack { tiles: tiles.map(|tile| &tile[part(tile)]), panel });
            if scales == Scales::Merged {
                kernels.call(Merge::<C> { panel, cell: PhantomData });
            }
            let mut ahead = Ahead::new(&next[next.len() * start / cells..next.len() * end / cells]);
            for group in inputs.groups() {
                let product =
                    Stretch { panel, first_block: start * per_cell / C::PARTS, ahead: ahead.take(panel.len()) };
                let of_group = group.first..group.first + group.size;
                product.multiply::<C>(kernels, group, scales, sums);
                // Sums that are whole leave while the cache still has them.
                if end == cells {
                    of_group.for_each(|input| out.put(planes, input, &sums[input]));
                }
            }
        }
    });
}

/// Two tiles' columns from block `first_block` of them on.
#[derive(Clone, Copy)]
struct Stretch<'a> {
    panel: &'a [[PanelBlock; PANEL_TILES]],
    first_block: usize,
    /// What the cache is asked for meanwhile.
    ahead: *const u8,
}

impl Stretch<'_> {
    /// Adds a group's products to the sums of all inputs.
    fn multiply<C: QuantizedCell>(self, kernels: Kernels, group: Group<'_>, scales: Scales, sums: &mut [Sums]) {
        let (inputs, sums) = ((group, scales), &mut sums[group.first..]);
        match group.size {
            1 => self.multiply_group::<C, 1>(kernels, inputs, sums),
            2 => self.multiply_group::<C, 2>(kernels, inputs, sums),
            4 => self.multiply_group::<C, 4>(kernels, inputs, sums),
            PANEL_INPUTS => self.multiply_group::<C, PANEL_INPUTS>(kernels, inputs, sums),
            size => unreachable!("no group has {size} inputs"),
        }
    }

    fn multiply_group<C: QuantizedCell, const INPUTS: usize>(
        self,
        kernels: Kernels,
        (group, scales): (Group<'_>, Scales),
        sums: &mut [Sums],
    ) {
        let blocks = &group.blocks[self.first_block * INPUTS..][..self.panel.len() / C::PARTS * INPUTS];
        if let Some(sums) = sums.first_chunk_mut() {
            let Stretch { panel, ahead, .. } = self;
            match scales {
                Scales::OfTheFormat => {
                    kernels.call(PanelProduct::<C, INPUTS> { panel, blocks, ahead, sums, cell: PhantomData });
                }
                Scales::Merged => {
                    let negated_sums = &group.negated_sums[self.first_block / SPAN_BLOCKS * INPUTS..];
                    kernels.call(MergedProduct::<INPUTS> { panel, blocks, negated_sums, ahead, sums });
                }
            }
        }
    }
}

/// Weights that will be needed next, asked for bit by bit while others are multiplied.
struct Ahead {
    start: *const u8,
    bytes: usize,
}

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Lines that a product asks for with each block.
pub(super) const LINES_AHEAD: usize = 2;

impl Ahead {
    fn new<C>(cells: &[C]) -> Self {
        Ahead { start: cells.as_ptr().cast(), bytes: size_of_val(cells) }
    }

    /// Where a product of so many blocks starts to ask.
    fn take(&mut self, blocks: usize) -> *const u8 {
        let (ahead, asked) = (self.start, self.bytes.min(blocks * LINES_AHEAD * LINE));
        self.start = self.start.wrapping_add(asked);
        self.bytes -= asked;
        ahead
    }
}

/// A stretch of both tiles, `[block][tile]`; a tile that the matrix lacks is left as it was, and its results are dropped.
struct Unpack<'a, C> {
    tiles: [&'a [C]; PANEL_TILES],
    panel: &'a mut [[PanelBlock; PANEL_TILES]],
}

impl<C: QuantizedCell> Kernel for Unpack<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let per_cell = C::PARTS * C::COLS / BLOCK;
        for (tile, cells) in self.tiles.iter().enumerate() {
            for (i, cell) in cells.iter().enumerate() {
                for block in 0..per_cell {
                    let to = &mut self.panel[i * per_cell + block][tile];
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

/// An unpacked stretch with the inputs of a group, whose sums go on; the cell names the format.
struct PanelProduct<'a, C, const INPUTS: usize> {
    panel: &'a [[PanelBlock; PANEL_TILES]],
    /// `[block of columns][INPUTS]`.
    blocks: &'a [Block],
    ahead: *const u8,
    sums: &'a mut [Sums; INPUTS],
    cell: PhantomData<C>,
}

impl<C: QuantizedCell, const INPUTS: usize> Kernel for PanelProduct<'_, C, INPUTS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PanelProduct { panel, blocks, ahead, sums, .. } = self;
        let lanes = Lanes { blocks, size: INPUTS, first: 0 };
        if S::MANY_REGISTERS {
            return many_registers::<S, C, INPUTS>(simd, panel, lanes, ahead, sums);
        }
        if !S::REGISTERS {
            return one_by_one::<S, C>(simd, panel, lanes, sums);
        }
        let mut ahead = Some(ahead);
        for tile in 0..PANEL_TILES {
            let (pairs, last) = sums.as_chunks_mut();
            for (i, pair) in pairs.iter_mut().enumerate() {
                register_tile::<S, C, 1, 2>(simd, panel, tile, Lanes { first: 2 * i, ..lanes }, ahead.take(), pair);
            }
            for sums in last {
                let last = Lanes { first: INPUTS - 1, ..lanes };
                register_tile::<S, C, 1, 1>(simd, panel, tile, last, ahead.take(), std::array::from_mut(sums));
            }
        }
    }
}

/// With thirty-two registers: a tile at a time where its dot products alone hide each other's latency, as those of both
/// tiles leave too few registers for what they are scaled by; both where what halves have for themselves costs more.
#[inline(always)]
fn many_registers<S: Simd, C: QuantizedCell, const INPUTS: usize>(
    simd: S,
    panel: &[[PanelBlock; PANEL_TILES]],
    lanes: Lanes<'_>,
    ahead: *const u8,
    sums: &mut [Sums; INPUTS],
) {
    if INPUTS < PANEL_INPUTS || C::MINIMUMS == 2 {
        return register_tile::<S, C, PANEL_TILES, INPUTS>(simd, panel, 0, lanes, Some(ahead), sums);
    }
    register_tile::<S, C, 1, INPUTS>(simd, panel, 0, lanes, Some(ahead), sums);
    register_tile::<S, C, 1, INPUTS>(simd, panel, 1, lanes, None, sums);
}

/// Every sum alone, compiled once for any number of inputs.
#[inline(never)]
fn one_by_one<S: Simd, C: QuantizedCell>(
    simd: S,
    panel: &[[PanelBlock; PANEL_TILES]],
    lanes: Lanes<'_>,
    sums: &mut [Sums],
) {
    for (first, sums) in sums.iter_mut().enumerate() {
        for tile in 0..PANEL_TILES {
            let lanes = Lanes { first, ..lanes };
            register_tile::<S, C, 1, 1>(simd, panel, tile, lanes, None, std::array::from_mut(sums));
        }
    }
}

/// `TILES · INPUTS` sums, from tile `first_tile` on, which stay in registers while the blocks go by.
#[inline(always)]
fn register_tile<S: Simd, C: QuantizedCell, const TILES: usize, const INPUTS: usize>(
    simd: S,
    panel: &[[PanelBlock; PANEL_TILES]],
    first_tile: usize,
    lanes: Lanes<'_>,
    ahead: Option<*const u8>,
    to: &mut [Sums; INPUTS],
) {
    let mut sums = [[simd.splat(0.0); INPUTS]; TILES];
    for tile in 0..TILES {
        for input in 0..INPUTS {
            sums[tile][input] = simd.load(&to[input][first_tile + tile]);
        }
    }
    for (block, weights) in panel.iter().enumerate() {
        if let Some(ahead) = ahead {
            simd.prefetch(ahead.wrapping_add(block * LINES_AHEAD * LINE), LINES_AHEAD);
        }
        add_block::<S, C, TILES, INPUTS>(simd, weights, first_tile, lanes.at(block / C::PARTS), &mut sums);
    }
    for tile in 0..TILES {
        for input in 0..INPUTS {
            simd.store(sums[tile][input], &mut to[input][first_tile + tile]);
        }
    }
}

/// Adds a block's products to the sums.
#[inline(always)]
fn add_block<S: Simd, C: QuantizedCell, const TILES: usize, const INPUTS: usize>(
    simd: S,
    weights: &[PanelBlock; PANEL_TILES],
    first_tile: usize,
    activations: &[Block; INPUTS],
    sums: &mut [[S::F; INPUTS]; TILES],
) {
    let mut parts = [[simd.splat(0.0); INPUTS]; TILES];
    for half in 0..C::SCALES {
        let dots = dots::<S, C, TILES, INPUTS>(simd, weights, first_tile, activations, half);
        for tile in 0..TILES {
            let scale = simd.load(&weights[first_tile + tile].scales[half]);
            for input in 0..INPUTS {
                let dot = simd.to_f32(dots[tile][input]);
                parts[tile][input] =
                    if half == 0 { simd.mul(dot, scale) } else { simd.fma(dot, scale, parts[tile][input]) };
            }
        }
    }
    for index in 0..C::MINIMUMS {
        for tile in 0..TILES {
            let minimum = simd.load(&weights[first_tile + tile].minimums[index]);
            for input in 0..INPUTS {
                let sum = sum_of::<S, C>(simd, &activations[input], index);
                parts[tile][input] = simd.fma(minimum, sum, parts[tile][input]);
            }
        }
    }
    for input in 0..INPUTS {
        let scale = simd.splat(activations[input].scale);
        for tile in 0..TILES {
            sums[tile][input] = simd.fma(parts[tile][input], scale, sums[tile][input]);
        }
    }
}

/// The dot products of the columns that share scale `half`.
#[inline(always)]
fn dots<S: Simd, C: QuantizedCell, const TILES: usize, const INPUTS: usize>(
    simd: S,
    weights: &[PanelBlock; PANEL_TILES],
    first_tile: usize,
    activations: &[Block; INPUTS],
    half: usize,
) -> [[S::I; INPUTS]; TILES] {
    let mut dots = [[simd.splat_i32(0); INPUTS]; TILES];
    for input in 0..INPUTS {
        let begin = start::<S, C>(simd, &activations[input])[half];
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
            let mut codes = [simd.load_bytes(&weights[first_tile].codes[j]); TILES];
            for tile in 0..TILES {
                codes[tile] = simd.load_bytes(&weights[first_tile + tile].codes[j]);
            }
            for input in 0..INPUTS {
                let values = activations[input].codes[j];
                for tile in 0..TILES {
                    products[tile][input] = multiply_codes::<S, C>(simd, products[tile][input], codes[tile], values);
                }
            }
        }
        for input in 0..INPUTS {
            for tile in 0..TILES {
                dots[tile][input] = simd.close(dots[tile][input], products[tile][input]);
            }
        }
    }
    dots
}
