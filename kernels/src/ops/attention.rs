//! Causal attention over the paged key-value cache.

use half::bf16;

use crate::{KvCache, Pool};

/// The tokens of one sequence in a call: a prefill chunk or one decoded token.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRow<'a> {
    /// The sequence's blocks, in order of position; at least those up to the last token of the call.
    pub block_table: &'a [u32],
    /// Position of the row's first token.
    pub first_position: usize,
    /// Tokens of the row in this call.
    pub tokens: usize,
}

/// Writes `keys` and `values`, `[tokens, kv_heads, head_dim]` with the rows' tokens one after the other, into the cache.
///
/// # Panics
/// When the lengths do not match or a block table is too short.
pub fn append_kv(
    _pool: &Pool,
    cache: &mut KvCache,
    layer: usize,
    rows: &[AttentionRow<'_>],
    keys: &[f32],
    values: &[f32],
) {
    let layout = cache.layout();
    let tokens: usize = rows.iter().map(|row| row.tokens).sum();
    assert_eq!(keys.len(), tokens * layout.kv_heads * layout.head_dim, "keys");
    assert_eq!(values.len(), keys.len(), "values");
    let heads = keys.chunks_exact(layout.head_dim).zip(values.chunks_exact(layout.head_dim));
    let places = rows.iter().flat_map(|row| {
        (row.first_position..row.first_position + row.tokens)
            .flat_map(move |position| (0..layout.kv_heads).map(move |kv_head| (row, position, kv_head)))
    });
    let cells = cache.layer_mut(layer);
    for ((key, value), (row, position, kv_head)) in heads.zip(places) {
        let block = row.block_table[position / layout.block_tokens] as usize;
        let at = layout.key_at(block, kv_head, position % layout.block_tokens);
        store(key, &mut cells[at..][..layout.head_dim]);
        store(value, &mut cells[at + layout.value_offset()..][..layout.head_dim]);
    }
}

fn store(from: &[f32], to: &mut [bf16]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = bf16::from_f32(from);
    }
}

/// `out = softmax(scale · queries · keysᵀ) · values` over each sequence's positions up to the query's own.
///
/// `queries` and `out` are `[tokens, heads, head_dim]` with the rows' tokens one after the other. `heads` is a multiple
/// of the cache's key-value heads; query head `h` reads key-value head `h / (heads / kv_heads)`. The rows' own keys and
/// values must have been appended before.
///
/// # Panics
/// When the lengths do not match or a block table is too short.
#[allow(clippy::too_many_arguments)]
pub fn paged_attention(
    _pool: &Pool,
    cache: &KvCache,
    layer: usize,
    heads: usize,
    scale: f32,
    rows: &[AttentionRow<'_>],
    queries: &[f32],
    out: &mut [f32],
) {
    let layout = cache.layout();
    let dim = layout.head_dim;
    let tokens: usize = rows.iter().map(|row| row.tokens).sum();
    assert!(heads.is_multiple_of(layout.kv_heads), "{heads} heads over {} key-value heads", layout.kv_heads);
    assert_eq!(queries.len(), tokens * heads * dim, "queries");
    assert_eq!(out.len(), queries.len(), "out");
    let cells = cache.layer(layer);
    let mut queries = queries.chunks_exact(dim).zip(out.chunks_exact_mut(dim));
    for row in rows {
        for position in row.first_position..row.first_position + row.tokens {
            for head in 0..heads {
                let kv_head = head / (heads / layout.kv_heads);
                let key_at = |position: usize| {
                    let block = row.block_table[position / layout.block_tokens] as usize;
                    layout.key_at(block, kv_head, position % layout.block_tokens)
                };
                let Some((query, out)) = queries.next() else { return };
                let mut scores: Vec<f32> = (0..=position)
                    .map(|p| scale * query.iter().zip(&cells[key_at(p)..]).map(|(q, k)| q * k.to_f32()).sum::<f32>())
                    .collect();
                super::softmax(&mut scores);
                out.fill(0.0);
                for (p, weight) in scores.iter().enumerate() {
                    let value = &cells[key_at(p) + layout.value_offset()..];
                    out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * v.to_f32());
                }
            }
        }
    }
}
