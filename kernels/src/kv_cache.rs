//! The paged key-value cache.

use std::ops::Range;

use crate::buffer::{Buffer, Zeroable};
use crate::simd::LANES;

/// How the cache holds keys and values: a row is those of a token and head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Rounded to 8 bits of mantissa.
    #[default]
    Bf16,
    /// Rounded to 11 bits of mantissa; beyond ±65504 they are that.
    F16,
    /// Floats of 4 bits of exponent and 3 of mantissa (e4m3), with an f32 scale for each row.
    Fp8,
    /// Bytes with an f32 scale for each row: a little more than half the memory.
    Int8,
    /// Half bytes with an f32 scale for each row.
    Int4,
}

impl KvType {
    /// Every one.
    pub const ALL: [KvType; 5] = [KvType::Bf16, KvType::F16, KvType::Fp8, KvType::Int8, KvType::Int4];

    /// Bytes of a row of `head_dim` values, its scale apart: whole cells.
    fn row_bytes(self, head_dim: usize) -> usize {
        head_dim.next_multiple_of(self.depth()) * self.bits() / 8
    }

    /// Values of a cell: neighbours in the order in which a product adds them.
    pub(crate) const fn depth(self) -> usize {
        match self {
            KvType::F16 | KvType::Fp8 => 1,
            KvType::Bf16 | KvType::Int4 => 2,
            KvType::Int8 => 4,
        }
    }

    /// Bits of a value.
    fn bits(self) -> usize {
        match self {
            KvType::Bf16 | KvType::F16 => 16,
            KvType::Fp8 | KvType::Int8 => 8,
            KvType::Int4 => 4,
        }
    }

    fn scale_bytes(self) -> usize {
        match self {
            KvType::Bf16 | KvType::F16 => 0,
            KvType::Fp8 | KvType::Int8 | KvType::Int4 => size_of::<f32>(),
        }
    }
}

/// The shape of one block of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Tokens per block: a multiple of [`RUN_TOKENS`].
    pub block_tokens: usize,
    /// Key-value heads per layer.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
}

impl KvLayout {
    /// Rows of one block in one layer: its tokens' keys and values, one of each per head.
    fn block_rows(&self) -> usize {
        2 * self.kv_heads * self.block_tokens
    }

    /// Bytes that one block takes over `layers` layers.
    pub fn block_bytes(&self, kind: KvType, layers: usize) -> usize {
        self.block_rows() * layers * (kind.row_bytes(self.head_dim) + kind.scale_bytes())
    }

    /// Distance in rows from a key to its value.
    pub(crate) fn value_offset(&self) -> usize {
        self.block_tokens
    }
}

/// Tokens of a block that lie side by side, one for each lane of a vector.
pub const RUN_TOKENS: usize = LANES;

/// Keys and values of all sequences, `[block][layer][kv_head][K|V][run of 16 tokens]`, in cells of one, two or four values
/// that a product adds up: neighbouring columns of a key, and neighbouring tokens of a column of values. Within a run keys
/// are `[cell of columns][token]` and values `[cell of tokens][head_dim]`, so that attention multiplies sixteen cells as it
/// loads them. All layers of a block lie together, so that a cache that is mostly empty takes little memory.
///
/// Which block holds what is the caller's business: each call names blocks through block tables.
#[derive(Debug)]
pub struct KvCache {
    layout: KvLayout,
    kind: KvType,
    layers: usize,
    blocks: usize,
    cells: Buffer<u8>,
    /// One for each row; none where the type has none.
    scales: Buffer<f32>,
}

/// Where the blocks of one layer lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) layout: KvLayout,
    layers: usize,
    layer: usize,
}

impl Places {
    /// The row of the key of `token` in `block`, as scales are counted; its value lies [`KvLayout::value_offset`] on.
    pub(crate) fn key(&self, block: usize, kv_head: usize, token: usize) -> usize {
        let block = (block * self.layers + self.layer) * self.layout.block_rows();
        block + kv_head * 2 * self.layout.block_tokens + token
    }

    /// Cells of a row, for cells of `depth` values.
    pub(crate) fn row_cells(&self, depth: usize) -> usize {
        self.layout.head_dim.div_ceil(depth)
    }

    /// The first cell of the key in `row`, that of `token` in its block; the next ones lie [`RUN_TOKENS`] apart.
    pub(crate) fn key_cell(&self, row: usize, token: usize, depth: usize) -> usize {
        (row - token % RUN_TOKENS) * self.row_cells(depth) + token % RUN_TOKENS
    }

    /// The first cell of the value in `row`, that of `token` in its block; the next ones follow, and its part of each is
    /// `token % depth`.
    pub(crate) fn value_cell(&self, row: usize, token: usize, depth: usize) -> usize {
        (row - token % depth) * self.row_cells(depth)
    }
}

impl KvCache {
    /// A zeroed cache (its pages take memory when first written) of `blocks` blocks in each of `layers` layers.
    ///
    /// # Panics
    /// When a block is no multiple of [`RUN_TOKENS`].
    pub fn new(layout: KvLayout, kind: KvType, layers: usize, blocks: usize) -> Self {
        assert!(layout.block_tokens.is_multiple_of(RUN_TOKENS), "a block of {} tokens", layout.block_tokens);
        let rows = blocks * layers * layout.block_rows();
        let cells = Buffer::zeroed(rows * kind.row_bytes(layout.head_dim));
        let scales = Buffer::zeroed(if kind.scale_bytes() > 0 { rows } else { 0 });
        KvCache { layout, kind, layers, blocks, cells, scales }
    }

