//! Writing keys and values into their pages.

use half::bf16;

use super::AttentionRow;
use crate::simd::{Kernel, Simd};
use crate::{KvCache, Pool};

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
    let (layout, blocks) = (cache.layout(), cache.blocks());
    let tokens: usize = rows.iter().map(|row| row.tokens).sum();
    assert_eq!(keys.len(), tokens * layout.kv_heads * layout.head_dim, "keys");
    assert_eq!(values.len(), keys.len(), "values");
    let cells = cache.layer_mut(layer);
    let mut heads = keys.chunks_exact(layout.head_dim).zip(values.chunks_exact(layout.head_dim));
    for row in rows {
        row.check(layout, blocks);
        for position in row.first_position..row.end() {
            let block = row.block_table[position / layout.block_tokens] as usize;
            for (kv_head, (key, value)) in (0..layout.kv_heads).zip(&mut heads) {
                let at = layout.key_at(block, kv_head, position % layout.block_tokens);
                pool.kernels().call(Round { from: key, to: &mut cells[at..][..layout.head_dim] });
                let at = at + layout.value_offset();
                pool.kernels().call(Round { from: value, to: &mut cells[at..][..layout.head_dim] });
            }
        }
    }
}

/// To bf16, ties to even.
struct Round<'a> {
    from: &'a [f32],
    to: &'a mut [bf16],
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            let bits = from.to_bits();
            let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
            // Rounding could carry a NaN's low bits into an infinity; a quiet bit keeps it one.
            let quiet = bits >> 16 | 0x40;
            *to = bf16::from_bits(if from.is_nan() { quiet } else { rounded } as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    #[test]
    fn rounding_is_that_of_the_type() {
        let mut random = Random::new(8);
        let mut from: Vec<f32> = (0..5000).map(|_| f32::from_bits(random.next() as u32)).collect();
        from.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, f32::NAN, 1.003_906_3]);
        for kernels in crate::Kernels::available() {
            let mut to = vec![bf16::ZERO; from.len()];
            kernels.call(Round { from: &from, to: &mut to });
            for (from, to) in from.iter().zip(&to) {
                assert_eq!(bf16::from_f32(*from).to_bits(), to.to_bits(), "{from}");
            }
        }
    }
}
