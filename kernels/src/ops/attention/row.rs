//! The two ways in which the cache holds a row of values.

use half::bf16;

use crate::simd::{LANES, Simd};

/// A value of a row in the cache.
pub(super) trait Value: Copy + Default + Send + Sync {
    /// Whether each row has a scale.
    const SCALED: bool;
    /// Columns that [`transpose`](Self::transpose) takes at a time.
    const COLUMNS: usize;

    /// Writes 16 rows' first columns, up to [`COLUMNS`](Self::COLUMNS), to `to`, a column every `stride` vectors; zeros
    /// for those that the rows lack.
    fn transpose<S: Simd>(simd: S, rows: [&[Self]; LANES], to: &mut [[f32; LANES]], stride: usize);

    /// Sixteen values.
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F;

    /// Up to sixteen values, zero in the lanes beyond.
    #[inline(always)]
    fn load_partial<S: Simd>(simd: S, from: &[Self]) -> S::F {
        Self::load(simd, &start::<Self, LANES>(from))
    }

    /// Writes a row, and returns its scale.
    fn store<S: Simd>(simd: S, from: &[f32], to: &mut [Self]) -> f32;
}

/// The first `N` values, zeros beyond the end.
#[inline(always)]
fn start<V: Value, const N: usize>(from: &[V]) -> [V; N] {
    match from.first_chunk() {
        Some(whole) => *whole,
        None => {
            let mut part = [V::default(); N];
            part[..from.len()].copy_from_slice(from);
            part
        }
    }
}

impl Value for bf16 {
    const SCALED: bool = false;
    const COLUMNS: usize = 2 * LANES;

    #[inline(always)]
    fn transpose<S: Simd>(simd: S, rows: [&[bf16]; LANES], to: &mut [[f32; LANES]], stride: usize) {
        let mut pairs = [simd.splat_i32(0); LANES];
        for lane in 0..LANES {
            pairs[lane] = simd.load_pairs(&start(rows[lane]));
        }
        let pairs = simd.transpose(pairs);
        for pair in 0..LANES {
            simd.store(simd.low_bf16(pairs[pair]), &mut to[2 * pair * stride]);
            simd.store(simd.high_bf16(pairs[pair]), &mut to[(2 * pair + 1) * stride]);
        }
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[bf16; LANES]) -> S::F {
        simd.load_bf16(from)
    }

    /// To the nearest, ties to even; the scale is 1.
    #[inline(always)]
    fn store<S: Simd>(_simd: S, from: &[f32], to: &mut [bf16]) -> f32 {
        for (to, from) in to.iter_mut().zip(from) {
            let bits = from.to_bits();
            let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
            // Rounding could carry a NaN's low bits into an infinity; a quiet bit keeps it one.
            let quiet = bits >> 16 | 0x40;
            *to = bf16::from_bits(if from.is_nan() { quiet } else { rounded } as u16);
        }
        1.0
    }
}

impl Value for i8 {
    const SCALED: bool = true;
    const COLUMNS: usize = 4 * LANES;

    #[inline(always)]
    fn transpose<S: Simd>(simd: S, rows: [&[i8]; LANES], to: &mut [[f32; LANES]], stride: usize) {
        let mut quads = [simd.splat_i32(0); LANES];
        for lane in 0..LANES {
            quads[lane] = simd.load_quads(&start(rows[lane]));
        }
        let quads = simd.transpose(quads);
        for quad in 0..LANES {
            simd.store(simd.quad_i8::<0>(quads[quad]), &mut to[4 * quad * stride]);
            simd.store(simd.quad_i8::<1>(quads[quad]), &mut to[(4 * quad + 1) * stride]);
            simd.store(simd.quad_i8::<2>(quads[quad]), &mut to[(4 * quad + 2) * stride]);
            simd.store(simd.quad_i8::<3>(quads[quad]), &mut to[(4 * quad + 3) * stride]);
        }
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[i8; LANES]) -> S::F {
        simd.load_i8(from)
    }

    /// The largest magnitude becomes 127.
    #[inline(always)]
    fn store<S: Simd>(simd: S, from: &[f32], to: &mut [i8]) -> f32 {
        let mut largest = simd.splat(0.0);
        for values in from.chunks(LANES) {
            let values = simd.load_partial(values);
            largest = simd.max(largest, simd.max(values, simd.sub(simd.splat(0.0), values)));
        }
        let largest = simd.largest(largest);
        let inverse = simd.splat(if largest > 0.0 { 127.0 / largest } else { 0.0 });
        for (from, to) in from.chunks(LANES).zip(to.chunks_mut(LANES)) {
            let mut codes = [0; LANES];
            simd.store_i8(simd.round(simd.mul(simd.load_partial(from), inverse)), &mut codes);
            to.copy_from_slice(&codes[..to.len()]);
        }
        largest / 127.0
    }
}
