//! Integers as tools lay them out.

use half::f16;
use windlass_checkpoint::testing::SafetensorsBuilder;

/// A matrix `[rows, cols]`: value = scale · (code - zero).
pub struct Codes {
    pub rows: usize,
    pub cols: usize,
    pub group: usize,
    /// The group of every column.
    pub groups_of: Vec<usize>,
    /// `[row][col]`.
    pub codes: Vec<i32>,
    /// `[row][group]`.
    pub zeros: Vec<i32>,
    /// `[row][group]`, exact in f16.
    pub scales: Vec<f32>,
}

/// A stream of codes, each of so many bits, in little-endian words.
fn stream(bits: usize, codes: impl Iterator<Item = i32>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let (mut pending, mut count) = (0_u64, 0);
    for code in codes {
        pending |= (code as u64 & ((1 << bits) - 1)) << count;
        count += bits;
        while count >= 8 {
            bytes.push(pending as u8);
            pending >>= 8;
            count -= 8;
        }
    }
    assert_eq!(count, 0, "whole words");
    bytes
}

/// Eight nibbles to a word, the first in the lowest bits.
fn words(nibbles: impl Iterator<Item = i32>) -> Vec<u8> {
    stream(4, nibbles)
}

/// Words less a number: places of 0 borrow from those above.
fn less(number: u32, words: &[u8]) -> Vec<u8> {
    let less = |word: &[u8; 4]| u32::from_le_bytes(*word).wrapping_sub(number).to_le_bytes();
    words.as_chunks().0.iter().flat_map(less).collect()
}

/// Rows of words to columns of them: `[rows][words]` to `[words][rows]`.
fn transposed(rows: usize, words: &[u8]) -> Vec<u8> {
    let per_row = words.len() / 4 / rows;
    let word = |row: usize, at: usize| &words[4 * (row * per_row + at)..][..4];
    (0..per_row).flat_map(|at| (0..rows).flat_map(move |row| word(row, at).to_vec())).collect()
}

impl Codes {
    pub fn groups(&self) -> usize {
        self.cols / self.group
    }

    /// `[group][row]` in f16, as GPTQ and AWQ have them.
    fn scales_by_group(&self) -> Vec<u8> {
        let order = (0..self.groups()).flat_map(|group| (0..self.rows).map(move |row| (row, group)));
        order.flat_map(|(row, group)| f16::from_f32(self.scales[row * self.groups() + group]).to_le_bytes()).collect()
    }

    pub fn values(&self) -> Vec<f32> {
        let value = |i: usize| {
            let group = i / self.cols * self.groups() + self.groups_of[i % self.cols];
            self.scales[group] * (self.codes[i] - self.zeros[group]) as f32
        };
        (0..self.rows * self.cols).map(value).collect()
    }
}

pub fn write_gptq<const BITS: usize, const ZERO_OFFSET: u32>(
    file: SafetensorsBuilder,
    prefix: &str,
    m: &Codes,
) -> SafetensorsBuilder {
    let (rows, cols, groups) = (m.rows, m.cols, m.groups());
    let codes = transposed(rows, &stream(BITS, m.codes.iter().copied()));
    let zeros = (0..groups).flat_map(|group| (0..rows).map(move |row| (row, group)));
    let zeros = zeros.map(|(row, group)| m.zeros[row * groups + group]);
    let zeros = match BITS {
        3 => stream(BITS, zeros.map(|zero| zero - ZERO_OFFSET as i32)),
        _ => less(ZERO_OFFSET * (u32::MAX / ((1 << BITS) - 1)), &stream(BITS, zeros)),
    };
    let order: Vec<u8> = m.groups_of.iter().flat_map(|group| (*group as i32).to_le_bytes()).collect();
    let [rows, cols, groups, bits] = [rows, cols, groups, BITS].map(|size| size as u64);
    // Its first tool wrote biases of zeros, too.
    file.tensor(&format!("{prefix}.bias"), "F16", &[rows], &vec![0; 2 * m.rows])
        .tensor(&format!("{prefix}.qweight"), "I32", &[cols * bits / 32, rows], &codes)
        .tensor(&format!("{prefix}.qzeros"), "I32", &[groups, rows * bits / 32], &zeros)
        .tensor(&format!("{prefix}.scales"), "F16", &[groups, rows], &m.scales_by_group())
        .tensor(&format!("{prefix}.g_idx"), "I32", &[cols], &order)
}

