//! The ways in which the cache holds a row of values.

use half::{bf16, f16};

use crate::buffer::Zeroable;
use crate::simd::{LANES, Simd, nearest_bf16};

/// A cell of a row in the cache: one value, or a few.
pub(super) trait Value: Zeroable + Default + Send + Sync {
    /// Whether each row has a scale.
    const SCALED: bool;
    /// Values of a cell.
    const PACKED: usize = 1;
    /// Sixteen values from the first cell on; there are as many.
    fn load<S: Simd>(simd: S, from: &[Self]) -> S::F;

    /// Writes a row, and returns its scale.
    fn store<S: Simd>(simd: S, from: &[f32], to: &mut [Self]) -> f32;

    /// Value `part`, below [`PACKED`](Self::PACKED), of each of sixteen cells.
    #[inline(always)]
    fn load_part<S: Simd>(simd: S, from: &[Self], _part: usize) -> S::F {
        Self::load(simd, from)
    }

    /// Cells of a row of `head_dim` values.
    #[inline(always)]
    fn cells(head_dim: usize) -> usize {
        head_dim.div_ceil(Self::PACKED)
    }
}

/// The first `N` cells. A copy of fewer would be a call, for which the loops around it keep their sums in memory.
#[inline(always)]
fn start<V, const N: usize>(from: &[V]) -> &[V; N] {
    match from.first_chunk() {
        Some(cells) => cells,
        None => unreachable!("a row ends after {} cells of {N}", from.len()),
    }
}

/// The last cells of a row, and zeros beyond them.
pub(super) fn filled_up<V: Value>(rest: &[V]) -> [V; LANES] {
    let mut cells = [V::default(); LANES];
    cells[..rest.len()].copy_from_slice(rest);
    cells
}

/// The largest magnitude of a row.
#[inline(always)]
fn largest<S: Simd>(simd: S, row: &[f32]) -> f32 {
    let mut largest = simd.splat(0.0);
    for values in row.chunks(LANES) {
        let values = simd.load_partial(values);
        largest = simd.max(largest, simd.max(values, simd.sub(simd.splat(0.0), values)));
    }
    simd.largest(largest)
}

/// The nearest integers to a row's values times `factor`.
#[inline(always)]
fn codes<S: Simd>(simd: S, row: &[f32], factor: f32) -> [i8; LANES] {
    let mut codes = [0; LANES];
    simd.store_i8(simd.round(simd.mul(simd.load_partial(row), simd.splat(factor))), &mut codes);
    codes
}

impl Value for bf16 {
    const SCALED: bool = false;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[bf16]) -> S::F {
        simd.load_bf16(start(from))
    }

    /// To the nearest, ties to even; the scale is 1.
    #[inline(always)]
    fn store<S: Simd>(_simd: S, from: &[f32], to: &mut [bf16]) -> f32 {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = nearest_bf16(*from));
        1.0
    }
}

impl Value for f16 {
    const SCALED: bool = false;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[f16]) -> S::F {
        simd.load_f16(start(from))
    }

    /// To the nearest finite one, ties to even; the scale is 1.
    #[inline(always)]
    fn store<S: Simd>(_simd: S, from: &[f32], to: &mut [f16]) -> f32 {
        let most = f16::MAX.to_f32();
        to.iter_mut().zip(from).for_each(|(to, from)| *to = f16::from_f32(from.clamp(-most, most)));
        1.0
    }
}

/// An e4m3 float: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa; no infinities.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(super) struct Fp8(u8);

#[allow(unsafe_code)]
// SAFETY: it is a byte, and every pattern of bits is one.
unsafe impl Zeroable for Fp8 {}

impl Fp8 {
    /// The largest.
    const MAX: f32 = 448.0;
    /// What an f16 with the same exponent and mantissa bits is to it: its bias is 15.
    const TO_F16: f32 = 256.0;

