//! Floats that are rounded to eight-bit floats (e4m3) as they are loaded. The largest weight of each output becomes the
//! largest e4m3 value, whatever part of the row a rank has.

use std::ops::Range;

use windlass_checkpoint::Data;
use windlass_kernels::{Fp8, WeightType, floats};

use super::float8::{self, Float8};
use super::widest;

/// Float weights, `[rows = outputs, cols = inputs]`.
#[derive(Clone, Debug)]
pub(super) struct Rounded<'a> {
    kind: WeightType,
    bytes: Data<'a>,
    row_bytes: usize,
}

impl<'a> Rounded<'a> {
    /// The weights of a tensor of floats with rows of `cols`.
    pub fn new(kind: WeightType, bytes: Data<'a>, cols: usize) -> Result<Rounded<'a>, String> {
        match (kind.row_bytes(cols), cols.is_multiple_of(float8::BLOCK)) {
            (Some(row_bytes), true) => Ok(Rounded { kind, bytes, row_bytes }),
            _ => Err(format!("its {cols} inputs are no multiple of {} and cannot become fp8: use auto", float8::BLOCK)),
        }
    }

    /// The packed format on devices without eight-bit floats.
    pub fn kind(&self) -> WeightType {
        widest(&float8::KINDS, &[self.row_bytes / self.kind.block_bytes()])
    }

    /// Appends some columns of a row in the file format of the kernels.
    pub fn append_row(&self, row: usize, cols: Range<usize>, kind: WeightType, out: &mut Vec<u8>) {
        let (codes, scale) = self.row(row, &cols);
        codes.chunks_exact(kind.block_elements()).for_each(|group| float8::append(group, scale, out));
    }

    /// Some rows and columns as eight-bit floats.
    pub fn float8(&self, rows: Range<usize>, cols: &Range<usize>) -> Float8 {
        let (codes, scales): (Vec<Vec<u8>>, Vec<f32>) = rows.map(|row| self.row(row, cols)).unzip();
        Float8 { codes: codes.concat(), scales, group: cols.len() }
    }

    /// The codes of some columns of a row, and their scale.
    fn row(&self, row: usize, cols: &Range<usize>) -> (Vec<u8>, f32) {
        let values = floats(self.kind, &self.bytes[row * self.row_bytes..][..self.row_bytes]);
        let largest = values.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
        let factor = if largest > 0.0 { Fp8::MAX / largest } else { 0.0 };
        let codes = values[cols.clone()].iter().map(|value| Fp8::nearest(value * factor).to_bits());
        (codes.collect(), largest / Fp8::MAX)
    }
}
