//! Weights `scale · code` of signed 8-bit codes in groups of 32 columns, as Q8_0 has them: read, and packed as `linear.cu`
//! wants them.

use half::f16;

use super::ROW_TILE;
use crate::{ShapeError, WeightType};

/// Columns that share a scale.
const GROUP: usize = 32;

/// A matrix on the host: codes and scales, row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Int8 {
    rows: usize,
    cols: usize,
    codes: Vec<i8>,
    scales: Vec<f16>,
}

impl Int8 {
    /// Reads a file tensor of Q8_0.
    pub fn read(rows: usize, cols: usize, bytes: &[u8]) -> Result<Int8, ShapeError> {
        crate::weights::validated_row_bytes(WeightType::Q8_0, rows, cols, bytes.len())?;
        let (mut codes, mut scales) = (Vec::with_capacity(rows * cols), Vec::with_capacity(rows * cols / GROUP));
        for block in bytes.chunks_exact(WeightType::Q8_0.block_bytes()) {
            scales.push(f16::from_le_bytes([block[0], block[1]]));
            codes.extend(block[2..].iter().map(|&code| code as i8));
        }
        Ok(Int8 { rows, cols, codes, scales })
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

    /// Codes as the lanes of a warp read them: 128 words for 16 rows and 32 columns.
    pub(super) fn pack_codes(&self) -> Vec<u32> {
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
    pub(super) fn pack_scales(&self) -> Vec<u32> {
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
