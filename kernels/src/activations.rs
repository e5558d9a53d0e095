//! Token activations in the forms that matrix products read.

use crate::{PackedMatrix, Pool};

/// A reusable buffer of activations `[tokens, cols]`, converted once for all matrices that multiply them.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    values: Vec<f32>,
}

impl Activations {
    /// An empty buffer; it grows to its largest load.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in `input`, `[tokens, cols]` row-major, in the forms that `matrices` need.
    ///
    /// # Panics
    /// When `matrices` is empty or they differ in `cols`, or when `input` is not whole tokens.
    pub fn load(&mut self, _pool: &Pool, input: &[f32], matrices: &[&PackedMatrix]) {
        let cols = matrices[0].cols();
        assert!(matrices.iter().all(|matrix| matrix.cols() == cols), "matrices that share activations share cols");
        assert!(input.len().is_multiple_of(cols), "{} values are no whole tokens of {cols}", input.len());
        self.tokens = input.len() / cols;
        self.cols = cols;
        self.values.clear();
        self.values.extend_from_slice(input);
    }

    /// Tokens loaded.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Values per token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn token(&self, token: usize) -> &[f32] {
        &self.values[token * self.cols..][..self.cols]
    }
}
