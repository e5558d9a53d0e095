//! Integer codes with a scale, and mostly a zero point, for each group of inputs: `weight = scale · (code - zero
//! point)`.
//!
//! GPTQ (Frantar et al. 2022), AWQ (Lin et al. 2023) and compressed-tensors differ in how integers are packed in words.
//! Codes are kept. Scales, and with four bits in groups of 64 and more also `-scale · zero point`, are rounded to f16,
//! which changes a weight by less than a hundredth of a step.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use windlass_checkpoint::{Data, Tensor};
use windlass_kernels::WeightType;

use super::order::Order;
use super::parts::{FloatPart, Parts};
use super::{CRUMBS, SIGNED_BYTES, THREE_BITS, widest};
use crate::config::quantization_config::{GptqZeros, Layout};

/// The order of nibbles in a word of AWQ: output `n` of eight is nibble `AWQ_NIBBLE[n]`.
const AWQ_NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A matrix of codes, `[rows = outputs, cols = inputs]`.
#[derive(Clone, Debug)]
pub(super) struct Codes<'a> {
    layout: Layout,
    rows: usize,
    cols: usize,
    /// Number of inputs that share a scale.
    group: usize,
    codes: Data<'a>,
    zeros: Data<'a>,
    scales: FloatPart<'a>,
    /// The order of inputs, if groups are not in it (`desc_act`).
    pub order: Option<Arc<Order>>,
    /// Whether the zero point is always the middle code.
    symmetric: bool,
}

