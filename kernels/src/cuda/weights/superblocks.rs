//! Weights of 2 to 6 bits in superblocks of 256 columns, as the K-quants and IQ4_XS have them: read, and packed as
//! `superblocks.cu` wants them.

use std::array::from_fn;
use std::ops::Range;

use half::f16;

use super::ROW_TILE;
use super::strips::Words;
use crate::weights::{iq4_nl, q3_k_scale, scale_and_minimum};
use crate::{ShapeError, WeightType};

/// Columns of a superblock.
const COLS: usize = 256;
/// Columns whose codes are packed together.
const SPAN: usize = 128;

/// What superblocks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Superblock {
    /// Codes of 2 bits, sixteen groups with a scale and a minimum each.
    Q2K,
    /// Codes of 3 bits, sixteen groups with a scale each; code 4 is nothing.
    Q3K,
    /// Codes of 4 bits, eight groups with a scale and a minimum each.
    Q4K,
    /// Codes of 5 bits, eight groups with a scale and a minimum each.
    Q5K,
    /// Codes of 6 bits, sixteen groups with a scale each; code 32 is nothing.
    Q6K,
    /// Codes of 4 bits that name numbers, eight groups with a scale each.
    IQ4XS,
}

impl Superblock {
    /// All of them.
    pub const ALL: [Superblock; 6] =
        [Superblock::Q2K, Superblock::Q3K, Superblock::Q4K, Superblock::Q5K, Superblock::Q6K, Superblock::IQ4XS];

    /// Which one a file's type is.
    pub fn of(weight_type: WeightType) -> Option<Superblock> {
        Superblock::ALL.into_iter().find(|kind| kind.weight_type() == weight_type)
    }

    /// As a file's type.
    pub fn weight_type(self) -> WeightType {
        match self {
            Superblock::Q2K => WeightType::Q2K,
            Superblock::Q3K => WeightType::Q3K,
            Superblock::Q4K => WeightType::Q4K,
            Superblock::Q5K => WeightType::Q5K,
            Superblock::Q6K => WeightType::Q6K,
            Superblock::IQ4XS => WeightType::IQ4XS,
        }
    }

    /// Bits of a code.
    pub(super) fn bits(self) -> usize {
        match self {
            Superblock::Q2K => 2,
            Superblock::Q3K => 3,
            Superblock::Q4K | Superblock::IQ4XS => 4,
            Superblock::Q5K => 5,
            Superblock::Q6K => 6,
        }
    }

    /// Those of them that lie by themselves; the others lie behind these.
    fn low_bits(self) -> usize {
        if self.bits() < 4 { 2 } else { 4 }
    }

    /// Bytes of scales and factors that a row's superblock has on a device.
    pub(super) fn scales_bytes(self) -> usize {
        2 * self.scale_bytes() + size_of::<u32>()
    }

    /// Bytes of scales that half a row's superblock has.
    fn scale_bytes(self) -> usize {
        if self == Superblock::IQ4XS { 4 } else { 8 }
    }
}

