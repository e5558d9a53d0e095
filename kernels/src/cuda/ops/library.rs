//! Products of many tokens by a library that the machine has (cuBLASLt).

use std::sync::Arc;

use half::bf16;

use super::linear::Output;
use crate::cuda::driver::{DevicePointer, Product, ProductOutput, Products};
use crate::cuda::weights::{Matrix, Values};
use crate::cuda::{Device, DriverError, Memory, Stream, View};

/// Fewest tokens that a library multiplies with: as many as [`super::linear_wide`] does. An estimate, until a GPU has measured it.
pub const LIBRARY_TOKENS: usize = 128;

/// A library for products, with the memory that those of one stream need.
#[derive(Debug)]
pub struct ProductLibrary {
    products: Arc<dyn Products>,
    workspace: Memory<u8>,
    from_tokens: usize,
}

impl ProductLibrary {
    /// On a device, for so many tokens and more.
    pub fn new(
        device: &Device,
        products: &Arc<dyn Products>,
        from_tokens: usize,
    ) -> Result<ProductLibrary, DriverError> {
        let workspace = device.allocate(products.workspace_bytes())?;
        Ok(ProductLibrary { products: Arc::clone(products), workspace, from_tokens })
    }

    /// Whether [`ProductLibrary::linear`] is for this: many tokens with a matrix in bf16, which begins, as all of its rows, the
    /// tokens and what comes of them do, at a multiple of 16 bytes. Nothing that is captured is: what the library does for the
    /// first time no graph can hold.
    pub fn multiplies(
        &self,
        stream: &Stream,
        matrix: &Matrix,
        input: View<'_, bf16>,
        out: &Output<'_>,
    ) -> Result<bool, DriverError> {
        let Some(operands) = operands(matrix, input, out) else { return Ok(false) };
        let product = product(matrix, input, out);
        let is_aligned = operands.iter().all(|at| at.0.is_multiple_of(16)) && product.rows.is_multiple_of(8);
        match product.tokens >= self.from_tokens && is_aligned && !stream.is_captured() {
            true => self.products.plan(&product),
            false => Ok(false),
        }
    }

    /// [`super::linear()`] of such tokens: equal but for rounding, and otherwise for another number of tokens.
    ///
    /// # Panics
    /// When the lengths do not match, or the matrix is of another kind.
    pub fn linear(
        &mut self,
        stream: &Stream,
        matrix: &Matrix,
        input: View<'_, bf16>,
        out: Output<'_>,
    ) -> Result<(), DriverError> {
        let product = product(matrix, input, &out);
        let Product { tokens, rows, cols, .. } = product;
        assert!(input.len() == tokens * cols && out.len() == tokens * rows, "{product:?} of other lengths");
        let Some(operands) = operands(matrix, input, &out) else { panic!("{product:?} of a matrix of another kind") };
        self.products.multiply(&product, operands, self.workspace.view().pointer(), stream.handle())
    }
}

fn product(matrix: &Matrix, input: View<'_, bf16>, out: &Output<'_>) -> Product {
    let out = match out {
        Output::Bf16(_) => ProductOutput::Bf16,
        Output::F32(_) => ProductOutput::F32,
        Output::AddTo(_) => ProductOutput::AddTo,
        Output::Gated(..) => panic!("the library does not gate what it multiplies"),
    };
    Product { tokens: input.len() / matrix.cols(), rows: matrix.rows(), cols: matrix.cols(), out }
}

/// Weights, input and output, if the weights are in bf16 and in the input's order.
fn operands(matrix: &Matrix, input: View<'_, bf16>, out: &Output<'_>) -> Option<[DevicePointer; 3]> {
    let Values::Bf16(weights) = matrix.values() else { return None };
    matrix.order().is_none().then(|| [weights.view().pointer(), input.pointer(), out.pointer()])
}
