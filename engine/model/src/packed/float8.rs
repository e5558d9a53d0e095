//! Eight-bit floats: as they are for devices that multiply them so, and as blocks of eight-bit integers for others.

use half::{bf16, f16};

/// Values of a block of integers.
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

/// Appends a block of codes that are scaled alike as the kernels' file has eight-bit integers (Q8_0).
///
/// Its step is a sixty-fourth of the largest power of two that a code holds: all e4m3 of the four highest exponents are whole
/// multiples of it, of at most 120, so that only the smallest are rounded again.
pub(super) fn append_block(codes: &[u8], scale: f32, out: &mut Vec<u8>) {
    let values = codes.iter().map(|code| e4m3((*code).into()));
    let largest = values.clone().fold(0_f32, |largest, value| largest.max(value.abs()));
    let step = f16::from_f32(scale * power_of_two(largest) / 64.0);
    let factor = if step.to_f32() == 0.0 { 0.0 } else { scale / step.to_f32() };
    out.extend(step.to_le_bytes());
    out.extend(values.map(|value| (value * factor).round().clamp(-127.0, 127.0) as i8 as u8));
}

/// The largest power of two that is no more than a value.
fn power_of_two(value: f32) -> f32 {
    f32::from_bits(value.to_bits() & 0x7f80_0000)
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
        const SCALE: f32 = 0.75;
        for largest in 1..=0x7e_u8 {
            let smaller: Vec<u8> = (0..=largest).flat_map(|code| [code, code | 128]).collect();
            for codes in smaller.chunks(BLOCK - 1) {
                let codes = [codes, &[largest]].concat();
                let mut block = Vec::new();
                append_block(&codes, SCALE, &mut block);
                let step = f16::from_le_bytes([block[0], block[1]]).to_f32();
                let exact = SCALE * power_of_two(e4m3(largest.into())) / 8.0;
                for (code, integer) in codes.iter().zip(&block[2..]) {
                    let (value, found) = (SCALE * e4m3((*code).into()), step * f32::from(*integer as i8));
                    let most = if value.abs() < exact { step / 2.0 } else { 0.0 };
                    assert!((found - value).abs() <= most, "{value} is {found} beside {largest:#x}");
                }
            }
        }
    }
}