impl<'a> Codes<'a> {
    /// Finds the tensors of a matrix `[cols, rows]`.
    pub fn find<F>(parts: &Parts<'_, F>, [cols, rows]: [usize; 2]) -> Result<Codes<'a>, String>
    where
        F: Fn(&str) -> Option<Tensor<'a>>,
    {
        let layout = parts.scheme.layout;
        let group = parts.scheme.group.unwrap_or(cols);
        if group == 0 || !cols.is_multiple_of(group) || !group.is_multiple_of(32) {
            return Err(format!("groups of {group} do not divide its {cols} inputs, or are no multiple of 32"));
        }
        let groups = cols / group;
        let words = |values: usize| layout.words(values);
        let (codes, scales, zeros) = match layout {
            Layout::Gptq { .. } | Layout::Awq => {
                let dims = if layout == Layout::Awq { [words(rows)?, cols] } else { [rows, words(cols)?] };
                let zeros = parts.part("qzeros", "i32", [words(rows)?, groups])?;
                (parts.codes("i32", dims)?, parts.floats("scales", [rows, groups])?, zeros.bytes)
            }
            Layout::Packed { symmetric, .. } => {
                let codes = parts.codes("i32", [words(cols)?, rows])?;
                let zeros = || parts.part("weight_zero_point", "i32", [groups, words(rows)?]);
                let zeros = if symmetric { Data::default() } else { zeros()?.bytes };
                (codes, parts.floats("weight_scale", [groups, rows])?, zeros)
            }
            _ => {
                let zeros = || parts.part("weight_zero_point", "i8", [groups, rows]);
                let zeros =
                    if layout == (Layout::Bytes { symmetric: true }) { Data::default() } else { zeros()?.bytes };
                (parts.codes("i8", [cols, rows])?, parts.floats("weight_scale", [groups, rows])?, zeros)
            }
        };
        let order = order(parts, cols, group)?;
        let mut found = Codes { layout, rows, cols, group, codes: codes.bytes, zeros, scales, order, symmetric: false };
        let middle = 1 << (found.bits() - 1);
        found.symmetric = (0..rows).all(|row| (0..groups).all(|group| found.zero(row, group) == middle));
        Ok(found)
    }

    /// The codes of some inputs, if inputs have an order, and their format: each rank sorts its own inputs and has the
    /// scales of all groups. Groups may have any length, so the format is the one with the narrowest blocks.
    pub fn of_inputs(&self, inputs: &Range<usize>) -> Option<(Codes<'a>, WeightType)> {
        let order = Some(Arc::new(self.order.as_ref()?.some(inputs)));
        let kind = match self.bits() {
            2 => WeightType::I2G32,
            3 => WeightType::I3G32,
            4 if self.symmetric => WeightType::Q4_0,
            4 if self.kind() == WeightType::I4G32 => WeightType::I4G32,
            // Its minimums are rounded to f16, as those of wider groups are.
            4 => WeightType::Q4_1,
            _ if self.symmetric => WeightType::Q8_0,
            _ => WeightType::U8G32,
        };
        Some((Codes { order, ..self.clone() }, kind))
    }

    fn bits(&self) -> u32 {
        match self.layout {
            Layout::Gptq { bits, .. } | Layout::Packed { bits, .. } => bits,
            Layout::Awq => 4,
            _ => 8,
        }
    }

    /// The format with the widest groups that fit.
    pub fn kind(&self) -> WeightType {
        let kinds: &[WeightType] = match (self.bits(), self.symmetric) {
            (8, true) => &SIGNED_BYTES,
            (8, false) => &[WeightType::U8G64, WeightType::U8G32],
            (2, _) => &CRUMBS,
            (3, _) => &THREE_BITS,
            (_, true) => &[WeightType::S4G128, WeightType::S4G64, WeightType::Q4_0],
            (_, false) => &[WeightType::I4G128, WeightType::I4G64, WeightType::I4G32],
        };
        widest(kinds, &[self.group])
    }

    /// Fails if values would exceed the range of f16, in which scales and minimums are stored. Devices store codes of 2
    /// bits with a zero point of 8.
    pub fn check_scales(&self) -> Result<(), String> {
        let most = f16::MAX.to_f32() / (1 << self.bits().max(3)) as f32;
        let is_wrong = |(_, scale): &(usize, f32)| scale.is_nan() || scale.abs() > most;
        match self.scales.all().into_iter().enumerate().find(is_wrong) {
            Some((index, scale)) => {
                let (place, bits) = (self.scales.place(index), self.bits());
                Err(format!("a scale is {scale}; with {bits} bits they are at most {most} ({place})"))
            }
            None => Ok(()),
        }
    }

    /// Appends some columns of a packed row in the file format of the kernels.
    pub fn append_row(&self, row: usize, places: Range<usize>, kind: WeightType, out: &mut Vec<u8>) {
        for first in places.step_by(kind.block_elements()) {
            self.append_block(row, first, kind, out);
        }
    }

    /// Appends the block of a row that starts at column `first`.
    fn append_block(&self, row: usize, first: usize, kind: WeightType, out: &mut Vec<u8>) {
        let group = self.group_of(first);
        let scale = self.scales.get(self.scale_index(row, group));
        let places = first..first + kind.block_elements();
        out.extend(f16::from_f32(scale).to_le_bytes());
        match self.bits() {
            8 if self.symmetric => out.extend(places.map(|place| (self.code(row, place) ^ 0x80) as u8)),
            8 => {
                out.push(self.zero(row, group) as u8);
                out.extend(places.map(|place| self.code(row, place) as u8));
            }
            4 => {
                match kind {
                    _ if self.symmetric => {}
                    WeightType::I4G32 => out.push(self.zero(row, group) as u8),
                    _ => out.extend(f16::from_f32(-scale * self.zero(row, group) as f32).to_le_bytes()),
                }
                self.append_nibbles(row, places, out);
            }
            bits => {
                out.push(self.zero(row, group) as u8);
                self.append_crumbs(row, places, bits, out);
            }
        }
    }

    /// Appends codes of 4 bits: of each 32 columns, two that are 16 apart share a byte.
    fn append_nibbles(&self, row: usize, places: Range<usize>, out: &mut Vec<u8>) {
        for block in places.step_by(32) {
            let pair = |place: usize| (self.code(row, place) | self.code(row, place + 16) << 4) as u8;
            out.extend((block..block + 16).map(pair));
        }
    }

    /// Appends codes of 2 or 3 bits: for each 32 columns the lower two bits, then the top bits.
    fn append_crumbs(&self, row: usize, places: Range<usize>, bits: u32, out: &mut Vec<u8>) {
        for block in places.step_by(32) {
            let codes: [u32; 32] = std::array::from_fn(|i| self.code(row, block + i));
            let byte = |codes: &[u32], width: u32| codes.iter().rev().fold(0, |byte, code| byte << width | *code as u8);
            out.extend(codes.map(|code| code & 3).chunks(4).map(|codes| byte(codes, 2)));
            out.extend(codes.map(|code| code >> 2).chunks(8).filter(|_| bits == 3).map(|codes| byte(codes, 1)));
        }
    }

    fn group_of(&self, place: usize) -> usize {
        self.order.as_ref().map_or(place / self.group, |order| order.group(place))
    }

    fn scale_index(&self, row: usize, group: usize) -> usize {
        match self.layout {
            Layout::Gptq { .. } | Layout::Awq => group * self.rows + row,
            _ => row * (self.cols / self.group) + group,
        }
    }

    /// The code of a row at a column, plus 128 for signed bytes; the zero point if the column has no input.
    fn code(&self, row: usize, place: usize) -> u32 {
        let col = self.order.as_ref().map_or(Some(place), |order| order.column(place));
        let Some(col) = col else { return self.zero(row, self.group_of(place)) };
        match self.layout {
            Layout::Gptq { bits, .. } => bits_at(&self.codes, row, self.rows, col, bits),
            Layout::Awq => nibble(&self.codes, (col * self.rows + row) / 8, AWQ_NIBBLE[row % 8]),
            Layout::Packed { bits, .. } => {
                let words = self.cols * bits as usize / 32;
                bits_at(&self.codes[4 * row * words..], 0, 1, col, bits)
            }
            _ => u32::from(self.codes[row * self.cols + col] ^ 0x80),
        }
    }

    fn zero(&self, row: usize, group: usize) -> u32 {
        let groups = self.cols / self.group;
        match self.layout {
            Layout::Gptq { bits, zeros: GptqZeros::Middle } => 1 << (bits - 1),
            Layout::Gptq { bits, zeros } => {
                let words = &self.zeros[4 * group * (self.rows * bits as usize / 32)..];
                match zeros {
                    GptqZeros::StoredLessOne => one_more(words, row, bits),
                    _ => bits_at(words, 0, 1, row, bits),
                }
            }
            Layout::Awq => nibble(&self.zeros, (group * self.rows + row) / 8, AWQ_NIBBLE[row % 8]),
            // Signed codes are stored plus half their range, and so are zero points.
            Layout::Packed { bits, symmetric: true } => 1 << (bits - 1),
            Layout::Packed { bits, .. } => bits_at(&self.zeros, group, groups, row, bits),
            Layout::Bytes { symmetric: true } => 128,
            _ => u32::from(self.zeros[row * groups + group] ^ 0x80),
        }
    }
}

impl Layout {
    /// Number of words that so many values take.
    fn words(self, values: usize) -> Result<usize, String> {
        let bits = match self {
            Layout::Gptq { bits, .. } | Layout::Packed { bits, .. } => bits as usize,
            _ => 4,
        };
        match values.checked_mul(bits).filter(|all| all.is_multiple_of(32)) {
            Some(all) => Ok(all / 32),
            None => Err(format!("{values} values of {bits} bits do not fill words of 32")),
        }
    }
}

/// The order of inputs by group; `None` if they are in it already.
fn order<'a, F>(parts: &Parts<'_, F>, cols: usize, group: usize) -> Result<Option<Arc<Order>>, String>
where
    F: Fn(&str) -> Option<Tensor<'a>>,
{
    let name = match parts.scheme.layout {
        Layout::Gptq { .. } => "g_idx",
        Layout::Packed { .. } => "weight_g_idx",
        _ => return Ok(None),
    };
    let Some(tensor) = parts.optional(name) else { return Ok(None) };
    if tensor.kind.name() != "i32" || tensor.dims != [cols as u64] {
        let Tensor { name, kind, dims, offset, .. } = tensor;
        return Err(format!("{name:?} is {kind} {dims:?}; it should be i32 [{cols}] (its data is at offset {offset})"));
    }
    let Tensor { name, bytes, offset, .. } = tensor;
    let groups = bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
    let groups = groups.zip((offset..).step_by(4)).map(|(found, at)| match usize::try_from(found) {
        Ok(found) if found < cols / group => Ok(found),
        _ => Err(format!("{name:?} has group {found} of {} at offset {at}", cols / group)),
    });
    let order = Order::new(&groups.collect::<Result<Vec<usize>, String>>()?);
    let is_whole = order.inputs.len() == cols && (0..cols).all(|place| order.group(place) == place / group);
    match is_whole {
        true => Ok((!order.is_sorted()).then(|| Arc::new(order))),
        false => Err(format!("{name:?} at offset {offset} does not give every group {group} inputs")),
    }
}