pub fn write_awq(file: SafetensorsBuilder, prefix: &str, m: &Codes) -> SafetensorsBuilder {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let (rows, cols, groups) = (m.rows, m.cols, m.groups());
    let outputs = || (0..rows / 8).flat_map(|word| ORDER.map(|i| 8 * word + i));
    let codes = words(
        (0..cols).flat_map(|col| outputs().map(move |row| (row, col))).map(|(row, col)| m.codes[row * cols + col]),
    );
    let zeros = (0..groups).flat_map(|group| outputs().map(move |row| (row, group)));
    let zeros = words(zeros.map(|(row, group)| m.zeros[row * groups + group]));
    let [rows, cols, groups] = [rows, cols, groups].map(|size| size as u64);
    file.tensor(&format!("{prefix}.qweight"), "I32", &[cols, rows / 8], &codes)
        .tensor(&format!("{prefix}.qzeros"), "I32", &[groups, rows / 8], &zeros)
        .tensor(&format!("{prefix}.scales"), "F16", &[groups, rows], &m.scales_by_group())
}

pub fn write_packed<const BITS: usize, const SYMMETRIC: bool>(
    file: SafetensorsBuilder,
    prefix: &str,
    m: &Codes,
) -> SafetensorsBuilder {
    let scales: Vec<u8> = m.scales.iter().flat_map(|scale| f16::from_f32(*scale).to_le_bytes()).collect();
    let groups = m.groups();
    let by_group = (0..groups).flat_map(|group| (0..m.rows).map(move |row| (row, group)));
    let zeros = stream(BITS, by_group.map(|(row, group)| m.zeros[row * groups + group]));
    let zeros = transposed(groups, &zeros);
    let [rows, cols, groups, bits] = [m.rows, m.cols, groups, BITS].map(|size| size as u64);
    let shape: Vec<u8> = [rows, cols].iter().flat_map(|size| size.to_le_bytes()).collect();
    let codes = stream(BITS, m.codes.iter().copied());
    let file = file
        .tensor(&format!("{prefix}.weight_packed"), "I32", &[rows, cols * bits / 32], &codes)
        .tensor(&format!("{prefix}.weight_scale"), "F16", &[rows, groups], &scales)
        .tensor(&format!("{prefix}.weight_shape"), "I64", &[2], &shape);
    match SYMMETRIC {
        true => file,
        false => file.tensor(&format!("{prefix}.weight_zero_point"), "I32", &[rows * bits / 32, groups], &zeros),
    }
}

pub fn write_bytes<const SYMMETRIC: bool>(file: SafetensorsBuilder, prefix: &str, m: &Codes) -> SafetensorsBuilder {
    let bytes = |codes: &[i32]| codes.iter().map(|code| *code as i8 as u8).collect::<Vec<u8>>();
    let [rows, cols, groups] = [m.rows, m.cols, m.groups()].map(|size| size as u64);
    let file = file
        .tensor(&format!("{prefix}.weight"), "I8", &[rows, cols], &bytes(&m.codes))
        .tensor_f32(&format!("{prefix}.weight_scale"), &[rows, groups], &m.scales)
        .tensor_f32(&format!("{prefix}.input_scale"), &[1], &[0.25]);
    match SYMMETRIC {
        true => file,
        false => file.tensor(&format!("{prefix}.weight_zero_point"), "I8", &[rows, groups], &bytes(&m.zeros)),
    }
}
