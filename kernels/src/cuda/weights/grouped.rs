//! Weights `scale · code + minimum` of codes of 4 or 5 bits: read from files, and packed as `linear.cu` wants them. Those of
//! 2 and 3 bits become 4.

use std::iter;

use half::f16;

use super::ROW_TILE;
use super::strips::Words;
use crate::weights::{int2, int4};
use crate::{ShapeError, WeightType};

/// Columns whose codes are packed together.
const PACK_COLS: usize = 64;

/// Columns that share a scale and a minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// GGUF's.
    G32,
    /// GPTQ's and AWQ's smaller.
    G64,
    /// GPTQ's and AWQ's usual.
    G128,
}

impl Group {
    /// Columns.
    pub fn cols(self) -> usize {
        match self {
            Group::G32 => 32,
            Group::G64 => 64,
            Group::G128 => 128,
        }
    }
}

/// A matrix on the host: a code for each value, and a scale and a minimum for each group, all row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Grouped {
    rows: usize,
    cols: usize,
    group: Group,
    bits: usize,
    codes: Vec<u8>,
    scales: Vec<(f16, f16)>,
}

impl Grouped {
    /// A matrix of codes of 4 bits, with `(scale, minimum)` of each group of columns.
    ///
    /// # Panics
    /// When the lengths do not match.
    pub fn new(rows: usize, cols: usize, group: Group, codes: Vec<u8>, scales: Vec<(f16, f16)>) -> Grouped {
        assert_eq!(codes.len(), rows * cols, "codes of {rows} x {cols}");
        assert_eq!(scales.len(), rows * cols.div_ceil(group.cols()), "scales of {rows} x {cols} in groups");
        assert!(codes.iter().all(|&code| code < 16), "codes have 4 bits");
        Grouped { rows, cols, group, bits: 4, codes, scales }
    }

    /// In which groups and of how many bits a file tensor's codes are here, if its type is of this kind.
    pub(super) fn form(weight_type: WeightType) -> Option<(Group, usize)> {
        use WeightType::{I2G32, I2G64, I2G128, I2G256, I3G32, I3G64, I3G128, I3G256, I4G32, I4G64, I4G128};
        use WeightType::{Q4_0, Q4_1, Q5_0, Q5_1, S4G64, S4G128};
        match weight_type {
            Q5_0 | Q5_1 => Some((Group::G32, 5)),
            Q4_0 | Q4_1 | I2G32 | I3G32 | I4G32 => Some((Group::G32, 4)),
            I2G64 | I3G64 | I4G64 | S4G64 => Some((Group::G64, 4)),
            I2G128 | I2G256 | I3G128 | I3G256 | I4G128 | S4G128 => Some((Group::G128, 4)),
            _ => None,
        }
    }

