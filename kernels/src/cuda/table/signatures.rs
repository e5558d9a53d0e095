//! Parameters that several kernels share.

use super::super::memory::ElementType::{self, Address, Bf16, F32, U8, U32 as Word};
use super::Parameter::{self, F32 as Float, In, Out, Tiles, U32};
use super::{GEMM_HOPPER_SHARE, GEMM_HOPPER_TILE, Signature};

/// Of products with weights in bf16.
pub(super) const LINEAR_BF16: Signature = parameters!((
    weights: In(Bf16), input: In(Bf16), tiles: In(Word), places: In(Word), halves: Out(Bf16), floats: Out(F32), action: U32, stride: U32,
    tokens: U32, rows: U32, cols: U32
));

/// Of products of many tokens with weights in bf16.
pub(super) const GEMM: Signature = parameters!((
    weights: In(Bf16), input: In(Bf16), halves: Out(Bf16), floats: Out(F32), action: U32, tokens: U32, rows: U32,
    cols: U32
));

/// Of products by warpgroups that have the bits of few tokens' products, with weights in bf16.
pub(super) const MANY_HOPPER: Signature = parameters!((
    weights: Tiles(Bf16, GEMM_HOPPER_TILE), input: Tiles(Bf16, GEMM_HOPPER_SHARE), halves: Out(Bf16), floats: Out(F32),
    action: U32, stride: U32, tokens: U32, rows: U32, cols: U32
));

/// Of products with weights of 4 or 5 bits in groups.
pub(super) const LINEAR_GROUPED: Signature = parameters!((
    codes: In(Word), scales: In(Word), input: In(Bf16), tiles: In(Word), places: In(Word), halves: Out(Bf16),
    floats: Out(F32), action: U32, stride: U32, tokens: U32, rows: U32, cols: U32, affine: U32
));

/// Of products with weights of 8 bits that have f32 scales.
pub(super) const LINEAR_8BIT: Signature = parameters!((
    codes: In(U8), scales: In(F32), input: In(Bf16), tiles: In(Word), places: In(Word), halves: Out(Bf16),
    floats: Out(F32), action: U32, stride: U32, tokens: U32, rows: U32, cols: U32, group: U32
));

/// Of products with weights of 8 bits in groups of 32, and of 2 to 6 in superblocks.
pub(super) const LINEAR_PACKED: Signature = parameters!((
    codes: In(Word), scales: In(Word), input: In(Bf16), tiles: In(Word), places: In(Word), halves: Out(Bf16),
    floats: Out(F32), action: U32, stride: U32, tokens: U32, rows: U32, cols: U32
));

/// Of products of inputs in bytes with weights of 2 to 8 bits.
pub(super) const ROUNDED: Signature = parameters!((
    codes: In(Word), scales: In(Word), input: In(U8), input_scales: In(F32), halves: Out(Bf16), floats: Out(F32),
    action: U32, stride: U32, tokens: U32, rows: U32, cols: U32
));

/// Of rows of a table of codes of 4 or 5 bits in groups.
pub(super) const EMBED_GROUPED: Signature = parameters!((
    tokens: In(Word), codes: In(Word), scales: In(Word), out: Out(F32), cols: U32, rows: U32, first: U32, factor: Float,
    group: U32
));

/// Of rows of a table whose codes and scales are packed.
pub(super) const EMBED_PACKED: Signature = parameters!((
    tokens: In(Word), codes: In(Word), scales: In(Word), out: Out(F32), cols: U32, rows: U32, first: U32, factor: Float
));

/// Of the rounding of tokens to 8 bits.
pub(super) const QUANTIZE: Signature =
    parameters!((input: In(Bf16), order: In(Word), codes: Out(U8), scales: Out(F32), count: U32, cols: U32));

/// The same of norms.
pub(super) const NORM_CODES: Signature = parameters!((
    input: In(F32), weight: In(F32), codes: Out(U8), scales: Out(F32), cols: U32, epsilon: Float
));

/// The same of gated activations.
pub(super) const GATE_CODES: Signature =
    parameters!((gate_up: In(Bf16), codes: Out(U8), scales: Out(F32), cols: U32, by_eights: U32));

/// Of products of 8-bit activations with 8-bit weights.
pub(super) const W8A8: Signature = parameters!((
    weights: In(U8), scales: In(F32), input: In(U8), input_scales: In(F32), halves: Out(Bf16), floats: Out(F32), action: U32,
    tokens: U32, rows: U32, cols: U32, group: U32
));

