//! Eight-bit floats: as they are for devices that multiply them so, and as blocks of eight-bit integers for others.

use half::{bf16, f16};
use windlass_kernels::WeightType;

/// Values of a block of integers: rows hold whole ones.
pub(super) const BLOCK: usize = 32;

/// A matrix of e4m3 (Micikevicius et al. 2022), row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Float8 {
    /// All of them numbers.
    pub codes: Vec<u8>,
    /// What every `group` codes of a row are multiplied with.
    pub scales: Vec<f32>,
    /// A multiple of 128, or a whole row.
    pub group: usize,
}

impl Float8 {
    /// With the rows of another one behind its own.
    pub(super) fn then(mut self, mut rows: Float8) -> Float8 {
        self.codes.append(&mut rows.codes);
        self.scales.append(&mut rows.scales);
        self
    }

    /// Its values as little-endian bf16, in rows of `cols`.
    pub(crate) fn to_bf16(&self, cols: usize) -> Vec<u8> {
        let groups = self.codes.chunks_exact(cols).flat_map(|row| row.chunks(self.group));
        let values = groups.zip(&self.scales).flat_map(|(codes, scale)| codes.iter().map(move |code| (code, scale)));
        values.flat_map(|(code, scale)| bf16::from_f32(e4m3((*code).into()) * scale).to_le_bytes()).collect()
    }
}

/// What they are packed as where that has to be integers, the widest groups first: of two blocks, and of one.
pub(super) const KINDS: [WeightType; 2] = [WeightType::F8G64, WeightType::Q8_0];

/// Appends codes that are scaled alike as the kernels' files have them: a block as Q8_0, or two as a group of F8G64.
///
/// A block's step is a sixty-fourth of the largest power of two that a code of it holds: all e4m3 of the four highest exponents
/// are whole multiples of it, of at most 120, so that only the smallest are rounded again.
pub(super) fn append(codes: &[u8], scale: f32, out: &mut Vec<u8>) {
    let mut powers = [0.0; 2];
    powers.iter_mut().zip(codes.chunks(BLOCK)).for_each(|(power, codes)| *power = largest_power(codes));
    let largest = powers[0].max(powers[1]);
    let halvings = powers.map(|power| halvings(largest, power));
    let step = f16::from_f32(scale * largest / 64.0);
    out.extend(step.to_le_bytes());
    if codes.len() > BLOCK {
        out.push((halvings[0] | halvings[1] << 4) as u8);
    }
    for (codes, halvings) in codes.chunks(BLOCK).zip(halvings) {
        let step = step.to_f32() / (1 << halvings) as f32;
        let factor = if step == 0.0 { 0.0 } else { scale / step };
        let integer = |code: &u8| (e4m3((*code).into()) * factor).round().clamp(-127.0, 127.0) as i8 as u8;
        out.extend(codes.iter().map(integer));
    }
}

/// The largest power of two that is no more than the largest value of a block.
fn largest_power(codes: &[u8]) -> f32 {
    let largest = codes.iter().map(|code| e4m3((*code).into()).abs()).fold(0.0, f32::max);
    f32::from_bits(largest.to_bits() & 0x7f80_0000)
}

/// How often a power of two is halved to become another, at most as often as a file can say.
fn halvings(from: f32, to: f32) -> u32 {
    let exponent = |power: f32| power.to_bits() >> 23;
    (exponent(from) - exponent(to)).min(15)
}

/// The value of an eight-bit float of four exponent bits (Micikevicius et al. 2022): no infinities; codes that are no
/// number count as 0.
pub(super) fn e4m3(code: u32) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 15, (code & 7) as f32);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => 0.0,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2_f32.powi(exponent as i32 - 7),
    };
    if code & 128 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_have_their_published_values() {
        for (code, value) in [(0x7e, 448.0), (0x38, 1.0), (0x08, 0.015625), (0x07, 0.013671875), (0x01, 0.001953125)] {
            assert_eq!((e4m3(code), e4m3(code | 128)), (value, -value));
        }
    }

    /// Every code as the largest of a block, with all that are smaller beside it.
    #[test]
    fn codes_of_the_four_highest_exponents_keep_their_values_in_blocks() {
        for largest in 1..=0x7e_u8 {
            for codes in all_to(largest).chunks(BLOCK - 1) {
                let codes = [codes, &[largest]].concat();
                let mut block = Vec::new();
                append(&codes, SCALE, &mut block);
                let step = f16::from_le_bytes([block[0], block[1]]).to_f32();
                check(&codes, largest, step, &block[2..]);
            }
        }
    }

    /// The same of two blocks that share a scale: of the first one any code is the largest.
    #[test]
    fn a_block_keeps_its_values_beside_one_of_larger_values() {
        for (largest, first) in [(0x7e, true), (0x7e, false), (0x38, true)] {
            for smaller in 1..=largest {
                let [one, other] = [smaller, largest].map(|largest| {
                    let codes = all_to(largest);
                    [&codes[codes.len().saturating_sub(BLOCK)..], &vec![0; BLOCK.saturating_sub(codes.len())]].concat()
                });
                let (codes, largests) =
                    if first { ([one, other], [smaller, largest]) } else { ([other, one], [largest, smaller]) };
                let mut group = Vec::new();
                append(&codes.concat(), SCALE, &mut group);
                let step = f16::from_le_bytes([group[0], group[1]]).to_f32();
                for (i, (codes, largest)) in codes.iter().zip(largests).enumerate() {
                    let step = step / 2_f32.powi(i32::from(group[2] >> (4 * i) & 15));
                    check(codes, largest, step, &group[3 + BLOCK * i..][..BLOCK]);
                }
            }
        }
    }

    const SCALE: f32 = 0.75;

    /// All codes up to one, of both signs.
    fn all_to(largest: u8) -> Vec<u8> {
        (0..=largest).flat_map(|code| [code, code | 128]).collect()
    }

    /// That integers are the codes' values, but for the smallest ones.
    fn check(codes: &[u8], largest: u8, step: f32, integers: &[u8]) {
        let exact = SCALE * largest_power(&[largest]) / 8.0;
        for (code, integer) in codes.iter().zip(integers) {
            let (value, found) = (SCALE * e4m3((*code).into()), step * f32::from(*integer as i8));
            let most = if value.abs() < exact { step / 2.0 } else { 0.0 };
            assert!((found - value).abs() <= most, "{value} is {found} beside {largest:#x}");
        }
    }
}
