//! Matrix products of activations with packed weights.
//!
//! Every output is the same sum in the same order however many tokens and threads there are: quantized weights add, in
//! f32 and block by block, exact integer dot products of 32 (or 16) columns; float weights add column by column. What
//! changes with the number of tokens is only how often a weight is loaded:
//!
//! - up to [`DIRECT_TOKENS`]: each tile is unpacked in registers on its way from memory (a product of a matrix and a
//!   few vectors, bound by memory);
//! - above: a panel of two tiles is unpacked once into the cache and multiplied with all tokens, six at a time.

mod float;
mod output;
mod quantized;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::weights::Tiles;
use crate::weights::cell::TILE_ROWS;
use crate::{Activations, PackedMatrix, Pool};
use output::Output;

/// The most tokens that are multiplied straight from the packed weights.
pub(super) const DIRECT_TOKENS: usize = 4;

/// Tiles of a panel.
pub(super) const PANEL_TILES: usize = 2;

/// Bytes of weights that a worker takes at a time when memory is the limit: enough to stream, little enough to share.
const CHUNK_BYTES: usize = 32 << 10;

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
    let jobs: Vec<Job<'_>> = products.iter_mut().map(|product| Job::new(product, activations, pool)).collect();
    pool.run(|_| {
        for job in &jobs {
            job.work(pool, activations);
        }
    });
}

/// A product in progress.
struct Job<'a> {
    matrix: &'a PackedMatrix,
    out: Output<'a>,
    /// Panels in the matrix.
    panels: usize,
    /// Panels that a worker takes at a time.
    chunk: usize,
    /// The first panel that no worker has taken.
    next: AtomicUsize,
}

impl<'a> Job<'a> {
    fn new(product: &'a mut Product<'_>, activations: &Activations, pool: &Pool) -> Self {
        let (matrix, tokens) = (product.matrix, activations.tokens());
        assert_eq!(matrix.cols(), activations.cols(), "cols of weights and activations");
        assert_eq!(product.out.len(), tokens * matrix.rows(), "out is [tokens, rows]");
        let panels = matrix.rows().div_ceil(PANEL_TILES * TILE_ROWS);
        let chunk = if tokens <= DIRECT_TOKENS {
            let streaming = CHUNK_BYTES / (matrix.bytes() / panels).max(1);
            streaming.min(panels / (2 * pool.threads())).max(1)
        } else {
            1
        };
        let out = Output::new(product.out, tokens, matrix.rows());
        Job { matrix, out, panels, chunk, next: AtomicUsize::new(0) }
    }

    /// Takes chunks of panels until none is left.
    fn work(&self, pool: &Pool, activations: &Activations) {
        loop {
            let start = self.next.fetch_add(self.chunk, Ordering::Relaxed);
            if start >= self.panels {
                return;
            }
            for panel in start..self.panels.min(start + self.chunk) {
                self.multiply(pool, activations, panel);
            }
        }
    }

    fn multiply(&self, pool: &Pool, activations: &Activations, panel: usize) {
        let rows = panel * PANEL_TILES * TILE_ROWS..self.matrix.rows().min((panel + 1) * PANEL_TILES * TILE_ROWS);
        let out = self.out.columns(rows);
        let kernels = pool.kernels();
        match self.matrix.tiles() {
            Tiles::F32(cells) => float::multiply(kernels, cells, activations, panel, out),
            Tiles::F16(cells) => float::multiply(kernels, cells, activations, panel, out),
            Tiles::BF16(cells) => float::multiply(kernels, cells, activations, panel, out),
            Tiles::Q4_0(cells) => quantized::multiply(kernels, cells, activations, panel, out),
            Tiles::Q4_1(cells) => quantized::multiply(kernels, cells, activations, panel, out),
            Tiles::Q8_0(cells) => quantized::multiply(kernels, cells, activations, panel, out),
            Tiles::Q4K(cells) => quantized::multiply(kernels, cells, activations, panel, out),
            Tiles::Q6K(cells) => quantized::multiply(kernels, cells, activations, panel, out),
        }
    }
}

#[cfg(test)]
mod tests;
