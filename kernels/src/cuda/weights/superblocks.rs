//! Weights of 4, 5 or 6 bits in superblocks of 256 columns, as Q4_K, Q5_K and Q6_K have them: read, and packed as
//! `superblocks.cu` wants them.

use half::f16;

use super::ROW_TILE;
use crate::weights::scale_and_minimum;
use crate::{ShapeError, WeightType};

/// Columns of a superblock.
const COLS: usize = 256;
/// Columns whose codes are packed together.
const SPAN: usize = 128;

/// What superblocks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Superblock {
    /// Codes of 4 bits, eight groups with a scale and a minimum each.
    Q4K,
    /// Codes of 5 bits, eight groups with a scale and a minimum each.
    Q5K,
    /// Codes of 6 bits, sixteen groups with a scale each; code 32 is nothing.
    Q6K,
}

impl Superblock {
    /// Which one a file's type is.
    pub fn of(weight_type: WeightType) -> Option<Superblock> {
        match weight_type {
            WeightType::Q4K => Some(Superblock::Q4K),
            WeightType::Q5K => Some(Superblock::Q5K),
            WeightType::Q6K => Some(Superblock::Q6K),
            _ => None,
        }
    }

    fn weight_type(self) -> WeightType {
        match self {
            Superblock::Q4K => WeightType::Q4K,
            Superblock::Q5K => WeightType::Q5K,
            Superblock::Q6K => WeightType::Q6K,
        }
    }

    /// Bits of a code beyond four.
    fn high_bits(self) -> usize {
        match self {
            Superblock::Q4K => 0,
            Superblock::Q5K => 1,
            Superblock::Q6K => 2,
        }
    }
}

/// A matrix on the host: codes, row after row, and of each superblock its scales and factors.
#[derive(Clone, Debug, PartialEq)]
pub struct Superblocks {
    kind: Superblock,
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    /// Of its former half and then of its latter: eight scales, or four scales and their minimums.
    scales: Vec<[u8; 16]>,
    /// Of scales, and of minimums.
    factors: Vec<[f16; 2]>,
}

impl Superblocks {
    /// Reads a file tensor of this kind.
    pub fn read(kind: Superblock, rows: usize, cols: usize, bytes: &[u8]) -> Result<Superblocks, ShapeError> {
        let weight_type = kind.weight_type();
        crate::weights::validated_row_bytes(weight_type, rows, cols, bytes.len())?;
        let codes = Vec::with_capacity(rows * cols);
        let mut out = Superblocks { kind, rows, cols, codes, scales: Vec::new(), factors: Vec::new() };
        for block in bytes.chunks_exact(weight_type.block_bytes()) {
            match kind {
                Superblock::Q4K => out.push_affine(block, &[0; 32], &block[16..]),
                Superblock::Q5K => out.push_affine(block, &block[16..48], &block[48..]),
                Superblock::Q6K => out.push_q6k(block),
            }
        }
        Ok(out)
    }

    /// Both factors and 12 bytes of scales and minimums; then 32 bytes of which bit b belongs to the values of group b, and 128 bytes
    /// of which each 32 pair a value of one group with that of the next.
    fn push_affine(&mut self, block: &[u8], high: &[u8], low: &[u8]) {
        let code =
            |group: usize, i: usize| low[32 * (group / 2) + i] >> (4 * (group % 2)) & 15 | (high[i] >> group & 1) << 4;
        self.codes.extend((0..8).flat_map(|group| (0..32).map(move |i| (group, i))).map(|(group, i)| code(group, i)));
        let mut scales = [0; 16];
        for group in 0..8 {
            let at = 8 * (group / 4) + group % 4;
            (scales[at], scales[at + 4]) = scale_and_minimum(&block[4..16], group);
        }
        self.scales.push(scales);
        self.factors.push([half(block, 0), half(block, 2)]);
    }

    /// 128 bytes of low halves, 64 of high pairs of bits, 16 signed scales, the factor.
    fn push_q6k(&mut self, block: &[u8]) {
        let code = |i: usize| {
            let (part, quarter, place) = (i / 128, i % 128 / 32, i % 32);
            let low = block[64 * part + 32 * (quarter % 2) + place] >> (4 * (quarter / 2)) & 15;
            low | (block[128 + 32 * part + place] >> (2 * quarter) & 3) << 4
        };
        self.codes.extend((0..COLS).map(code));
        self.scales.push(std::array::from_fn(|group| block[192 + group]));
        self.factors.push([half(block, 208), f16::ZERO]);
    }

