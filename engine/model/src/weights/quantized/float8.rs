//! Eight-bit floats: unchanged for devices that multiply them, converted to blocks of eight-bit integers for others.

use half::{bf16, f16};
use windlass_kernels::WeightType;

/// Values of a block of integers; rows consist of whole blocks.
pub(super) const BLOCK: usize = 32;

/// A matrix of e4m3 values (Micikevicius et al. 2022), row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Float8 {
    /// The codes, none of which is NaN.
    pub codes: Vec<u8>,
    /// A factor for every `group` codes of a row.
    pub scales: Vec<f32>,
    /// A multiple of 128, or the length of a row.
    pub group: usize,
}

impl Float8 {
    /// Appends the rows of another matrix.
    pub(super) fn then(mut self, mut rows: Float8) -> Float8 {
        self.codes.append(&mut rows.codes);
        self.scales.append(&mut rows.scales);
        self
    }

    /// The values as little-endian bf16, in rows of `cols`.
    pub(crate) fn to_bf16(&self, cols: usize) -> Vec<u8> {
        let groups = self.codes.chunks_exact(cols).flat_map(|row| row.chunks(self.group));
        let values = groups.zip(&self.scales).flat_map(|(codes, scale)| codes.iter().map(move |code| (code, scale)));
        values.flat_map(|(code, scale)| bf16::from_f32(e4m3((*code).into()) * scale).to_le_bytes()).collect()
    }
}

/// The formats of their integers, the widest groups first: of two blocks, and of one.
pub(super) const KINDS: [WeightType; 2] = [WeightType::F8G64, WeightType::Q8_0];

/// Appends codes of one scale in the file format of the kernels: a block as Q8_0, or two as a group of F8G64.
///
/// The step of a block is a sixty-fourth of the largest power of two that is not above its largest value. All e4m3
/// values of the four highest exponents are multiples of it, by at most 120, so only the smallest values are rounded.
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

/// The largest power of two that is not above the largest value of a block.
fn largest_power(codes: &[u8]) -> f32 {
    let largest = codes.iter().map(|code| e4m3((*code).into()).abs()).fold(0.0, f32::max);
    f32::from_bits(largest.to_bits() & 0x7f80_0000)
}

/// How often `from` has to be halved to give `to`, at most as often as the file format can store.
fn halvings(from: f32, to: f32) -> u32 {
    let exponent = |power: f32| power.to_bits() >> 23;
    (exponent(from) - exponent(to)).min(15)
}

/// The value of an e4m3 code (Micikevicius et al. 2022), which has no infinities; NaN counts as 0.
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

    /// Tests every code as the largest of a block, together with all smaller codes.
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

    /// As above, with two blocks that share a scale; the first has any code as its largest.
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

    /// All codes up to `largest`, of both signs.
    fn all_to(largest: u8) -> Vec<u8> {
        (0..=largest).flat_map(|code| [code, code | 128]).collect()
    }

    /// Checks that integers equal the values of codes, except for the smallest ones.
    fn check(codes: &[u8], largest: u8, step: f32, integers: &[u8]) {
        let exact = SCALE * largest_power(&[largest]) / 8.0;
        for (code, integer) in codes.iter().zip(integers) {
            let (value, found) = (SCALE * e4m3((*code).into()), step * f32::from(*integer as i8));
            let most = if value.abs() < exact { step / 2.0 } else { 0.0 };
            assert!((found - value).abs() <= most, "{value} is {found} beside {largest:#x}");
        }
    }
}