/// A matrix on the host: codes, row after row, and of each superblock its scales and factors.
#[derive(Clone, Debug, PartialEq)]
pub struct Superblocks {
    kind: Superblock,
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    /// Of its former half and then of its latter: eight scales (of Q2_K with their minimums in the upper nibbles), four scales and
    /// their minimums, or four scales.
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
                Superblock::Q2K => out.push_q2k(block),
                Superblock::Q3K => out.push_q3k(block),
                Superblock::Q4K => out.push_affine(block, &[0; 32], &block[16..]),
                Superblock::Q5K => out.push_affine(block, &block[16..48], &block[48..]),
                Superblock::Q6K => out.push_q6k(block),
                Superblock::IQ4XS => out.push_iq4xs(block),
            }
        }
        Ok(out)
    }

    /// 16 bytes with a scale in the low nibble and a minimum in the high one, 64 bytes of codes, both factors.
    fn push_q2k(&mut self, block: &[u8]) {
        self.codes.extend((0..COLS).map(|i| two_bits(&block[16..80], i)));
        self.scales.push(from_fn(|group| block[group]));
        self.factors.push([half(block, 80), half(block, 82)]);
    }

    /// 32 bytes of which bit b is the top bit of the values of group b of 32, 64 bytes of lower bits, 12 bytes of scales, the factor.
    fn push_q3k(&mut self, block: &[u8]) {
        self.codes.extend((0..COLS).map(|i| two_bits(&block[32..96], i) | (block[i % 32] >> (i / 32) & 1) << 2));
        self.scales.push(from_fn(|group| q3_k_scale(&block[96..108], group).cast_unsigned()));
        self.factors.push([half(block, 108), f16::ZERO]);
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
        self.scales.push(from_fn(|group| block[192 + group]));
        self.factors.push([half(block, 208), f16::ZERO]);
    }

    /// The factor, two bytes with the scales' top bits, four with their low nibbles, and for each group 16 bytes that pair value i
    /// with i + 16.
    fn push_iq4xs(&mut self, block: &[u8]) {
        let top = u16::from_le_bytes([block[2], block[3]]);
        let scale = |group: usize| {
            let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
            (low | ((top >> (2 * group) & 3) as u8) << 4).wrapping_sub(32)
        };
        self.codes.extend((0..COLS).map(|i| block[8 + 16 * (i / 32) + i % 16] >> (4 * (i % 32 / 16)) & 15));
        self.scales.push(from_fn(|at| if at % 8 < 4 { scale(4 * (at / 8) + at % 8) } else { 0 }));
        self.factors.push([half(block, 0), f16::ZERO]);
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
        let (of_16, of_32) = (col_in / 16, 8 * (col_in / SPAN) + col_in % SPAN / 32);
        let signed = |at: usize| f64::from(scales[at].cast_signed());
        match self.kind {
            Superblock::Q2K => {
                factor * f64::from(scales[of_16] & 15) * code - of_minimums * f64::from(scales[of_16] >> 4)
            }
            Superblock::Q3K => factor * signed(of_16) * (code - 4.0),
            Superblock::Q4K | Superblock::Q5K => {
                factor * f64::from(scales[of_32]) * code - of_minimums * f64::from(scales[of_32 + 4])
            }
            Superblock::Q6K => factor * signed(of_16) * (code - 32.0),
            Superblock::IQ4XS => factor * signed(of_32) * (f64::from(iq4_nl::VALUES[code as usize]) - 128.0),
        }
    }

    /// The code at a place; 0 behind the last row.
    fn code(&self, row: usize, col: usize) -> u32 {
        if row < self.rows { self.codes[row * self.cols + col].into() } else { 0 }
    }

    /// As it lies on a device.
    pub(super) fn words(&self) -> Words {
        Words { codes: self.pack_codes(), scales: self.pack_scales(), affine: false }
    }

    /// Codes as the lanes of a warp read them, 16 rows and 128 columns after one another.
    fn pack_codes(&self) -> Vec<u32> {
        let (bits, low_bits) = (self.kind.bits(), self.kind.low_bits());
        let (low_words, high_words) = (2 * low_bits, 2 * (bits - low_bits));
        let spans = self.rows.div_ceil(ROW_TILE) * self.cols / SPAN;
        let mut packed = Vec::with_capacity(spans * 32 * (low_words + high_words));
        for place in tiles(self.rows, self.cols, SPAN) {
            let quads = (0..low_words / 4).flat_map(|quad| (0..32).map(move |lane| (quad, lane)));
            let low = quads.flat_map(|(quad, lane)| (0..4).map(move |word| (lane, 4 * quad + word)));
            packed.extend(low.map(|(lane, word)| self.word(place, lane, word, 0..low_bits)));
            let high = (0..32).flat_map(|lane| (0..high_words).map(move |word| (lane, word)));
            packed.extend(high.map(|(lane, word)| self.word(place, lane, word, low_bits..bits)));
        }
        packed
    }

    /// Some bits of what a lane multiplies: of as many registers of the operands as a word has room for, mmas after one another.
    fn word(&self, place: (usize, usize), lane: usize, word: usize, bits: Range<usize>) -> u32 {
        let registers = 16 / bits.len();
        (0..registers).fold(0, |packed, index| {
            let register = word * registers + index;
            let pair = self.pair((place.0, place.1 + 16 * (register / 4)), lane, register % 4);
            let [former, latter] = pair.map(|code| code >> bits.start & ((1 << bits.len()) - 1));
            packed | former << (bits.len() * index) | latter << (16 + bits.len() * index)
        })
    }

    /// The two codes that a lane has in a register of the operand with 16 columns from `first_col` on: of row
    /// g + 8 (register % 2), the lane's columns 2 (register / 2) and the next.
    fn pair(&self, (first_row, first_col): (usize, usize), lane: usize, register: usize) -> [u32; 2] {
        let row = first_row + lane / 4 + 8 * (register % 2);
        let col = first_col + 4 * (lane % 4) + 2 * (register / 2);
        [self.code(row, col), self.code(row, col + 1)]
    }

    /// Scales and factors of 16 rows and a superblock after one another.
    fn pack_scales(&self) -> Vec<u32> {
        let mut packed = Vec::new();
        for (first_row, first_col) in tiles(self.rows, self.cols, COLS) {
            // Row g + 8 is behind row g.
            let rows = (0..ROW_TILE).map(|i| first_row + i / 2 + 8 * (i % 2));
            let blocks: Vec<_> =
                rows.map(|row| (row < self.rows).then(|| (row * self.cols + first_col) / COLS)).collect();
            for part in 0..2 {
                packed.extend(blocks.iter().flat_map(|block| {
                    let scales = block.map_or([0; 16], |block| self.scales[block]);
                    let words = (0..self.kind.scale_bytes()).step_by(4);
                    words.map(move |at| u32::from_le_bytes(from_fn(|i| scales[8 * part + at + i])))
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

/// Value i of bytes of which each 32 hold four groups of 32.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    bytes[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3
}

fn half(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}
