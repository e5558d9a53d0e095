//! Weights `scale · code` of signed 8-bit codes in groups of 32 columns, as Q8_0 has them and others may: read, and packed as
//! `linear.cu` wants them.

use std::array::from_fn;

use half::f16;

use super::ROW_TILE;
use super::strips::Words;
use crate::weights::{bnb4, float8, iq4_nl, mxfp4, uint8};
use crate::{Integer, ShapeError, WeightType};

/// Columns that share a scale.
const GROUP: usize = 32;

/// What a block of a file says: a scale, and the code of each column. None where the scale is no f16.
type Block = Option<(f16, [i8; GROUP])>;

/// A matrix on the host: codes and scales, row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Int8 {
    rows: usize,
    cols: usize,
    codes: Vec<i8>,
    scales: Vec<f16>,
}

impl Int8 {
    /// Reads a file tensor whose values are bytes by the scale of their 32 columns: Q8_0, groups of 64, eight-bit floats, IQ4_NL
    /// and MXFP4 once their codes are looked up, and NF4, FP4 and integers around a zero point, whose values are rounded. None of
    /// another type, nor where a scale is no f16, as powers of two may be.
    pub fn read(weight_type: WeightType, rows: usize, cols: usize, bytes: &[u8]) -> Option<Result<Int8, ShapeError>> {
        let validated = || crate::weights::validated_row_bytes(weight_type, rows, cols, bytes.len());
        if let Some(append) = in_blocks(weight_type) {
            if let Err(error) = validated() {
                return Some(Err(error));
            }
            let mut blocks = Vec::with_capacity(rows * cols / GROUP * WeightType::Q8_0.block_bytes());
            bytes.chunks_exact(weight_type.block_bytes()).for_each(|group| append(group, &mut blocks));
            return Int8::read(WeightType::Q8_0, rows, cols, &blocks);
        }
        let read: fn(&[u8]) -> Block = match weight_type {
            WeightType::Q8_0 => |block| Some((half(block), from_fn(|i| block[2 + i].cast_signed()))),
            WeightType::IQ4NL => {
                |block| Some((half(block), from_fn(|i| looked_up(&iq4_nl::VALUES, &block[2..], i, 128))))
            }
            WeightType::MXFP4 => |block| {
                let codes = from_fn(|i| looked_up(&mxfp4::DOUBLED, &block[1..], i, 16));
                Some((half_of_power(block[0]).or((codes == [0; GROUP]).then_some(f16::ZERO))?, codes))
            },
            _ => return None,
        };
        if let Err(error) = validated() {
            return Some(Err(error));
        }
        let (mut codes, mut scales) = (Vec::with_capacity(rows * cols), Vec::with_capacity(rows * cols / GROUP));
        for block in bytes.chunks_exact(weight_type.block_bytes()) {
            let (scale, own) = read(block)?;
            scales.push(scale);
            codes.extend(own);
        }
        Some(Ok(Int8 { rows, cols, codes, scales }))
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The value at a place: the reference.
    pub fn value(&self, row: usize, col: usize) -> f64 {
        f64::from(self.scales[(row * self.cols + col) / GROUP]) * f64::from(self.codes[row * self.cols + col])
    }

    /// As it lies on a device.
    pub(super) fn words(&self) -> Words {
        Words { codes: self.pack_codes(), scales: self.pack_scales(), affine: false }
    }

    /// Codes as the lanes of a warp read them: 128 words for 16 rows and 32 columns.
    fn pack_codes(&self) -> Vec<u32> {
        let mut packed = Vec::with_capacity(self.rows.div_ceil(ROW_TILE) * self.cols / GROUP * 128);
        for first_row in (0..self.rows).step_by(ROW_TILE) {
            for first_col in (0..self.cols).step_by(GROUP) {
                for (lane, word) in (0..32).flat_map(|lane| (0..4).map(move |word| (lane, word))) {
                    let (row, col) =
                        (first_row + lane / 4 + 8 * (word / 2), first_col + 8 * (lane % 4) + 4 * (word % 2));
                    packed.push(self.word(row, col));
                }
            }
        }
        packed
    }

    /// Four codes from a place on; zeros behind the last row.
    fn word(&self, row: usize, col: usize) -> u32 {
        if row >= self.rows {
            return 0;
        }
        let at = row * self.cols + col;
        u32::from_le_bytes([0, 1, 2, 3].map(|i| self.codes[at + i] as u8))
    }

    /// Scales: 8 words for 16 rows and 32 columns, row g in the low half and row g + 8 in the high one.
    fn pack_scales(&self) -> Vec<u32> {
        let scale = |row: usize, block: usize| {
            let scale = if row < self.rows { self.scales[row * self.cols / GROUP + block] } else { f16::ZERO };
            u32::from(scale.to_bits())
        };
        let tiles = (0..self.rows).step_by(ROW_TILE);
        let places = tiles.flat_map(|first| (0..self.cols / GROUP).map(move |block| (first, block)));
        let rows = places.flat_map(|(first, block)| (0..8).map(move |group| (first + group, block)));
        rows.map(|(row, block)| scale(row, block) | scale(row + 8, block) << 16).collect()
    }
}

/// Appends a group as blocks of Q8_0.
type InBlocks = fn(&[u8], &mut Vec<u8>);

/// How groups of such a type become blocks.
fn in_blocks(weight_type: WeightType) -> Option<InBlocks> {
    match weight_type {
        WeightType::I8G64 => {
            Some(|group, out| group[2..].chunks(GROUP).for_each(|codes| append_block(half(group), codes, out)))
        }
        WeightType::F8G64 => Some(|group, out| {
            float8::blocks(group).for_each(|(step, codes)| append_block(f16::from_f32(step), codes, out));
        }),
        WeightType::U8G32 | WeightType::U8G64 => Some(|group, out| append_rounded(uint8::values(group), out)),
        WeightType::NF4 => Some(|group, out| append_rounded(bnb4::values(&bnb4::NF4, group), out)),
        WeightType::FP4 => Some(|group, out| append_rounded(bnb4::values(&bnb4::FP4, group), out)),
        _ => None,
    }
}

fn append_block(scale: f16, codes: &[u8], out: &mut Vec<u8>) {
    out.extend(scale.to_le_bytes());
    out.extend(codes);
}

/// Appends up to 64 values that are no bytes by a scale.
fn append_rounded(values: impl Iterator<Item = f32>, out: &mut Vec<u8>) {
    let mut group = [0.0; 2 * GROUP];
    let count = group.iter_mut().zip(values).map(|(to, value)| *to = value).count();
    Integer::Int8.append_row(&group[..count], out);
}

/// The scale that a block begins with.
fn half(block: &[u8]) -> f16 {
    f16::from_le_bytes([block[0], block[1]])
}

/// Half of the power of two whose exponent this is, plus 127, if f16 has it.
fn half_of_power(exponent: u8) -> Option<f16> {
    let power = 2f64.powi(i32::from(exponent) - 128);
    Some(f16::from_f64(power)).filter(|half| half.to_f64() == power)
}

/// Value i of 32, of which each of sixteen bytes pairs i with i + 16.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i % 16] >> (4 * (i / 16)) & 15
}

/// What such a value stands for in a table of numbers that are all so much too large.
fn looked_up(table: &[u8; 16], bytes: &[u8], i: usize, too_large: u8) -> i8 {
    table[usize::from(nibble(bytes, i))].wrapping_sub(too_large).cast_signed()
}