    /// The nearest to a value of at most [`MAX`](Self::MAX), ties to even.
    #[inline(always)]
    pub(super) fn nearest(value: f32) -> Fp8 {
        let (sign, bits) = (value.to_bits() >> 24 & 0x80, value.abs().to_bits());
        // From 2⁻⁶ on numbers are normal; below they are multiples of 2⁻⁹.
        let code = match value.abs() < 1.0 / 64.0 {
            true => (value.abs() * 512.0).round_ties_even() as u32,
            false => ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3),
        };
        Fp8((sign | code.min(0x7e)) as u8)
    }

    #[cfg(test)]
    pub(super) fn to_f32(self) -> f32 {
        self.in_f16().to_f32() * Fp8::TO_F16
    }

    /// Its bits in an f16, which is smaller by [`TO_F16`](Self::TO_F16).
    #[inline(always)]
    fn in_f16(self) -> f16 {
        let bits = u16::from(self.0);
        f16::from_bits((bits & 0x80) << 8 | (bits & 0x7f) << 7)
    }
}

impl Value for Fp8 {
    const SCALED: bool = true;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Fp8]) -> S::F {
        simd.load_f16(&start::<Fp8, LANES>(from).map(Fp8::in_f16))
    }

    /// The largest magnitude becomes the largest number.
    #[inline(always)]
    fn store<S: Simd>(simd: S, from: &[f32], to: &mut [Fp8]) -> f32 {
        let largest = largest(simd, from);
        let inverse = if largest > 0.0 { Fp8::MAX / largest } else { 0.0 };
        to.iter_mut().zip(from).for_each(|(to, from)| *to = Fp8::nearest(from * inverse));
        largest / Fp8::MAX * Fp8::TO_F16
    }
}

impl Value for i8 {
    const SCALED: bool = true;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[i8]) -> S::F {
        simd.load_i8(start(from))
    }

    /// The largest magnitude becomes 127.
    #[inline(always)]
    fn store<S: Simd>(simd: S, from: &[f32], to: &mut [i8]) -> f32 {
        let largest = largest(simd, from);
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        for (from, to) in from.chunks(LANES).zip(to.chunks_mut(LANES)) {
            to.copy_from_slice(&codes(simd, from, inverse)[..to.len()]);
        }
        largest / 127.0
    }
}

/// Two integers from -8 to 7, plus 8: the first in the low half.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct Int4Pair(u8);

#[allow(unsafe_code)]
// SAFETY: it is a byte, and every pattern of bits is one.
unsafe impl Zeroable for Int4Pair {}

impl Default for Int4Pair {
    fn default() -> Int4Pair {
        Int4Pair(0x88)
    }
}

impl Int4Pair {
    /// The integers.
    #[inline(always)]
    pub(super) fn codes(self) -> [i8; 2] {
        [self.0 & 15, self.0 >> 4].map(|code| code.cast_signed() - 8)
    }
}

impl Value for Int4Pair {
    const SCALED: bool = true;
    const PACKED: usize = 2;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Int4Pair]) -> S::F {
        let mut codes = [0; LANES];
        for (pair, codes) in start::<Int4Pair, { LANES / 2 }>(from).iter().zip(codes.as_chunks_mut::<2>().0) {
            *codes = pair.codes();
        }
        simd.load_i8(&codes)
    }

    #[inline(always)]
    fn load_part<S: Simd>(simd: S, from: &[Int4Pair], part: usize) -> S::F {
        simd.load_i8(&start::<Int4Pair, LANES>(from).map(|pair| pair.codes()[part]))
    }

    /// The value of the largest magnitude becomes -8, whatever its sign.
    #[inline(always)]
    fn store<S: Simd>(simd: S, from: &[f32], to: &mut [Int4Pair]) -> f32 {
        let largest = largest(simd, from);
        let scale = if from.contains(&-largest) { largest } else { -largest } / 8.0;
        let inverse = if largest > 0.0 { 1.0 / scale } else { 0.0 };
        for (from, to) in from.chunks(LANES).zip(to.chunks_mut(LANES / 2)) {
            let codes = codes(simd, from, inverse).map(|code| (code.min(7) + 8).cast_unsigned());
            to.iter_mut().zip(codes.as_chunks::<2>().0).for_each(|(to, [low, high])| *to = Int4Pair(low | high << 4));
        }
        scale
    }
}
