//! The ways in which the cache holds values.

use half::{bf16, f16};

use crate::buffer::Zeroable;
use crate::simd::{LANES, Simd, nearest_bf16};
use crate::{Fp8, KvType};

/// A cell of the cache: one value, or a few neighbours in the order in which a product adds them.
pub(super) trait Value: Zeroable + Default + Send + Sync {
    /// A value as it is held.
    type Code: Copy + Default;
    /// Whether each row has a scale.
    const SCALED: bool;
    /// Values of a cell.
    const DEPTH: usize;
    /// Whether whole cells are multiplied as integers: [`bytes`](Self::bytes) are those of sixteen, each plus 128.
    const INTEGERS: bool = false;

    /// Rounds a row, and returns its scale.
    fn round<S: Simd>(simd: S, from: &[f32], to: &mut [Self::Code]) -> f32;

    /// Writes value `part`, below [`DEPTH`](Self::DEPTH).
    fn set(&mut self, part: usize, code: Self::Code);

    /// Value `part`, below [`DEPTH`](Self::DEPTH), of each of sixteen cells.
    fn load<S: Simd>(simd: S, from: &[Self; LANES], part: usize) -> S::F;

    /// Sixteen cells of [`INTEGERS`](Self::INTEGERS).
    #[inline(always)]
    fn bytes(_cells: &[Self; LANES]) -> &[u8; 64] {
        unreachable!("these cells hold no integers")
    }
}

/// The largest magnitude of a row.
#[inline(always)]
pub(super) fn largest<S: Simd>(simd: S, row: &[f32]) -> f32 {
    let mut largest = simd.splat(0.0);
    for values in row.chunks(LANES) {
        let values = simd.load_partial(values);
        largest = simd.max(largest, simd.max(values, simd.sub(simd.splat(0.0), values)));
    }
    simd.largest(largest)
}

/// The nearest integers to a row's values times `factor`.
#[inline(always)]
fn codes<S: Simd>(simd: S, row: &[f32], factor: f32, to: &mut [i8]) {
    for (from, to) in row.chunks(LANES).zip(to.chunks_mut(LANES)) {
        simd.store_i8_partial(simd.round(simd.mul(simd.load_partial(from), simd.splat(factor))), to);
    }
}

impl Value for [bf16; 2] {
    type Code = bf16;
    const SCALED: bool = false;
    const DEPTH: usize = KvType::Bf16.depth();

    /// To the nearest, ties to even; the scale is 1.
    #[inline(always)]
    fn round<S: Simd>(_simd: S, from: &[f32], to: &mut [bf16]) -> f32 {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = nearest_bf16(*from));
        1.0
    }

    #[inline(always)]
    fn set(&mut self, part: usize, code: bf16) {
        self[part] = code;
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES], part: usize) -> S::F {
        simd.load_of_pairs(from, part)
    }
}

impl Value for f16 {
    type Code = f16;
    const SCALED: bool = false;
    const DEPTH: usize = KvType::F16.depth();

    /// To the nearest finite one, ties to even; the scale is 1.
    #[inline(always)]
    fn round<S: Simd>(_simd: S, from: &[f32], to: &mut [f16]) -> f32 {
        let most = f16::MAX.to_f32();
        to.iter_mut().zip(from).for_each(|(to, from)| *to = f16::from_f32(from.clamp(-most, most)));
        1.0
    }

    #[inline(always)]
    fn set(&mut self, _part: usize, code: f16) {
        *self = code;
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES], _part: usize) -> S::F {
        simd.load_f16(from)
    }
}

impl Value for Fp8 {
    type Code = Fp8;
    const SCALED: bool = true;
    const DEPTH: usize = KvType::Fp8.depth();

    /// The largest magnitude becomes the largest number.
    #[inline(always)]
    fn round<S: Simd>(simd: S, from: &[f32], to: &mut [Fp8]) -> f32 {
        let largest = largest(simd, from);
        let inverse = if largest > 0.0 { Fp8::MAX / largest } else { 0.0 };
        to.iter_mut().zip(from).for_each(|(to, from)| *to = Fp8::nearest(from * inverse));
        largest / Fp8::MAX * Fp8::TO_F16
    }

    #[inline(always)]
    fn set(&mut self, _part: usize, code: Fp8) {
        *self = code;
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES], _part: usize) -> S::F {
        let mut halves = [f16::ZERO; LANES];
        for lane in 0..LANES {
            halves[lane] = from[lane].in_f16();
        }
        simd.load_f16(&halves)
    }
}

/// What is added to an integer in a byte of a cell: products of bytes take unsigned ones on this side.
const BIAS: u8 = 128;

/// Four integers from -127 to 127, each plus [`BIAS`].
impl Value for [u8; 4] {
    type Code = i8;
    const SCALED: bool = true;
    const DEPTH: usize = KvType::Int8.depth();
    const INTEGERS: bool = true;

    /// The largest magnitude becomes 127.
    #[inline(always)]
    fn round<S: Simd>(simd: S, from: &[f32], to: &mut [i8]) -> f32 {
        let largest = largest(simd, from);
        codes(simd, from, if largest > 0.0 { 127.0 / largest } else { 0.0 }, to);
        largest / 127.0
    }

    #[inline(always)]
    fn set(&mut self, part: usize, code: i8) {
        self[part] = code.cast_unsigned() ^ BIAS;
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES], part: usize) -> S::F {
        let mut codes = [0; LANES];
        for lane in 0..LANES {
            codes[lane] = (from[lane][part] ^ BIAS).cast_signed();
        }
        simd.load_i8(&codes)
    }

    #[inline(always)]
    fn bytes(cells: &[Self; LANES]) -> &[u8; 64] {
        match cells.as_flattened().first_chunk() {
            Some(bytes) => bytes,
            None => unreachable!("sixteen times four are 64"),
        }
    }
}

/// Two integers from -8 to 7, plus 8: the first in the low half.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(super) struct Int4Pair(u8);

#[allow(unsafe_code)]
// SAFETY: it is a byte, and every pattern of bits is one.
unsafe impl Zeroable for Int4Pair {}

impl Value for Int4Pair {
    type Code = i8;
    const SCALED: bool = true;
    const DEPTH: usize = KvType::Int4.depth();

    /// The value of the largest magnitude becomes -8, whatever its sign.
    #[inline(always)]
    fn round<S: Simd>(simd: S, from: &[f32], to: &mut [i8]) -> f32 {
        let largest = largest(simd, from);
        let scale = if from.contains(&-largest) { largest } else { -largest } / 8.0;
        codes(simd, from, if largest > 0.0 { 1.0 / scale } else { 0.0 }, to);
        to.iter_mut().for_each(|code| *code = (*code).min(7));
        scale
    }

    #[inline(always)]
    fn set(&mut self, part: usize, code: i8) {
        let shift = 4 * part;
        self.0 = self.0 & !(15 << shift) | (code + 8).cast_unsigned() << shift;
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES], part: usize) -> S::F {
        let mut bytes = [0; LANES];
        for lane in 0..LANES {
            bytes[lane] = from[lane].0;
        }
        let (first, second) = simd.load_nibbles(&bytes);
        simd.sub(if part == 0 { first } else { second }, simd.splat(8.0))
    }
}