    /// The shape of a block.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// How values are held.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Blocks per layer.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Bytes of all layers.
    pub fn bytes(&self) -> usize {
        self.layout.block_bytes(self.kind, self.layers) * self.blocks
    }

    /// Copies keys and values of block `from` into block `to`, in every layer.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn copy_block(&mut self, from: usize, to: usize) {
        let (from, to) = (self.rows_of(from), self.rows_of(to));
        self.copy_rows(from, to.start);
    }

    /// The bytes of a block, all layers together, in parts: what [`block_bytes_mut`](Self::block_bytes_mut) takes back.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn block_bytes(&self, block: usize) -> Vec<&[u8]> {
        let rows = self.rows_of(block);
        let (cells, scales) = (self.cells_of(rows.clone()), self.scales_of(rows));
        vec![&self.cells[cells], self.scales.bytes(scales)]
    }

    /// The same, to be overwritten.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn block_bytes_mut(&mut self, block: usize) -> Vec<&mut [u8]> {
        let rows = self.rows_of(block);
        let (cells, scales) = (self.cells_of(rows.clone()), self.scales_of(rows));
        vec![&mut self.cells[cells], self.scales.bytes_mut(scales)]
    }

    fn rows_of(&self, block: usize) -> Range<usize> {
        assert!(block < self.blocks, "block {block} of {}", self.blocks);
        let rows = self.layers * self.layout.block_rows();
        block * rows..(block + 1) * rows
    }

    /// The bytes of some rows.
    fn cells_of(&self, rows: Range<usize>) -> Range<usize> {
        let bytes = self.kind.row_bytes(self.layout.head_dim);
        rows.start * bytes..rows.end * bytes
    }

    /// The scales of some rows, if they have any.
    fn scales_of(&self, rows: Range<usize>) -> Range<usize> {
        if self.scales.is_empty() { 0..0 } else { rows }
    }

    fn copy_rows(&mut self, from: Range<usize>, to: usize) {
        let (cells, to_cells) = (self.cells_of(from.clone()), self.cells_of(to..to).start);
        self.cells.copy_within(cells, to_cells);
        self.copy_scales(from, to);
    }

    fn copy_scales(&mut self, from: Range<usize>, to: usize) {
        let (scales, to_scales) = (self.scales_of(from), self.scales_of(to..to).start);
        self.scales.copy_within(scales, to_scales);
    }

    /// Copies keys and values of one token, given by block and place in it, to the place of another, in every layer.
    ///
    /// # Panics
    /// If there is no such place.
    pub fn move_token(&mut self, from: (usize, usize), to: (usize, usize)) {
        for (block, token) in [from, to] {
            assert!(block < self.blocks && token < self.layout.block_tokens, "token {token} of block {block}");
        }
        let depth = self.kind.depth();
        for layer in 0..self.layers {
            let places = self.places(layer);
            for kv_head in 0..self.layout.kv_heads {
                let keys = [from, to].map(|(block, token)| places.key(block, kv_head, token));
                let values = keys.map(|row| row + self.layout.value_offset());
                let [from_key, to_key] =
                    [(keys[0], from.1), (keys[1], to.1)].map(|(row, token)| places.key_cell(row, token, depth) * depth);
                for column in 0..self.layout.head_dim {
                    let at = column / depth * RUN_TOKENS * depth + column % depth;
                    self.copy_value(from_key + at, to_key + at);
                }
                let [from_value, to_value] = [(values[0], from.1), (values[1], to.1)]
                    .map(|(row, token)| places.value_cell(row, token, depth) * depth + token % depth);
                for column in 0..self.layout.head_dim {
                    self.copy_value(from_value + column * depth, to_value + column * depth);
                }
                self.copy_scales(keys[0]..keys[0] + 1, keys[1]);
                self.copy_scales(values[0]..values[0] + 1, values[1]);
            }
        }
    }

    /// Copies a value; places are counted in values.
    fn copy_value(&mut self, from: usize, to: usize) {
        match self.kind.bits() / 8 {
            0 => {
                let half = self.cells[from / 2] >> (from % 2 * 4) & 15;
                let (cell, shift) = (&mut self.cells[to / 2], to % 2 * 4);
                *cell = *cell & !(15 << shift) | half << shift;
            }
            bytes => self.cells.copy_within(from * bytes..(from + 1) * bytes, to * bytes),
        }
    }

    /// Where `layer` lies.
    ///
    /// # Panics
    /// When there is no such layer.
    pub(crate) fn places(&self, layer: usize) -> Places {
        assert!(layer < self.layers, "layer {layer} of {}", self.layers);
        Places { layout: self.layout, layers: self.layers, layer }
    }

    /// All rows, as cells of the cache's type, and their scales.
    pub(crate) fn rows<V: Zeroable>(&self) -> (&[V], &[f32]) {
        (self.cells.of(), &self.scales)
    }

    /// The same, to be written.
    pub(crate) fn rows_mut<V: Zeroable>(&mut self) -> (&mut [V], &mut [f32]) {
        (self.cells.of_mut(), &mut self.scales)
    }
}
