//! The interface that loads weights to a device.

use std::borrow::Cow;
use std::ops::Range;

use windlass_kernels::{Integer, ShapeError, WeightType};

use super::TensorError;
use super::quantized::Float8;
use crate::decoder::Layout;

/// The rows of a matrix in the file format of the kernels, valid for `'a`. A device that converts them asks for some
/// rows at a time.
pub trait FileRows<'a> {
    /// The bytes of some rows.
    fn get(&self, rows: Range<usize>) -> Cow<'a, [u8]>;
    /// Frees the memory of these rows of the file; they can be read again.
    fn release(&self, rows: Range<usize>);
}

/// Gate, up and down of a feed-forward block, as read from the file.
pub type GatedFiles<F> = [F; 3];

/// Loads weights to a device from a file that is valid for `'a`: first each matrix of the file alone, then the matrices
/// that the device multiplies together.
pub trait WeightLoader<'a> {
    /// The device.
    type Device: Layout;
    /// A matrix of the file on its way to the device.
    type File;
    /// Error of loading.
    type Error: From<TensorError>;

    /// Takes a file tensor `[rows, cols]`. With an order, column `c` multiplies input `order[c]`, or nothing if that is
    /// `NO_INPUT`.
    fn file(
        &self,
        kind: WeightType,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
        order: Option<&[u32]>,
    ) -> Result<Self::File, ShapeError>;

    /// Takes a file tensor of floats and quantizes it.
    fn quantized(
        &self,
        from: WeightType,
        to: Integer,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
    ) -> Result<Self::File, ShapeError>;

    /// Takes eight-bit floats as they are, if the device multiplies them and `values` has them; `None` if they have to
    /// be converted to integers.
    fn float8(&self, _rows: usize, _cols: usize, _values: impl FnOnce() -> Option<Float8>) -> Option<Self::File> {
        None
    }

    /// Loads a vector.
    ///
    /// # Errors
    /// The device has no room for it; the same holds for all methods below.
    fn vector(&self, values: Vec<f32>) -> Result<<Self::Device as Layout>::Vector, Self::Error>;

    /// Loads the embedding, or the head if it is not tied; `name` says which.
    fn table(&self, name: &'static str, file: Self::File) -> Result<<Self::Device as Layout>::Matrix, Self::Error>;

    /// Loads query, key and value of a layer.
    fn qkv(&self, layer: usize, files: [Self::File; 3]) -> Result<<Self::Device as Layout>::Qkv, Self::Error>;

    /// Loads the output projection of attention.
    fn out(&self, layer: usize, file: Self::File) -> Result<<Self::Device as Layout>::Matrix, Self::Error>;

    /// Loads a gated feed-forward block.
    fn gated(
        &self,
        layer: usize,
        files: GatedFiles<Self::File>,
    ) -> Result<<Self::Device as Layout>::Gated, Self::Error>;

    /// Loads a mixture of experts: the router, which computes a score for each expert, the experts in the order of
    /// scores, and the shared expert with the row whose product with a token is its score.
    fn experts(
        &self,
        layer: usize,
        router: Self::File,
        experts: Vec<GatedFiles<Self::File>>,
        shared: Option<(GatedFiles<Self::File>, Vec<f32>)>,
    ) -> Result<<Self::Device as Layout>::Experts, Self::Error>;
}
