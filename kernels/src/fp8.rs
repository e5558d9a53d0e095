//! Floats of eight bits.

use half::f16;

use crate::buffer::Zeroable;

/// An e4m3 float: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa; no infinities.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct Fp8(u8);

#[allow(unsafe_code)]
// SAFETY: it is a byte, and every pattern of bits is one.
unsafe impl Zeroable for Fp8 {}

impl Fp8 {
    /// The largest.
    pub const MAX: f32 = 448.0;
    /// What an f16 with the same exponent and mantissa bits is to it: its bias is 15.
    pub(crate) const TO_F16: f32 = 256.0;

    /// The nearest to a value of at most [`MAX`](Self::MAX), ties to even.
    #[inline(always)]
    pub fn nearest(value: f32) -> Fp8 {
        let (sign, bits) = (value.to_bits() >> 24 & 0x80, value.abs().to_bits());
        // From 2⁻⁶ on numbers are normal; below they are multiples of 2⁻⁹.
        let code = match value.abs() < 1.0 / 64.0 {
            true => (value.abs() * 512.0).round_ties_even() as u32,
            false => ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3),
        };
        Fp8((sign | code.min(0x7e)) as u8)
    }

    /// Its bits.
    pub fn to_bits(self) -> u8 {
        self.0
    }

    #[cfg(test)]
    pub(crate) fn to_f32(self) -> f32 {
        self.in_f16().to_f32() * Fp8::TO_F16
    }

    /// Its bits in an f16, which is smaller by [`TO_F16`](Self::TO_F16).
    #[inline(always)]
    pub(crate) fn in_f16(self) -> f16 {
        let bits = u16::from(self.0);
        f16::from_bits((bits & 0x80) << 8 | (bits & 0x7f) << 7)
    }
}
