//! Matrix products of activations with packed weights.
//!
//! Every output is the same sum in the same order however many tokens and threads there are: quantized weights add, in
//! f32 and block by block, exact integer dot products of 32 (or 16) columns; float weights add column by column. An
//! input is one plane of one token's activations ([`crate::ActivationType`]). What changes with their number is only how often
//! a weight is loaded:
//!
//! - up to four, or sixteen where the instruction set has registers for their sums ([`Grouping`]): each tile is unpacked
//!   in registers on its way from memory (a product of a matrix and a few vectors, bound by memory at first);
//! - above: a stretch of two tiles is unpacked into the first-level cache and multiplied with all of them, a few at a time,
//!   then the next stretch of columns goes on from their sums. Where inputs may round by their number
//!   ([`Activations::varying`]), K-quants are rounded to 8 bits there, with a scale for 256 columns.

mod float;
mod merged;
mod output;
mod panel;
mod quantized;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::activations::grouping::Grouping;
use crate::simd::Kernels;
use crate::weights::Tiles;
use crate::weights::cell::TILE_ROWS;
use crate::{Activations, PackedMatrix, Pool};
use output::Output;

/// Tiles of a panel.
pub(super) const PANEL_TILES: usize = 2;

/// Where weights stream from memory, a worker takes one of so many parts, for each worker, of what is left: long streams
/// first, which the processor fetches ahead, and short ones last, so that all end together.
const PARTS_LEFT: usize = 3;

/// One product of a [`matmul_many`] call.
#[derive(Debug)]
pub struct Product<'a> {
    /// The weights, `[rows, cols]`.
    pub matrix: &'a PackedMatrix,
    /// The result, `[tokens, rows]` row-major.
    pub out: &'a mut [f32],
}

/// `out[t][r] = Σ_c activations[t][c] · matrix[r][c]`, with `out` as `[tokens, rows]` row-major.
///
/// # Panics
/// When the shapes differ, or the activations were loaded for another kind of matrix.
pub fn matmul(pool: &Pool, activations: &Activations, matrix: &PackedMatrix, out: &mut [f32]) {
    matmul_many(pool, activations, &mut [Product { matrix, out }]);
}

/// [`matmul`] of the same activations with several matrices in one parallel region: q, k, v, or gate and up.
///
/// # Panics
/// When the shapes differ, or the activations were loaded for another kind of matrix.
pub fn matmul_many(pool: &Pool, activations: &Activations, products: &mut [Product<'_>]) {
    let tokens = activations.tokens();
    if tokens == 0 {
        return;
    }
    let region = Region::new(pool, activations, products);
    pool.run(|_| region.work());
}

/// The products of one call: their panels, one product after the other, are what workers take.
struct Region<'a> {
    kernels: Kernels,
    activations: &'a Activations,
    jobs: Vec<Job<'a>>,
    /// Panels of all jobs.
    panels: usize,
    /// Parts of the panels left that a worker takes one of at a time; absent where it takes one panel.
    parts: Option<usize>,
    /// The first panel that no worker has taken.
    next: AtomicUsize,
}

/// A product in progress.
struct Job<'a> {
    matrix: &'a PackedMatrix,
    out: Output<'a>,
    /// Of the region's panels, the matrix's.
    panels: Range<usize>,
}

impl<'a> Region<'a> {
    fn new(pool: &Pool, activations: &'a Activations, products: &'a mut [Product<'_>]) -> Self {
        let tokens = activations.tokens();
        let mut panels = 0;
        let mut jobs = Vec::with_capacity(products.len());
        for Product { matrix, out } in products {
            assert_eq!(matrix.cols(), activations.cols(), "cols of weights and activations");
            let first = panels;
            panels += matrix.rows().div_ceil(PANEL_TILES * TILE_ROWS);
            jobs.push(Job { matrix, out: Output::new(out, tokens, matrix.rows()), panels: first..panels });
        }
        let direct = Grouping::of(pool.kernels(), activations.inputs()) == Grouping::Direct;
        let parts = direct.then_some(PARTS_LEFT * pool.threads());
        Region { kernels: pool.kernels(), activations, jobs, panels, parts, next: AtomicUsize::new(0) }
    }

    /// Takes panels until none is left, always one ahead, so that the next one's weights can come from memory while
    /// this one's are multiplied.
    fn work(&self) {
        let mut claimed = 0..0;
        let mut claim = || {
            if claimed.is_empty() {
                claimed = self.take();
            }
            claimed.next()
        };
        let mut current = claim();
        while let Some(panel) = current {
            current = claim();
            self.multiply(panel, current);
        }
    }

    /// Panels that no other worker has; none when all are taken.
    fn take(&self) -> Range<usize> {
        let count = |left: usize| self.parts.map_or(1, |parts| left.div_ceil(parts));
        let end = |start: usize| (start < self.panels).then(|| start + count(self.panels - start));
        match self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end) {
            Ok(start) => start..start + count(self.panels - start),
            Err(_) => 0..0,
        }
    }

    fn multiply(&self, panel: usize, next: Option<usize>) {
        let Some(job) = self.jobs.iter().find(|job| job.panels.contains(&panel)) else {
            unreachable!("panel {panel} of {}", self.panels)
        };
        let first = job.panels.start;
        let next = next.filter(|next| job.panels.contains(next)).map(|next| next - first);
        job.multiply(self.kernels, self.activations, panel - first, next);
    }
}

impl Job<'_> {
    /// Multiplies panel `panel` of the matrix, and has the cache fetch panel `next`.
    fn multiply(&self, kernels: Kernels, activations: &Activations, panel: usize, next: Option<usize>) {
        let rows = panel * PANEL_TILES * TILE_ROWS..self.matrix.rows().min((panel + 1) * PANEL_TILES * TILE_ROWS);
        let out = self.out.columns(rows);
        match self.matrix.tiles() {
            Tiles::F32(cells) => float::multiply(kernels, cells, activations, panel, out),
            Tiles::F16(cells) => float::multiply(kernels, cells, activations, panel, out),
            Tiles::BF16(cells) => float::multiply(kernels, cells, activations, panel, out),
            Tiles::Q4_0(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::Q4_1(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::Q8_0(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::Q4K(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::Q6K(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::Q5_0(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::Q5_1(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::Q2K(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::Q3K(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::Q5K(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::IQ4NL(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::IQ4XS(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::MXFP4(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::NF4(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::FP4(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I2G32(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I2G64(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I2G128(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I2G256(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I3G32(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I3G64(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I3G128(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I3G256(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I4G32(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I4G64(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I4G128(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::S4G64(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::S4G128(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I8G64(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::I8G128(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::U8G32(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::U8G64(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
            Tiles::F8G64(cells) => quantized::multiply(kernels, cells, activations, panel, next, out),
        }
    }
}

#[cfg(test)]
mod tests;
