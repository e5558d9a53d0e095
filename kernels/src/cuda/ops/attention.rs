//! Causal attention over paged keys and values (FlashAttention 2, split over long contexts; FlashAttention 3 for many tokens on
//! Hopper).

use half::bf16;

use super::heads::{Heads, MAX_HEAD_DIM, PAGE_TOKENS, Pages};
use super::word;
use crate::cuda::launch::{Argument, Launch, TensorMap};
use crate::cuda::weights::EightBits;
use crate::cuda::{Device, DeviceFacts, DriverError, Kernel, Memory, Stream, View, ViewMut};

/// Rows, each a query head of a token, that a tile of prefill has: a block's on Hopper, elsewhere two blocks'.
pub const PREFILL_TILE_ROWS: usize = 2 * PREFILL_BLOCK_ROWS;
/// Rows that a block of `attention.cu` takes.
const PREFILL_BLOCK_ROWS: usize = 64;
/// Keys up to a token's own of which bits say whether it sees them; those before it does.
pub const SEEN_KEYS: usize = u32::BITS as usize;
/// Query heads that a block takes when decoding: the rows of one product.
pub(super) const DECODE_ROWS: usize = 16;

/// Splits that the block which ends last merges: a launch less, and one multiprocessor reads what heads of a key head gave. Of more
/// splits a block for each head reads them. An estimate, until a GPU has measured it.
const MOST_MERGED_IN_PLACE: usize = 32;

/// Scales in a row of what is copied.
const ROW_SCALES: usize = TensorMap::BOX_ROW_BYTES / size_of::<f32>();

/// What attention computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// The layer's heads.
    pub heads: Heads,
    /// Multiplies scores: `1 / √dim`.
    pub scale: f32,
    /// Keys that a query sees, its own among them; 0 for all.
    pub window: u32,
    /// Scores become `cap · tanh(score / cap)`; 0 for none.
    pub cap: f32,
}

/// Keys of a split when decoding a sequence of `length` keys: by its own length alone, so that a sequence gives the same
/// whatever runs beside it.
pub fn split_keys(length: usize) -> usize {
    match length {
        0..=2048 => 128,
        2049..=8192 => 256,
        _ => 512,
    }
}

/// Most splits that any sequence of up to `length` keys has.
pub fn splits(length: usize) -> usize {
    let at = |length: usize| length.div_ceil(split_keys(length));
    [length, length.min(8192), length.min(2048)].into_iter().map(at).max().unwrap_or(1).max(1)
}

/// The sequences of a decoding step, one new token each. Everything lies on the device.
#[derive(Clone, Copy, Debug)]
pub struct DecodeRows<'a> {
    /// Pages of each sequence, `[rows, max_pages]`.
    pub tables: View<'a, u32>,
    /// Keys of each sequence, the new one among them.
    pub lengths: View<'a, u32>,
    /// Which of the step's tokens is each row's.
    pub tokens: View<'a, u32>,
    /// Leading splits whose pages are those of the row before: [`shared_splits`](super::shared_splits). They are read once for
    /// both.
    pub common: View<'a, u32>,
    /// Splits that there is room for: [`splits`] of the longest sequence.
    pub splits: usize,
}

/// What the splits of a decoding step give until they are merged.
#[derive(Debug)]
pub struct DecodeRoom {
    /// Weighted values, `[rows, heads, splits, dim]`.
    partial: Memory<f32>,
    /// Logarithms of the sums of weights, `[rows, heads, splits]`.
    partial_log: Memory<f32>,
    /// How many of a row's splits have come, `[rows, blocks of its heads]`: zeros between steps.
    arrived: Memory<u32>,
}

impl DecodeRoom {
    /// For so many rows of such heads, each with up to `splits` splits.
    pub fn new(device: &Device, rows: usize, heads: Heads, splits: usize) -> Result<DecodeRoom, DriverError> {
        let parts = rows * heads.heads * splits;
        Ok(DecodeRoom {
            partial: device.allocate(parts * heads.dim)?,
            partial_log: device.allocate(parts)?,
            arrived: device.upload(&vec![0; rows * decode_blocks(heads)])?,
        })
    }

