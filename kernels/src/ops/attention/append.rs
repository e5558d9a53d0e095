//! Writing keys and values into their pages.

use half::{bf16, f16};

use super::AttentionRow;
use super::row::{Int4Pair, Value};
use crate::kv_cache::{Places, RUN_TOKENS};
use crate::simd::{Kernel, Simd};
use crate::{Fp8, KvCache, KvType, Pool};

/// Writes `keys` and `values`, `[tokens, kv_heads, head_dim]` with the rows' tokens one after the other, into the cache.
///
/// # Panics
/// When the lengths do not match, or a block table is too short or names an unknown block.
pub fn append_kv(
    pool: &Pool,
    cache: &mut KvCache,
    layer: usize,
    rows: &[AttentionRow<'_>],
    keys: &[f32],
    values: &[f32],
) {
    let (places, blocks) = (cache.places(layer), cache.blocks());
    let layout = places.layout;
    let tokens: usize = rows.iter().map(|row| row.tokens).sum();
    assert_eq!(keys.len(), tokens * layout.kv_heads * layout.head_dim, "keys");
    assert_eq!(values.len(), keys.len(), "values");
    rows.iter().for_each(|row| row.check(layout, blocks));
    match cache.kind() {
        KvType::Bf16 => append::<[bf16; 2]>(pool, cache, places, rows, keys, values),
        KvType::F16 => append::<f16>(pool, cache, places, rows, keys, values),
        KvType::Fp8 => append::<Fp8>(pool, cache, places, rows, keys, values),
        KvType::Int8 => append::<[u8; 4]>(pool, cache, places, rows, keys, values),
        KvType::Int4 => append::<Int4Pair>(pool, cache, places, rows, keys, values),
    }
}

fn append<V: Value>(
    pool: &Pool,
    cache: &mut KvCache,
    places: Places,
    rows: &[AttentionRow<'_>],
    keys: &[f32],
    values: &[f32],
) {
    let (cells, scales) = cache.rows_mut::<V>();
    let codes = vec![V::Code::default(); places.layout.head_dim];
    pool.kernels().call(Append { places, rows, keys, values, cells, scales, codes });
}

struct Append<'a, V: Value> {
    places: Places,
    rows: &'a [AttentionRow<'a>],
    keys: &'a [f32],
    values: &'a [f32],
    cells: &'a mut [V],
    scales: &'a mut [f32],
    /// A row on its way to its cells.
    codes: Vec<V::Code>,
}

impl<V: Value> Kernel for Append<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let layout = self.places.layout;
        let mut heads = self.keys.chunks_exact(layout.head_dim).zip(self.values.chunks_exact(layout.head_dim));
        for row in self.rows {
            for position in row.first_position..row.end() {
                let block = row.block_table[position / layout.block_tokens] as usize;
                for (kv_head, (key, value)) in (0..layout.kv_heads).zip(&mut heads) {
                    self.store(simd, (block, kv_head, position % layout.block_tokens), key, value);
                }
            }
        }
    }
}