    /// What it holds.
    pub fn kind(&self) -> Superblock {
        self.kind
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
        let (block, col_in) = ((row * self.cols + col) / COLS, col % COLS);
        let (code, scales) = (f64::from(self.codes[row * self.cols + col]), &self.scales[block]);
        let [factor, of_minimums] = self.factors[block].map(f64::from);
        match self.kind {
            Superblock::Q4K | Superblock::Q5K => {
                let at = 8 * (col_in / SPAN) + col_in % SPAN / 32;
                factor * f64::from(scales[at]) * code - of_minimums * f64::from(scales[at + 4])
            }
            Superblock::Q6K => factor * f64::from(scales[col_in / 16].cast_signed()) * (code - 32.0),
        }
    }

    /// The code at a place; 0 behind the last row.
    fn code(&self, row: usize, col: usize) -> u32 {
        if row < self.rows { self.codes[row * self.cols + col].into() } else { 0 }
    }

    /// Codes as the lanes of a warp read them, 16 rows and 128 columns after one another.
    pub(super) fn pack_codes(&self) -> Vec<u32> {
        let high_words = 2 * self.kind.high_bits();
        let spans = self.rows.div_ceil(ROW_TILE) * self.cols / SPAN;
        let mut packed = Vec::with_capacity(spans * 32 * (8 + high_words));
        for (first_row, first_col) in tiles(self.rows, self.cols, SPAN) {
            let low = (0..2).flat_map(|half| (0..32).flat_map(move |lane| (0..4).map(move |word| (half, lane, word))));
            packed.extend(low.map(|(half, lane, word)| self.low_word(first_row, first_col + 64 * half, lane, word)));
            let high = (0..32).flat_map(|lane| (0..high_words).map(move |word| (lane, word)));
            packed.extend(high.map(|(lane, word)| self.high_word(first_row, first_col, lane, word)));
        }
        packed
    }

    /// Low bits of what lane `lane` multiplies of the 32 columns `word / 2` in mma `word % 2`.
    fn low_word(&self, first_row: usize, first_col: usize, lane: usize, word: usize) -> u32 {
        (0..4).fold(0, |packed, register| {
            let [former, latter] = self.pair(first_row, first_col + 16 * word, lane, register);
            packed | (former & 15) << (4 * register) | (latter & 15) << (16 + 4 * register)
        })
    }

    /// High bits of what lane `lane` multiplies in as many mmas as a word has room for.
    fn high_word(&self, first_row: usize, first_col: usize, lane: usize, word: usize) -> u32 {
        let bits = self.kind.high_bits();
        let registers = 16 / bits;
        (0..registers).fold(0, |packed, index| {
            let mma = word * registers / 4 + index / 4;
            let [former, latter] = self.pair(first_row, first_col + 16 * mma, lane, index % 4);
            packed | (former >> 4) << (bits * index) | (latter >> 4) << (16 + bits * index)
        })
    }

    /// The two codes that a lane has in a register of the operand with 16 columns from `first_col` on: of row
    /// g + 8 (register % 2), the lane's columns 2 (register / 2) and the next.
    fn pair(&self, first_row: usize, first_col: usize, lane: usize, register: usize) -> [u32; 2] {
        let row = first_row + lane / 4 + 8 * (register % 2);
        let col = first_col + 4 * (lane % 4) + 2 * (register / 2);
        [self.code(row, col), self.code(row, col + 1)]
    }

    /// Scales and factors: 80 words for 16 rows and a superblock.
    pub(super) fn pack_scales(&self) -> Vec<u32> {
        let mut packed = Vec::new();
        for (first_row, first_col) in tiles(self.rows, self.cols, COLS) {
            // Row g + 8 is behind row g.
            let rows = (0..ROW_TILE).map(|i| first_row + i / 2 + 8 * (i % 2));
            let blocks: Vec<_> =
                rows.map(|row| (row < self.rows).then(|| (row * self.cols + first_col) / COLS)).collect();
            for part in 0..2 {
                packed.extend(blocks.iter().flat_map(|block| {
                    let scales = block.map_or([0; 16], |block| self.scales[block]);
                    [0, 4].map(|at| u32::from_le_bytes(std::array::from_fn(|i| scales[8 * part + at + i])))
                }));
            }
            packed.extend(blocks.iter().map(|block| {
                let [scale, minimum] = block.map_or([f16::ZERO; 2], |block| self.factors[block]);
                u32::from(scale.to_bits()) | u32::from(minimum.to_bits()) << 16
            }));
        }
        packed
    }
}

/// First rows and columns of tiles of 16 rows and so many columns.
fn tiles(rows: usize, cols: usize, width: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(ROW_TILE).flat_map(move |row| (0..cols).step_by(width).map(move |col| (row, col)))
}

fn half(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}