    /// Bytes of it.
    pub fn bytes(rows: usize, heads: Heads, splits: usize) -> u64 {
        (4 * rows * (heads.heads * splits * (heads.dim + 1) + decode_blocks(heads))) as u64
    }
}

/// Blocks that share a row's heads.
fn decode_blocks(heads: Heads) -> usize {
    heads.kv_heads * (heads.heads / heads.kv_heads).div_ceil(DECODE_ROWS)
}

impl AttentionShape {
    fn check(&self, query: usize, out: usize) -> usize {
        let Heads { heads, kv_heads, dim } = self.heads;
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads share {kv_heads}");
        assert_eq!(query, out, "a result for each query");
        assert!(query.is_multiple_of(heads * dim), "whole tokens");
        assert!(self.scale > 0.0, "scores times {}", self.scale);
        assert!(dim > 0 && dim.is_multiple_of(8) && dim <= MAX_HEAD_DIM, "heads of {dim} values");
        heads / kv_heads
    }
}

/// `out = softmax(query · keysᵀ · scale) · values` of one token of each row.
///
/// # Panics
/// When the lengths do not match, or pages do not hold such heads.
pub fn attention_decode(
    stream: &Stream,
    shape: &AttentionShape,
    rows: DecodeRows<'_>,
    query: View<'_, bf16>,
    pages: Pages<'_>,
    room: &mut DecodeRoom,
    mut out: ViewMut<'_, bf16>,
) -> Result<(), DriverError> {
    let Heads { heads, kv_heads, dim } = shape.heads;
    let (count, splits, blocks) = (rows.lengths.len(), rows.splits, decode_blocks(shape.heads));
    shape.check(query.len(), out.len());
    assert!(count > 0 && rows.tokens.len() == count && rows.tables.len().is_multiple_of(count), "a table for each row");
    assert_eq!(rows.common.len(), count, "what each row has in common");
    let DecodeRoom { partial, partial_log, arrived } = room;
    assert!(splits > 0 && partial.len() >= count * heads * splits * dim, "room for {splits} splits");
    assert!(partial_log.len() >= count * heads * splits && arrived.len() >= count * blocks, "room for {count} rows");
    let kernel = kernel(&DECODE, dim, pages);
    let [pages, scales] = pages.arguments(shape.heads);
    let grid = [word(count), word(blocks), word(splits)];
    let merges = splits <= MOST_MERGED_IN_PLACE;
    let launch = Launch::new(kernel, grid).shared(kernel.spec().shared_bytes);
    let launch = launch.with(query).with(pages).with(scales).with(rows.tables).with(rows.lengths).with(rows.tokens);
    let launch = launch.with(rows.common).with(out.reborrow()).with(partial.view_mut()).with(partial_log.view_mut());
    let launch = if merges { launch.with(arrived.view_mut()) } else { launch.with(Argument::none::<u32>()) };
    let launch = launch.with(word(heads)).with(word(kv_heads)).with(word(dim)).with(word(rows.tables.len() / count));
    let launch = launch.with(word(splits)).with(shape.scale).with(shape.window).with(shape.cap);
    // SAFETY: blocks read pages of their row's table and write that row and those behind it that are there; what tables name is
    // the caller's promise.
    unsafe { stream.launch(&launch) }?;
    if merges {
        return Ok(());
    }
    let launch = Launch::new(Kernel::AttentionMerge, [word(count), word(heads), 1]);
    let launch = launch.with(partial.view()).with(partial_log.view()).with(rows.lengths);
    let launch = launch.with(rows.tokens).with(out).with(word(heads)).with(word(dim)).with(word(splits));
    // SAFETY: blocks read the splits that were just written and write their row.
    unsafe { stream.launch(&launch) }
}