/// The same of many tokens on Hopper.
pub(super) const W8A8_HOPPER: Signature = parameters!((
    weights: Tiles(U8, GEMM_HOPPER_TILE), scales: In(F32), input: Tiles(U8, GEMM_HOPPER_SHARE), input_scales: In(F32),
    halves: Out(Bf16), floats: Out(F32), action: U32, tokens: U32, rows: U32, cols: U32, group: U32
));

/// The same of each tile's expert.
pub(super) const W8A8_HOPPER_EXPERTS: Signature = parameters!((
    weights: Tiles(U8, GEMM_HOPPER_TILE), scales: In(F32), input: Tiles(U8, GEMM_HOPPER_SHARE), input_scales: In(F32),
    tiles: In(Word), halves: Out(Bf16), floats: Out(F32), action: U32, stride: U32, rows: U32, cols: U32, group: U32
));

/// Of the append of keys and values to pages of a type.
pub(super) const fn placing(pages: ElementType) -> [(&'static str, Parameter); 16] {
    *parameters!((
        projected: In(Bf16), bias: In(F32), query_norm: In(F32), key_norm: In(F32), rope: In(F32), positions: In(Word),
        slots: In(Word), query: Out(Bf16), pages: Out(pages), scales: Out(F32), heads: U32, kv_heads: U32, dim: U32,
        turning: U32, adjacent: U32, epsilon: Float
    ))
}

/// Of moves within pages of a type.
pub(super) const fn moving(pages: ElementType) -> [(&'static str, Parameter); 7] {
    *parameters!((
        moves: In(Word), pages: Out(pages), scales: Out(F32), count: U32, kv_heads: U32, dim: U32, layer_pages: U32
    ))
}

/// Of attention of one token for each sequence over pages of a type.
pub(super) const fn decoding(pages: ElementType) -> [(&'static str, Parameter); 19] {
    *parameters!((
        query: In(Bf16), pages: In(pages), scales: In(F32), tables: In(Word), lengths: In(Word), row_tokens: In(Word),
        common: In(Word), out: Out(Bf16), partial: Out(F32), partial_log: Out(F32), arrived: Out(Word), heads: U32,
        kv_heads: U32, dim: U32, max_pages: U32, splits: U32, scale: Float, window: U32, cap: Float
    ))
}

/// Of attention of many tokens for each sequence over pages of a type.
pub(super) const fn prefilling(pages: ElementType) -> [(&'static str, Parameter); 18] {
    *parameters!((
        query: In(Bf16), pages: In(pages), scales: In(F32), tables: In(Word), tile_sequences: In(Word),
        tile_firsts: In(Word), first_tokens: In(Word), token_counts: In(Word), first_positions: In(Word),
        seen: In(Word), out: Out(Bf16), heads: U32, kv_heads: U32, dim: U32, max_pages: U32, scale: Float, window: U32,
        cap: Float
    ))
}

/// The same over pages in bf16 that are copied in tiles.
pub(super) const PREFILLING_HOPPER: Signature = parameters!((
    query: In(Bf16), pages: Tiles(Bf16, 64), tables: In(Word), tile_sequences: In(Word), tile_firsts: In(Word),
    first_tokens: In(Word), token_counts: In(Word), first_positions: In(Word), out: Out(Bf16), heads: U32, kv_heads: U32,
    dim: U32, max_pages: U32, scale: Float, window: U32
));

/// The same over pages in bytes, and their scales in rows of 32.
pub(super) const PREFILLING_HOPPER_BYTES: Signature = parameters!((
    query: In(Bf16), codes: Tiles(U8, 64), scales: Tiles(F32, 2), tables: In(Word), tile_sequences: In(Word),
    tile_firsts: In(Word), first_tokens: In(Word), token_counts: In(Word), first_positions: In(Word), out: Out(Bf16),
    heads: U32, kv_heads: U32, dim: U32, max_pages: U32, scale: Float, window: U32
));

/// Of sums over the ranks of a group, into memory of a type.
pub(super) const fn exchanging(out: ElementType) -> [(&'static str, Parameter); 8] {
    *parameters!((
        parts: In(Address), flags: In(Address), left: In(Word), rounds: Out(Word), out: Out(out), rank: U32, ranks: U32,
        count: U32
    ))
}
