//! The paged key-value cache.

use std::ops::Range;

use half::bf16;

use crate::buffer::Buffer;

/// How the cache holds keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Rounded to 8 bits of mantissa.
    #[default]
    Bf16,
    /// Bytes with an f32 scale for each token and head: a little more than half the memory.
    Int8,
}

/// The shape of one block of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Tokens per block.
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
        let row = match kind {
            KvType::Bf16 => self.head_dim * size_of::<bf16>(),
            KvType::Int8 => self.head_dim + size_of::<f32>(),
        };
        self.block_rows() * layers * row
    }

    /// Distance in rows from a key to its value.
    pub(crate) fn value_offset(&self) -> usize {
        self.kv_heads * self.block_tokens
    }
}

/// Keys and values of all sequences: rows of `head_dim` values, `[block][layer][K|V][kv_head][token]`. All layers of a
/// block lie together, so that a cache that is mostly empty takes little memory.
///
/// Which block holds what is the caller's business: each call names blocks through block tables.
#[derive(Debug)]
pub struct KvCache {
    layout: KvLayout,
    layers: usize,
    blocks: usize,
    rows: Rows,
}

/// All rows of a cache.
#[derive(Debug)]
pub(crate) enum Rows {
    Bf16(Buffer<bf16>),
    /// Codes, and a scale for each row.
    Int8(Buffer<i8>, Buffer<f32>),
}

/// Where the blocks of one layer lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) layout: KvLayout,
    layers: usize,
    layer: usize,
}

impl Places {
    /// The row of the key of `token` in `block`; its value lies [`KvLayout::value_offset`] on.
    pub(crate) fn key(&self, block: usize, kv_head: usize, token: usize) -> usize {
        let block = (block * self.layers + self.layer) * self.layout.block_rows();
        block + kv_head * self.layout.block_tokens + token
    }
}

impl KvCache {
    /// A zeroed cache (its pages take memory when first written) of `blocks` blocks in each of `layers` layers.
    pub fn new(layout: KvLayout, kind: KvType, layers: usize, blocks: usize) -> Self {
        let count = blocks * layers * layout.block_rows();
        let rows = match kind {
            KvType::Bf16 => Rows::Bf16(Buffer::zeroed(count * layout.head_dim)),
            KvType::Int8 => Rows::Int8(Buffer::zeroed(count * layout.head_dim), Buffer::zeroed(count)),
        };
        KvCache { layout, layers, blocks, rows }
    }

    /// The shape of a block.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// How values are held.
    pub fn kind(&self) -> KvType {
        match self.rows {
            Rows::Bf16(_) => KvType::Bf16,
            Rows::Int8(..) => KvType::Int8,
        }
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
        self.layout.block_bytes(self.kind(), self.layers) * self.blocks
    }

    /// Copies keys and values of block `from` into block `to`, in every layer.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn copy_block(&mut self, from: usize, to: usize) {
        assert!(from < self.blocks && to < self.blocks, "block {from} into {to} of {}", self.blocks);
        let (rows, width) = (self.layers * self.layout.block_rows(), self.layout.head_dim);
        let source = from * rows..(from + 1) * rows;
        let values = source.start * width..source.end * width;
        match &mut self.rows {
            Rows::Bf16(all) => all.copy_within(values, to * rows * width),
            Rows::Int8(codes, scales) => {
                codes.copy_within(values, to * rows * width);
                scales.copy_within(source, to * rows);
            }
        }
    }

    /// The bytes of a block, all layers together, in parts: what [`block_bytes_mut`](Self::block_bytes_mut) takes back.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn block_bytes(&self, block: usize) -> Vec<&[u8]> {
        let rows = self.rows_of(block);
        let values = rows.start * self.layout.head_dim..rows.end * self.layout.head_dim;
        match &self.rows {
            Rows::Bf16(all) => vec![all.bytes(values)],
            Rows::Int8(codes, scales) => vec![codes.bytes(values), scales.bytes(rows)],
        }
    }

    /// The same, to be overwritten.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn block_bytes_mut(&mut self, block: usize) -> Vec<&mut [u8]> {
        let rows = self.rows_of(block);
        let values = rows.start * self.layout.head_dim..rows.end * self.layout.head_dim;
        match &mut self.rows {
            Rows::Bf16(all) => vec![all.bytes_mut(values)],
            Rows::Int8(codes, scales) => vec![codes.bytes_mut(values), scales.bytes_mut(rows)],
        }
    }

    fn rows_of(&self, block: usize) -> Range<usize> {
        assert!(block < self.blocks, "block {block} of {}", self.blocks);
        let rows = self.layers * self.layout.block_rows();
        block * rows..(block + 1) * rows
    }

    /// Copies keys and values of one token, given by block and place in it, to the place of another, in every layer.
    ///
    /// # Panics
    /// If there is no such place.
    pub fn move_token(&mut self, from: (usize, usize), to: (usize, usize)) {
        for (block, token) in [from, to] {
            assert!(block < self.blocks && token < self.layout.block_tokens, "token {token} of block {block}");
        }
        let (layout, width) = (self.layout, self.layout.head_dim);
        for layer in 0..self.layers {
            let places = self.places(layer);
            for kv_head in 0..layout.kv_heads {
                let [from, to] = [from, to].map(|(block, token)| places.key(block, kv_head, token));
                for (from, to) in [(from, to), (from + layout.value_offset(), to + layout.value_offset())] {
                    match &mut self.rows {
                        Rows::Bf16(all) => all.copy_within(from * width..(from + 1) * width, to * width),
                        Rows::Int8(codes, scales) => {
                            codes.copy_within(from * width..(from + 1) * width, to * width);
                            scales.copy_within(from..from + 1, to);
                        }
                    }
                }
            }
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

    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }

    pub(crate) fn rows_mut(&mut self) -> &mut Rows {
        &mut self.rows
    }
}