/// The sequences of a step with any number of new tokens each. Everything lies on the device.
#[derive(Clone, Copy, Debug)]
pub struct Chunks<'a> {
    /// Pages of each sequence, `[sequences, max_pages]`.
    pub tables: View<'a, u32>,
    /// The sequence of each tile: [`prefill_tiles`].
    pub tile_sequences: View<'a, u32>,
    /// The first row of each tile.
    pub tile_firsts: View<'a, u32>,
    /// The first of each sequence's tokens in this step.
    pub first_tokens: View<'a, u32>,
    /// How many there are.
    pub token_counts: View<'a, u32>,
    /// The position of the first.
    pub first_positions: View<'a, u32>,
    /// Where guesses branch: which of the last [`SEEN_KEYS`] keys up to its own each of the step's tokens sees, as bits, its own
    /// the lowest. Absent where all see all of them.
    pub seen: Option<View<'a, u32>>,
}

/// The tiles of sequences with so many new tokens: each tile's sequence, and its first row.
pub fn prefill_tiles(heads: Heads, token_counts: &[u32]) -> Vec<(u32, u32)> {
    let group = heads.heads / heads.kv_heads;
    let tiles = |(sequence, &tokens): (usize, &u32)| {
        (0..tokens as usize * group).step_by(PREFILL_TILE_ROWS).map(move |first| (word(sequence), word(first)))
    };
    token_counts.iter().enumerate().flat_map(tiles).collect()
}

/// `out = softmax(query · keysᵀ · scale) · values` of every token of the chunks; each sees the keys up to its own, but for
/// those that lie on other branches. A window counts the keys that it does see.
///
/// # Panics
/// When the lengths do not match, or pages do not hold such heads.
pub fn attention_prefill(
    stream: &Stream,
    shape: &AttentionShape,
    chunks: Chunks<'_>,
    query: View<'_, bf16>,
    pages: Pages<'_>,
    out: ViewMut<'_, bf16>,
) -> Result<(), DriverError> {
    let Heads { heads, kv_heads, dim } = shape.heads;
    shape.check(query.len(), out.len());
    let (tiles, sequences) = (chunks.tile_sequences.len(), chunks.token_counts.len());
    assert_eq!(chunks.tile_firsts.len(), tiles, "a first row for each tile");
    assert!(
        chunks.first_tokens.len() == sequences && chunks.first_positions.len() == sequences,
        "one for each sequence"
    );
    assert!(chunks.seen.is_none_or(|seen| seen.len() * heads * dim == query.len()), "what each token sees");
    assert!(sequences > 0 && chunks.tables.len().is_multiple_of(sequences), "a table for each sequence");
    let memory = pages.arguments(shape.heads);
    let by_warpgroups = match chunks.seen {
        None => kernel_by_warpgroups(stream.device().facts(), shape, pages),
        Some(_) => None,
    };
    let launch = match by_warpgroups {
        Some((kernel, copied)) => {
            let launch = Launch::new(kernel, [word(tiles), word(kv_heads), 1]).shared(kernel.spec().shared_bytes);
            copied.into_iter().flatten().fold(launch.with(query), Launch::with)
        }
        None => {
            let kernel = kernel(&PREFILL, dim, pages);
            let blocks = word(tiles * (PREFILL_TILE_ROWS / PREFILL_BLOCK_ROWS));
            let launch = Launch::new(kernel, [blocks, word(kv_heads), 1]).shared(kernel.spec().shared_bytes);
            memory.into_iter().fold(launch.with(query), Launch::with)
        }
    };
    let launch = launch.with(chunks.tables).with(chunks.tile_sequences).with(chunks.tile_firsts);
    let launch = launch.with(chunks.first_tokens).with(chunks.token_counts);
    let launch = launch.with(chunks.first_positions);
    let seen = chunks.seen.map_or_else(Argument::none::<u32>, Argument::from);
    let launch = if by_warpgroups.is_some() { launch } else { launch.with(seen) };
    let launch = launch.with(out).with(word(heads)).with(word(kv_heads)).with(word(dim));
    let launch = launch.with(word(chunks.tables.len() / sequences)).with(shape.scale).with(shape.window);
    let launch = if by_warpgroups.is_some() { launch } else { launch.with(shape.cap) };
    // SAFETY: blocks read pages of their sequence's table and write their rows; what tables name is the caller's promise.
    unsafe { stream.launch(&launch) }
}

/// Largest heads of the kernels, each for those that the one before does not hold.
const HEAD_DIMS: [usize; 5] = [32, 64, 96, 128, MAX_HEAD_DIM];