/// Value `index` of `bits` bits in a stream of little-endian words, the first of which is `first` and which are
/// `stride` words apart. A value of three bits may start in one word and end in the next.
fn bits_at(words: &[u8], first: usize, stride: usize, index: usize, bits: u32) -> u32 {
    let bit = index * bits as usize;
    let word = |at: usize| {
        let start = 4 * (first + at * stride);
        u32::from_le_bytes([words[start], words[start + 1], words[start + 2], words[start + 3]])
    };
    let (at, shift) = (bit / 32, (bit % 32) as u32);
    let low = u64::from(word(at)) >> shift;
    let high = if shift + bits > 32 { u64::from(word(at + 1)) << (32 - shift) } else { 0 };
    (low | high) as u32 & ((1 << bits) - 1)
}

/// Value `index` of `words` plus 1. Tools store zero points minus 1. They subtract it from whole words, so that a zero
/// point of 0 borrows from the value above it; values of three bits, which words divide, they subtract one by one.
fn one_more(words: &[u8], index: usize, bits: u32) -> u32 {
    let mask = (1 << bits) - 1;
    if !32_u32.is_multiple_of(bits) {
        return (bits_at(words, 0, 1, index, bits) + 1) & mask;
    }
    let bit = index * bits as usize;
    let word = u32::from_le_bytes(words.as_chunks().0[bit / 32]);
    word.wrapping_add(u32::MAX / mask) >> (bit % 32) & mask
}

/// Nibble `index` of little-endian word `word`.
fn nibble(words: &[u8], word: usize, index: usize) -> u32 {
    u32::from(words[4 * word + index / 2] >> (index % 2 * 4) & 15)
}