impl<V: Value> Append<'_, V> {
    /// Writes key and value of the token at a place: block, key-value head, token of the block.
    #[inline(always)]
    fn store<S: Simd>(&mut self, simd: S, (block, kv_head, token): (usize, usize, usize), key: &[f32], value: &[f32]) {
        let key_row = self.places.key(block, kv_head, token);
        let value_row = key_row + self.places.layout.value_offset();
        let key_scale = V::round(simd, key, &mut self.codes);
        let first = self.places.key_cell(key_row, token, V::DEPTH);
        for (column, code) in self.codes.iter().enumerate() {
            self.cells[first + column / V::DEPTH * RUN_TOKENS].set(column % V::DEPTH, *code);
        }
        let value_scale = V::round(simd, value, &mut self.codes);
        let first = self.places.value_cell(value_row, token, V::DEPTH);
        for (cell, code) in self.cells[first..].iter_mut().zip(&self.codes) {
            cell.set(token % V::DEPTH, *code);
        }
        if V::SCALED {
            (self.scales[key_row], self.scales[value_row]) = (key_scale, value_scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::testing::Random;

    struct Round<'a, V: Value>(&'a [f32], &'a mut [V::Code]);

    impl<V: Value> Kernel for Round<'_, V> {
        type Output = f32;

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> f32 {
            V::round(simd, self.0, self.1)
        }
    }

    #[test]
    fn rounding_is_that_of_the_type() {
        let mut random = Random::new(8);
        let mut from: Vec<f32> = (0..5000).map(|_| f32::from_bits(random.next() as u32)).collect();
        from.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, f32::NAN, 1.003_906_3]);
        for kernels in crate::Kernels::available() {
            let mut to = vec![bf16::ZERO; from.len()];
            kernels.call(Round::<[bf16; 2]>(&from, &mut to));
            for (from, to) in from.iter().zip(&to) {
                assert_eq!(bf16::from_f32(*from).to_bits(), to.to_bits(), "{from}");
            }
        }
    }

    #[test]
    fn eight_bit_floats_round_to_themselves_and_to_even() {
        let number = |code: u8| Fp8::nearest(f32::from(code)).to_f32();
        assert_eq!((number(17), number(18), number(19)), (16.0, 18.0, 20.0), "ties go to even mantissas");
        for kernels in crate::Kernels::available() {
            // Powers of two and the numbers between, subnormal ones too, under the scale that 448 gives.
            let from: Vec<f32> =
                (-9..9).flat_map(|power| (0..8).map(move |m| (1.0 + m as f32 / 8.0) * (power as f32).exp2())).collect();
            let from: Vec<f32> = from.into_iter().filter(|value| *value <= 448.0).chain([0.0, -448.0]).collect();
            let mut to = vec![Fp8::default(); from.len()];
            assert_eq!(kernels.call(Round::<Fp8>(&from, &mut to)), 256.0, "{}", kernels.name());
            for (from, to) in from.iter().zip(&to) {
                // Below 2⁻⁶ only multiples of 2⁻⁹ are left.
                let expected = if from.abs() < 1.0 / 64.0 { (from * 512.0).round_ties_even() / 512.0 } else { *from };
                assert_eq!(to.to_f32(), expected);
            }
        }
    }

    #[test]
    fn half_bytes_are_nearest_in_every_set() {
        let mut random = Random::new(10);
        for from in [random.values(80, 5.0), random.values(7, 1.0), vec![0.0; 6]] {
            for kernels in crate::Kernels::available() {
                let mut codes = vec![0; from.len()];
                let scale = kernels.call(Round::<Int4Pair>(&from, &mut codes));
                for (&code, &value) in codes.iter().zip(&from) {
                    let error = (f32::from(code) * scale - value).abs();
                    // The largest code is 7: what would be 8 is a whole step away.
                    let bound = if code == 7 { 1.0001 } else { 0.5001 };
                    assert!(error <= bound * scale.abs(), "{value} as {code} · {scale}");
                }
            }
        }
    }

    #[test]
    fn codes_are_nearest_and_equal_in_every_set() {
        let mut random = Random::new(9);
        for from in [random.values(80, 5.0), vec![0.0; 6]] {
            let mut first: Option<(u32, Vec<i8>)> = None;
            for kernels in crate::Kernels::available() {
                let mut codes = vec![1_i8; from.len()];
                let scale = kernels.call(Round::<[u8; 4]>(&from, &mut codes));
                for (&code, &value) in codes.iter().zip(&from) {
                    let error = (f64::from(code) * f64::from(scale) - f64::from(value)).abs();
                    assert!(error <= 0.5001 * f64::from(scale), "{value} as {code} · {scale}");
                }
                let found = (scale.to_bits(), codes);
                assert_eq!(*first.get_or_insert(found.clone()), found, "{}", kernels.name());
            }
        }
    }
}