/// Kernels for pages in bf16, e4m3 and signed bytes, by [`HEAD_DIMS`].
type Kernels = [[Kernel; HEAD_DIMS.len()]; 3];

const DECODE: Kernels = [
    [
        Kernel::AttentionDecodeD32,
        Kernel::AttentionDecodeD64,
        Kernel::AttentionDecodeD96,
        Kernel::AttentionDecodeD128,
        Kernel::AttentionDecodeD256,
    ],
    [
        Kernel::AttentionDecodeFp8D32,
        Kernel::AttentionDecodeFp8D64,
        Kernel::AttentionDecodeFp8D96,
        Kernel::AttentionDecodeFp8D128,
        Kernel::AttentionDecodeFp8D256,
    ],
    [
        Kernel::AttentionDecodeInt8D32,
        Kernel::AttentionDecodeInt8D64,
        Kernel::AttentionDecodeInt8D96,
        Kernel::AttentionDecodeInt8D128,
        Kernel::AttentionDecodeInt8D256,
    ],
];

const PREFILL: Kernels = [
    [
        Kernel::AttentionPrefillD32,
        Kernel::AttentionPrefillD64,
        Kernel::AttentionPrefillD96,
        Kernel::AttentionPrefillD128,
        Kernel::AttentionPrefillD256,
    ],
    [
        Kernel::AttentionPrefillFp8D32,
        Kernel::AttentionPrefillFp8D64,
        Kernel::AttentionPrefillFp8D96,
        Kernel::AttentionPrefillFp8D128,
        Kernel::AttentionPrefillFp8D256,
    ],
    [
        Kernel::AttentionPrefillInt8D32,
        Kernel::AttentionPrefillInt8D64,
        Kernel::AttentionPrefillInt8D96,
        Kernel::AttentionPrefillInt8D128,
        Kernel::AttentionPrefillInt8D256,
    ],
];

/// What `attention_hopper*.cu` have, for scores without a cap, over heads of more than 32 values and up to 128: by pages as above,
/// for heads of up to 64 and of more.
const PREFILL_HOPPER: [[Kernel; 2]; 3] = [
    [Kernel::AttentionHopperD64, Kernel::AttentionHopperD128],
    [Kernel::AttentionHopperFp8D64, Kernel::AttentionHopperFp8D128],
    [Kernel::AttentionHopperInt8D64, Kernel::AttentionHopperInt8D128],
];

/// The kernel by warpgroups that computes this there, and the pages, and their scales where they have some, as it has them copied.
fn kernel_by_warpgroups(
    facts: &DeviceFacts,
    shape: &AttentionShape,
    pages: Pages<'_>,
) -> Option<(Kernel, [Option<TensorMap>; 2])> {
    let dim = shape.heads.dim;
    if !facts.has_warpgroups() || shape.cap > 0.0 || !(33..=128).contains(&dim) {
        return None;
    }
    let copied = match pages {
        Pages::Bf16(values) => [Some(TensorMap::new(values, dim, word(PAGE_TOKENS))), None],
        Pages::Bytes { codes, scales, .. } => {
            let scales = TensorMap::new(scales, ROW_SCALES, word(PAGE_TOKENS / ROW_SCALES));
            [Some(TensorMap::new(codes, dim, word(PAGE_TOKENS))), Some(scales)]
        }
    };
    Some((PREFILL_HOPPER[code_class(pages)][usize::from(dim > 64)], copied))
}

fn kernel(kernels: &Kernels, dim: usize, pages: Pages<'_>) -> Kernel {
    kernels[code_class(pages)][size_class(dim)]
}

/// Which kernels are for such pages.
fn code_class(pages: Pages<'_>) -> usize {
    match pages {
        Pages::Bf16(_) => 0,
        Pages::Bytes { code: EightBits::E4m3, .. } => 1,
        Pages::Bytes { code: EightBits::Int8, .. } => 2,
    }
}

/// The first of [`HEAD_DIMS`] that holds heads of `dim` values.
fn size_class(dim: usize) -> usize {
    HEAD_DIMS.iter().filter(|&&largest| largest < dim).count()
}
