//! Float weights to blocks of integers as they are loaded: round to nearest, each block by itself.
//!
//! A block is rounded against the scale as it is stored, in f16, so that a value's error is at most half a step.

use half::{bf16, f16};

use super::{ShapeError, WeightType};
use crate::Pool;
use crate::weights::cell::BLOCK;

/// What float weights may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integer {
    /// 8 bits with one scale for each 32 values, symmetric: 8.5 bits per weight.
    Int8,
    /// 4 bits with one scale for each group, and a minimum where not symmetric: 4.13 to 5 bits per weight.
    Int4 {
        /// Values that share them.
        group: Group,
        /// Code 8 is zero.
        symmetric: bool,
    },
}

/// Values that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // their numbers
pub enum Group {
    Of32,
    Of64,
    Of128,
}

impl Integer {
    /// The format that holds it.
    pub fn weight_type(self) -> WeightType {
        match self {
            Integer::Int8 => WeightType::Q8_0,
            Integer::Int4 { group: Group::Of32, symmetric: true } => WeightType::Q4_0,
            Integer::Int4 { group: Group::Of32, symmetric: false } => WeightType::Q4_1,
            Integer::Int4 { group: Group::Of64, symmetric: true } => WeightType::S4G64,
            Integer::Int4 { group: Group::Of64, symmetric: false } => WeightType::I4G64,
            Integer::Int4 { group: Group::Of128, symmetric: true } => WeightType::S4G128,
            Integer::Int4 { group: Group::Of128, symmetric: false } => WeightType::I4G128,
        }
    }