    /// Reads a file tensor, if its type is of this kind.
    pub fn read(
        weight_type: WeightType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Option<Result<Grouped, ShapeError>> {
        let (group, bits) = Grouped::form(weight_type)?;
        let read: fn(&[u8], &mut Grouped) = match weight_type {
            WeightType::Q4_0 | WeightType::S4G64 | WeightType::S4G128 => |block, out| {
                let scale = half(block, 0);
                out.push((scale, f16::from_f32(-8.0 * scale.to_f32())), &block[2..]);
            },
            WeightType::Q4_1 | WeightType::I4G64 | WeightType::I4G128 => {
                |block, out| out.push((half(block, 0), half(block, 2)), &block[4..])
            }
            WeightType::I4G32 => |block, out| {
                let minimum = -half(block, 0).to_f32() * f32::from(int4::zero_point(block));
                out.push((half(block, 0), f16::from_f32(minimum)), int4::nibbles(block));
            },
            WeightType::Q5_0 => |block, out| {
                let scale = half(block, 0);
                out.push_five((scale, f16::from_f32(-16.0 * scale.to_f32())), &block[2..]);
            },
            WeightType::Q5_1 => |block, out| out.push_five((half(block, 0), half(block, 2)), &block[4..]),
            WeightType::I2G32 | WeightType::I2G64 | WeightType::I2G128 | WeightType::I2G256 => {
                |block, out| out.push_few(block, 8)
            }
            _ => |block, out| out.push_few(block, 12),
        };
        let mut out = Grouped { rows, cols, group, bits, codes: Vec::with_capacity(rows * cols), scales: Vec::new() };
        Some(crate::weights::validated_row_bytes(weight_type, rows, cols, bytes.len()).map(|_| {
            bytes.chunks_exact(weight_type.block_bytes()).for_each(|block| read(block, &mut out));
            out
        }))
    }

    /// A group whose codes come in 32s, value i paired with i + 16.
    fn push(&mut self, scale: (f16, f16), nibbles: &[u8]) {
        self.scales.push(scale);
        for block in nibbles.chunks_exact(16) {
            self.codes.extend(block.iter().map(|pair| pair & 15));
            self.codes.extend(block.iter().map(|pair| pair >> 4));
        }
    }

    /// A group of 32 codes of 5 bits: four bytes of their top bits, and nibbles.
    fn push_five(&mut self, scale: (f16, f16), bytes: &[u8]) {
        let (top, nibbles) = bytes.split_at(4);
        self.push(scale, nibbles);
        let first = self.codes.len() - 32;
        self.codes[first..].iter_mut().enumerate().for_each(|(i, code)| *code |= (top[i / 8] >> (i % 8) & 1) << 4);
    }

    /// A group of 2 or 3 bits, of so many bytes a block; wider ones become several. In 4 bits there is room to bring every zero
    /// point to the middle: then the kernels need no minimums.
    fn push_few(&mut self, group: &[u8], block_bytes: usize) {
        let (scale, shift) = (half(group, 0), 8 - int2::zero_point(group));
        let first = self.codes.len();
        let blocks = int2::blocks(group, block_bytes);
        self.codes.extend(blocks.flat_map(int2::codes_of).map(|code| code + shift));
        let groups = (self.codes.len() - first) / self.group.cols();
        self.scales.extend(iter::repeat_n((scale, f16::from_f32(-8.0 * scale.to_f32())), groups));
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Columns that share a scale.
    pub fn group(&self) -> Group {
        self.group
    }

    /// Bits of a code.
    pub(super) fn bits(&self) -> usize {
        self.bits
    }

    /// The value at a place: the reference.
    pub fn value(&self, row: usize, col: usize) -> f64 {
        let groups = self.cols.div_ceil(self.group.cols());
        let (scale, minimum) = self.scales[row * groups + col / self.group.cols()];
        f64::from(scale) * f64::from(self.codes[row * self.cols + col]) + f64::from(minimum)
    }

    /// Whether the middle code does not always stand for zero: then the kernels also sum the input.
    fn is_affine(&self) -> bool {
        let middle = (1 << (self.bits - 1)) as f32;
        self.scales.iter().any(|(scale, minimum)| minimum.to_f32() + middle * scale.to_f32() != 0.0)
    }

    /// The code at a place; 0 outside.
    fn code(&self, row: usize, col: usize) -> u32 {
        if row < self.rows && col < self.cols { self.codes[row * self.cols + col].into() } else { 0 }
    }

    /// As it lies on a device.
    pub(super) fn words(&self) -> Words {
        Words { codes: self.pack_codes(), scales: self.pack_scales(), affine: self.is_affine() }
    }

    /// Codes as the lanes of a warp read them: 128 words for 16 rows and 64 columns, and then 32 with their fifth bits.
    fn pack_codes(&self) -> Vec<u32> {
        let (tiles, blocks) = (self.rows.div_ceil(ROW_TILE), self.cols.div_ceil(PACK_COLS));
        let mut packed = Vec::with_capacity(tiles * blocks * 32 * self.bits);
        for tile in 0..tiles {
            for place in (0..blocks).map(|block| [tile * ROW_TILE, block * PACK_COLS]) {
                let words = (0..32).flat_map(|lane| (0..4).map(move |mma| (lane, mma)));
                packed.extend(words.map(|(lane, mma)| self.low_word(place, lane, mma)));
                packed.extend((0..32).filter(|_| self.bits > 4).map(|lane| self.high_word(place, lane)));
            }
        }
        packed
    }

    /// Four bits of each code that lane `lane` multiplies in mma `mma` of 64 columns.
    fn low_word(&self, place: [usize; 2], lane: usize, mma: usize) -> u32 {
        (0..4).fold(0, |packed, register| {
            let [former, latter] = self.pair(place, lane, mma, register);
            packed | (former & 15) << (4 * register) | (latter & 15) << (16 + 4 * register)
        })
    }

    /// The fifth bits of what it multiplies in all four.
    fn high_word(&self, place: [usize; 2], lane: usize) -> u32 {
        (0..16).fold(0, |packed, index| {
            let [former, latter] = self.pair(place, lane, index / 4, index % 4);
            packed | (former >> 4) << index | (latter >> 4) << (16 + index)
        })
    }

    /// The two codes that a lane has in a register of the operand: of row g + 8 (register % 2), columns 2 (register / 2) and the
    /// next of the four that it has of the mma's.
    fn pair(&self, [first_row, first_col]: [usize; 2], lane: usize, mma: usize, register: usize) -> [u32; 2] {
        let row = first_row + lane / 4 + 8 * (register % 2);
        let col = first_col + 32 * (mma / 2) + 8 * (lane % 4) + 4 * (mma % 2) + 2 * (register / 2);
        [self.code(row, col), self.code(row, col + 1)]
    }

    /// Scales and minimums: 16 words for 16 rows and a group, row g + 8 after row g.
    fn pack_scales(&self) -> Vec<u32> {
        let groups = self.cols.div_ceil(self.group.cols());
        let word = |row: usize, group: usize| {
            let (scale, minimum) = *self.scales.get(row * groups + group).unwrap_or(&(f16::ZERO, f16::ZERO));
            u32::from(scale.to_bits()) | u32::from(minimum.to_bits()) << 16
        };
        let tiles = self.rows.div_ceil(ROW_TILE);
        let places = (0..tiles).flat_map(|tile| (0..groups).map(move |group| (tile, group)));
        let rows =
            places.flat_map(|(tile, group)| (0..ROW_TILE).map(move |i| (tile * ROW_TILE + i / 2 + 8 * (i % 2), group)));
        rows.map(|(row, group)| word(row, group)).collect()
    }
}

fn half(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}
