//! Matrix products of activations with packed weights.

use crate::{Activations, PackedMatrix, Pool};

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
pub fn matmul_many(_pool: &Pool, activations: &Activations, products: &mut [Product<'_>]) {
    for Product { matrix, out } in products {
        assert_eq!(matrix.cols(), activations.cols(), "cols of weights and activations");
        assert_eq!(out.len(), activations.tokens() * matrix.rows(), "out is [tokens, rows]");
        let mut weights = vec![0.0; matrix.cols()];
        for row in 0..matrix.rows() {
            matrix.dequantize_row(row, &mut weights);
            for token in 0..activations.tokens() {
                out[token * matrix.rows() + row] =
                    activations.token(token).iter().zip(&weights).map(|(a, w)| a * w).sum();
            }
        }
    }
}