    /// The `bytes` of a row-major tensor of floats as the format's file has it, each row made by one of the pool's threads.
    ///
    /// # Panics
    /// When `from` is no float type.
    pub fn quantize(
        self,
        pool: &Pool,
        from: WeightType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Result<Vec<u8>, ShapeError> {
        let to = self.weight_type();
        let row_bytes = super::matrix::validated_row_bytes(from, rows, cols, bytes.len())?;
        let quantized_row = to.row_bytes(cols).ok_or(ShapeError::PartialBlock {
            weight_type: to.name(),
            cols,
            block_elements: to.block_elements(),
        })?;
        let mut quantized = vec![0; quantized_row * rows];
        pool.for_each(bytes.chunks_exact(row_bytes).zip(quantized.chunks_exact_mut(quantized_row)), |(row, out)| {
            let mut blocks = Vec::with_capacity(out.len());
            self.append_row(&floats(from, row), &mut blocks);
            out.copy_from_slice(&blocks);
        });
        Ok(quantized)
    }

    /// Appends a row of values, whole blocks, as the format's file has it.
    ///
    /// # Panics
    /// When the values are no whole blocks.
    pub fn append_row(self, values: &[f32], out: &mut Vec<u8>) {
        let block = self.weight_type().block_elements();
        assert!(values.len().is_multiple_of(block), "{} values are no whole blocks", values.len());
        values.chunks_exact(block).for_each(|block| self.append(block, out));
    }

    fn append(self, block: &[f32], out: &mut Vec<u8>) {
        match self {
            Integer::Int8 => append_int8(block, out),
            Integer::Int4 { symmetric: false, .. } => append_int4(block, out),
            Integer::Int4 { symmetric: true, .. } => append_symmetric_int4(block, out),
        }
    }
}

/// The values of little-endian floats.
///
/// # Panics
/// When `from` is no float type.
pub fn floats(from: WeightType, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.as_chunks().0.iter().copied();
    match from {
        WeightType::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        WeightType::F16 => halves().map(|bytes| f16::from_le_bytes(bytes).to_f32()).collect(),
        WeightType::BF16 => halves().map(|bytes| bf16::from_le_bytes(bytes).to_f32()).collect(),
        other => panic!("{} values are not floats", other.name()),
    }
}

fn append_int8(block: &[f32], out: &mut Vec<u8>) {
    let largest = block.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let scale = f16::from_f32(largest / 127.0);
    let inverse = inverse(scale);
    out.extend(scale.to_le_bytes());
    out.extend(block.iter().map(|value| (value * inverse).round().clamp(-127.0, 127.0) as i8 as u8));
}

fn append_int4(block: &[f32], out: &mut Vec<u8>) {
    let least = block.iter().copied().fold(f32::INFINITY, f32::min);
    let most = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let minimum = f16::from_f32(least);
    let scale = f16::from_f32((most - minimum.to_f32()) / 15.0);
    let inverse = inverse(scale);
    let code = |value: f32| ((value - minimum.to_f32()) * inverse).round().clamp(0.0, 15.0) as u8;
    out.extend(scale.to_le_bytes());
    out.extend(minimum.to_le_bytes());
    append_nibbles(block, code, out);
}

/// The largest magnitude is seven or eight steps from zero, whichever its sign allows.
fn append_symmetric_int4(block: &[f32], out: &mut Vec<u8>) {
    let extreme = block.iter().fold(0_f32, |extreme, value| if value.abs() > extreme.abs() { *value } else { extreme });
    let scale = f16::from_f32(extreme / -8.0);
    let inverse = inverse(scale);
    out.extend(scale.to_le_bytes());
    append_nibbles(block, |value| (value * inverse + 8.0).round().clamp(0.0, 15.0) as u8, out);
}

/// Codes of values, value i of each 32 beside value i + 16.
fn append_nibbles(block: &[f32], code: impl Fn(f32) -> u8, out: &mut Vec<u8>) {
    for block in block.chunks_exact(BLOCK) {
        out.extend((0..BLOCK / 2).map(|i| code(block[i]) | code(block[i + BLOCK / 2]) << 4));
    }
}

/// One over the scale, or 0 for a block of equal values.
fn inverse(scale: f16) -> f32 {
    let scale = scale.to_f32();
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;
    use crate::weights::PackedMatrix;

    #[test]
    fn every_value_is_within_half_a_step() {
        let pool = Pool::new(2).unwrap();
        let (rows, cols) = (37, 256);
        let mut values = Random::new(5).values(rows * cols, 2.0);
        values[..BLOCK].fill(0.0);
        values[BLOCK..2 * BLOCK].fill(0.75);
        let encodings: [(WeightType, Vec<u8>); 3] = [
            (WeightType::F32, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            (WeightType::F16, values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect()),
            (WeightType::BF16, values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()),
        ];
        for (from, bytes) in &encodings {
            let values = floats(*from, bytes);
            for to in every_integer() {
                let quantized = to.quantize(&pool, *from, rows, cols, bytes).unwrap();
                let matrix = PackedMatrix::pack(&pool, to.weight_type(), rows, cols, &quantized).unwrap();
                assert_eq!(matrix.weight_type(), to.weight_type());
                let mut row = vec![0.0; cols];
                for index in 0..rows {
                    matrix.dequantize_row(index, &mut row);
                    let group = to.weight_type().block_elements();
                    let expected = &values[index * cols..][..cols];
                    for (found, expected) in row.chunks(group).zip(expected.chunks(group)) {
                        let step = step(to, expected);
                        for (found, expected) in found.iter().zip(expected) {
                            let error = (found - expected).abs();
                            assert!(error <= step + 1e-3, "{from:?} {to:?}: {expected} as {found}");
                        }
                    }
                }
            }
        }
    }

    fn every_integer() -> Vec<Integer> {
        let groups = [Group::Of32, Group::Of64, Group::Of128];
        let int4 = |group| [false, true].map(|symmetric| Integer::Int4 { group, symmetric });
        [Integer::Int8].into_iter().chain(groups.into_iter().flat_map(int4)).collect()
    }

    /// The most that rounding moves a value. Symmetric codes end a step short of the largest magnitude on one side.
    fn step(to: Integer, values: &[f32]) -> f32 {
        let (least, most) = values.iter().fold((0_f32, 0_f32), |(a, b), &v| (a.min(v), b.max(v)));
        let largest = most.max(-least);
        match to {
            Integer::Int8 => 0.51 * largest / 127.0,
            Integer::Int4 { symmetric: false, .. } => 0.51 * (most - least) / 15.0,
            Integer::Int4 { symmetric: true, .. } => 1.01 * largest / 8.0,
        }
    }

    #[test]
    fn rows_that_are_no_whole_blocks_are_refused() {
        let pool = Pool::new(1).unwrap();
        let message = Integer::Int8.quantize(&pool, WeightType::F32, 1, 40, &[0; 160]).unwrap_err();
        assert_eq!(message.to_string(), "a row of 40 values is no whole number of q8_0 blocks of 32");
    }
}
