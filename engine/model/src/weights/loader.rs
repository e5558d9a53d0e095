//! What takes a decoder's weights in for a device.

use std::borrow::Cow;
use std::ops::Range;

use windlass_kernels::{Integer, ShapeError, WeightType};

use super::TensorError;
use super::quantized::Float8;
use crate::decoder::Layout;

/// A matrix's rows as the kernels' file has them, of a file that is there as long as `'a`. A device that makes its own of them
/// asks for some at a time.
pub trait FileRows<'a> {
    /// The bytes of some rows.
    fn get(&self, rows: Range<usize>) -> Cow<'a, [u8]>;
    /// Gives back what memory these rows take, where they lie in the file; they can be had again.
    fn release(&self, rows: Range<usize>);
}

/// Gate, up and down of a feed-forward block, as they came from the file.
pub type GatedFiles<F> = [F; 3];

/// Takes in weights for a device, of a file that is there as long as `'a`: first each matrix of the file by itself, then those that
/// the device multiplies together as one.
pub trait WeightLoader<'a> {
    /// The device.
    type Device: Layout;
    /// A matrix of the file on its way to the device.
    type File;
    /// Why weights are not taken in.
    type Error: From<TensorError>;

    /// Takes a file tensor of `[rows, cols]`, whose column `c` multiplies input `order[c]` where there is an order, and
    /// nothing where that is `NO_INPUT`.
    fn file(
        &self,
        kind: WeightType,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
        order: Option<&[u32]>,
    ) -> Result<Self::File, ShapeError>;

    /// Takes a file tensor of floats as integers.
    fn quantized(
        &self,
        from: WeightType,
        to: Integer,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
    ) -> Result<Self::File, ShapeError>;

    /// Takes eight-bit floats as they are, on a device that multiplies them so and where `values` has them: elsewhere they
    /// become integers first.
    fn float8(&self, _rows: usize, _cols: usize, _values: impl FnOnce() -> Option<Float8>) -> Option<Self::File> {
        None
    }

    /// Takes in a vector.
    ///
    /// # Errors
    /// The device has no room for it; so have all below.
    fn vector(&self, values: Vec<f32>) -> Result<<Self::Device as Layout>::Vector, Self::Error>;

    /// Takes in the embedding, or the head that is not tied to it: `name` says which.
    fn table(&self, name: &'static str, file: Self::File) -> Result<<Self::Device as Layout>::Matrix, Self::Error>;

    /// Takes in query, key and value of a layer.
    fn qkv(&self, layer: usize, files: [Self::File; 3]) -> Result<<Self::Device as Layout>::Qkv, Self::Error>;

    /// Takes in the attention's output projection.
    fn out(&self, layer: usize, file: Self::File) -> Result<<Self::Device as Layout>::Matrix, Self::Error>;

    /// Takes in a gated block.
    fn gated(
        &self,
        layer: usize,
        files: GatedFiles<Self::File>,
    ) -> Result<<Self::Device as Layout>::Gated, Self::Error>;

    /// Takes in a mixture of experts: the router, which gives each token a score for each, the experts in the order of their
    /// scores, and the one that every token goes through besides, with the row whose product with a token is its score.
    fn experts(
        &self,
        layer: usize,
        router: Self::File,
        experts: Vec<GatedFiles<Self::File>>,
        shared: Option<(GatedFiles<Self::File>, Vec<f32>)>,
    ) -> Result<<Self::Device as Layout>::Experts, Self::Error>;
}
