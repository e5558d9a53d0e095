//! What the tests of all ops share: random numbers, random weights, and an f64 reading of file bytes that shares no
//! code with the packed formats.

use half::{bf16, f16};

use crate::{PackedMatrix, Pool, WeightType};

/// A small fixed-seed generator (SplitMix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in `-size..size`.
    pub(crate) fn value(&mut self, size: f32) -> f32 {
        ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * size
    }

    pub(crate) fn values(&mut self, count: usize, size: f32) -> Vec<f32> {
        (0..count).map(|_| self.value(size)).collect()
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// File bytes of a random matrix: all code bits random, all scales of moderate size.
pub(crate) fn file_bytes(weight_type: WeightType, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let blocks = rows * cols / weight_type.block_elements();
    let mut bytes = Vec::new();
    for _ in 0..blocks {
        let mut block: Vec<u8> = (0..weight_type.block_bytes()).map(|_| random.next() as u8).collect();
        let mut half = |random: &mut Random, at: usize| {
            block[at..at + 2].copy_from_slice(&f16::from_f32(random.value(0.1)).to_le_bytes());
        };
        match weight_type {
            WeightType::F32 => block.copy_from_slice(&random.value(1.0).to_le_bytes()),
            WeightType::BF16 => block.copy_from_slice(&bf16::from_f32(random.value(1.0)).to_le_bytes()),
            WeightType::F16 | WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => half(&mut random, 0),
            WeightType::IQ4NL | WeightType::IQ4XS | WeightType::NF4 | WeightType::FP4 => half(&mut random, 0),
            WeightType::S4G64 | WeightType::S4G128 => half(&mut random, 0),
            WeightType::I8G64 | WeightType::I8G128 | WeightType::U8G32 | WeightType::U8G64 => half(&mut random, 0),
            WeightType::F8G64 => {
                half(&mut random, 0);
                block[2] &= 0x77;
            }
            WeightType::I2G32 | WeightType::I2G64 | WeightType::I2G128 | WeightType::I2G256 => {
                half(&mut random, 0);
                block[2] &= 3;
            }
            WeightType::I3G32 | WeightType::I3G64 | WeightType::I3G128 | WeightType::I3G256 => {
                half(&mut random, 0);
                block[2] &= 7;
            }
            WeightType::I4G32 => {
                half(&mut random, 0);
                block[2] &= 15;
            }
            WeightType::Q4_1
            | WeightType::Q5_1
            | WeightType::Q4K
            | WeightType::Q5K
            | WeightType::I4G64
            | WeightType::I4G128 => {
                (0..2).for_each(|i| half(&mut random, 2 * i));
            }
            WeightType::Q2K => (40..42).for_each(|i| half(&mut random, 2 * i)),
            WeightType::Q3K => half(&mut random, 108),
            WeightType::Q6K => half(&mut random, 208),
            WeightType::MXFP4 => block[0] = 120 + random.below(8) as u8,
        }
        bytes.extend(block);
    }
    bytes
}

/// A random matrix, packed.
pub(crate) fn packed(pool: &Pool, weight_type: WeightType, rows: usize, cols: usize, seed: u64) -> PackedMatrix {
    PackedMatrix::pack(pool, weight_type, rows, cols, &file_bytes(weight_type, rows, cols, seed)).unwrap()
}

/// The values of file bytes, straight from the formats' definitions.
pub(crate) fn file_values(weight_type: WeightType, bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(weight_type.block_bytes()).flat_map(|block| block_values(weight_type, block)).collect()
}

/// IQ4_NL's values.
const NONLINEAR: [f64; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

/// MXFP4's values.
const FP4: [f64; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Bit `i` of four little-endian bytes.
fn top_bit(bytes: &[u8], i: usize) -> f64 {
    f64::from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) >> i & 1)
}

/// The scale and minimum of a sub-block of Q4_K or Q5_K.
fn k_scale_and_minimum(s: &[u8], sub: usize) -> (f64, f64) {
    let (scale, minimum) = if sub < 4 {
        (s[sub] & 0x3f, s[sub + 4] & 0x3f)
    } else {
        ((s[sub + 4] & 0xf) + (s[sub - 4] / 64) * 16, s[sub + 4] / 16 + (s[sub] / 64) * 16)
    };
    (f64::from(scale), f64::from(minimum))
}

fn block_values(weight_type: WeightType, block: &[u8]) -> Vec<f64> {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f64();
    let nibble = |from: usize, i: usize| f64::from(block[from + i % 16] >> (i / 16 * 4) & 15);
    match weight_type {
        WeightType::F32 => vec![f64::from(f32::from_le_bytes([block[0], block[1], block[2], block[3]]))],
        WeightType::F16 => vec![half(0)],
        WeightType::BF16 => vec![bf16::from_le_bytes([block[0], block[1]]).to_f64()],
        WeightType::Q4_0 => (0..32).map(|i| half(0) * (nibble(2, i) - 8.0)).collect(),
        WeightType::Q4_1 => (0..32).map(|i| half(0) * nibble(4, i) + half(2)).collect(),
        WeightType::Q8_0 => (0..32).map(|i| half(0) * f64::from(block[2 + i] as i8)).collect(),
        WeightType::Q5_0 => {
            (0..32).map(|i| half(0) * (nibble(6, i) + 16.0 * top_bit(&block[2..6], i) - 16.0)).collect()
        }
        WeightType::Q5_1 => {
            (0..32).map(|i| half(0) * (nibble(8, i) + 16.0 * top_bit(&block[4..8], i)) + half(2)).collect()
        }
        WeightType::NF4 | WeightType::FP4 => {
            // The format's numbers are whole steps of 1/32512.
            let numbers = weight_type.numbers().unwrap().map(|number| (f64::from(number) * 32512.0).round() / 32512.0);
            (0..64).map(|i| half(0) * numbers[nibble(2 + i / 32 * 16, i % 32) as usize]).collect()
        }
        WeightType::I2G32 | WeightType::I2G64 | WeightType::I2G128 | WeightType::I2G256 => {
            let code = |i: usize| block[3 + i / 4] >> (2 * (i % 4)) & 3;
            let value = |i: usize| half(0) * (f64::from(code(i)) - f64::from(block[2]));
            (0..weight_type.block_elements()).map(value).collect()
        }
        WeightType::I3G32 | WeightType::I3G64 | WeightType::I3G128 | WeightType::I3G256 => {
            let low = |i: usize| block[3 + i / 32 * 12 + i % 32 / 4] >> (2 * (i % 4)) & 3;
            let top = |i: usize| top_bit(&block[3 + i / 32 * 12 + 8..][..4], i % 32);
            let value = |i: usize| half(0) * (f64::from(low(i)) + 4.0 * top(i) - f64::from(block[2]));
            (0..weight_type.block_elements()).map(value).collect()
        }
        WeightType::I4G32 => (0..32).map(|i| half(0) * (nibble(3, i) - f64::from(block[2]))).collect(),
        WeightType::I4G64 | WeightType::I4G128 => {
            let value = |i: usize| half(0) * nibble(4 + i / 32 * 16, i % 32) + half(2);
            (0..weight_type.block_elements()).map(value).collect()
        }
        WeightType::S4G64 | WeightType::S4G128 => {
            let value = |i: usize| half(0) * (nibble(2 + i / 32 * 16, i % 32) - 8.0);
            (0..weight_type.block_elements()).map(value).collect()
        }
        WeightType::I8G64 | WeightType::I8G128 => {
            (0..weight_type.block_elements()).map(|i| half(0) * f64::from(block[2 + i] as i8)).collect()
        }
        WeightType::U8G32 | WeightType::U8G64 => {
            let value = |code: &u8| half(0) * (f64::from(*code) - f64::from(block[2]));
            block[3..].iter().map(value).collect()
        }
        WeightType::F8G64 => {
            let step = |i: usize| half(0) * 2f64.powi(-i32::from(block[2] >> (i / 32 * 4) & 15));
            (0..64).map(|i| step(i) * f64::from(block[3 + i] as i8)).collect()
        }
        WeightType::IQ4NL => (0..32).map(|i| half(0) * NONLINEAR[nibble(2, i) as usize]).collect(),
        WeightType::MXFP4 => {
            let power = 2f64.powi(i32::from(block[0]) - 127);
            (0..32).map(|i| power * FP4[nibble(1, i) as usize]).collect()
        }
        WeightType::IQ4XS => (0..256)
            .map(|i| {
                let sub = i / 32;
                let high = u16::from_le_bytes([block[2], block[3]]) >> (2 * sub) & 3;
                let scale = f64::from(block[4 + sub / 2] >> (4 * (sub % 2)) & 15) + 16.0 * f64::from(high) - 32.0;
                half(0) * scale * NONLINEAR[nibble(8 + 16 * sub, i % 32) as usize]
            })
            .collect(),
        WeightType::Q2K => (0..256)
            .map(|i| {
                let (scale, minimum) = (f64::from(block[i / 16] & 15), f64::from(block[i / 16] >> 4));
                let code = block[16 + i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
                half(80) * scale * f64::from(code) - half(82) * minimum
            })
            .collect(),
        WeightType::Q3K => (0..256)
            .map(|i| {
                let (group, s) = (i / 16, &block[96..108]);
                let low = if group < 8 { s[group] & 15 } else { s[group - 8] >> 4 };
                let scale = f64::from(low) + 16.0 * f64::from(s[8 + group % 4] >> (2 * (group / 4)) & 3) - 32.0;
                let low = block[32 + i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
                let high = block[i % 32] >> (i / 32) & 1;
                half(108) * scale * (f64::from(low) - if high == 1 { 0.0 } else { 4.0 })
            })
            .collect(),
        WeightType::Q5K => (0..256)
            .map(|i| {
                let sub = i / 32;
                let (scale, minimum) = k_scale_and_minimum(&block[4..16], sub);
                let low = block[48 + i / 64 * 32 + i % 32] >> (sub % 2 * 4) & 15;
                let high = block[16 + i % 32] >> sub & 1;
                half(0) * scale * (f64::from(low) + 16.0 * f64::from(high)) - half(2) * minimum
            })
            .collect(),
        WeightType::Q4K => (0..256)
            .map(|i| {
                let sub = i / 32;
                let (scale, minimum) = k_scale_and_minimum(&block[4..16], sub);
                let code = block[16 + i / 64 * 32 + i % 32] >> (sub % 2 * 4) & 15;
                half(0) * scale * f64::from(code) - half(2) * minimum
            })
            .collect(),
        WeightType::Q6K => (0..256)
            .map(|i| {
                let (part, quarter, lane) = (i / 128, i % 128 / 32, i % 32);
                let low = block[64 * part + 32 * (quarter % 2) + lane] >> (4 * (quarter / 2)) & 15;
                let high = block[128 + 32 * part + lane] >> (2 * quarter) & 3;
                let scale = f64::from(block[192 + i / 16] as i8);
                half(208) * scale * (f64::from(low) + 16.0 * f64::from(high) - 32.0)
            })
            .collect(),
    }
}

/// ‖a - b‖ / ‖b‖.
pub(crate) fn relative_error(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
    let norm: f64 = b.iter().map(|b| b * b).sum();
    (difference / norm.max(f64::MIN_POSITIVE)).sqrt()
}

/// The bits of values: equality that tells zeros and NaNs apart.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
