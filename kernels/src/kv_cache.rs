//! The paged key-value cache.

use half::bf16;

use crate::buffer::Buffer;

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
    /// Values of one block in one layer, keys and values together.
    pub fn block_elements(&self) -> usize {
        2 * self.kv_heads * self.block_tokens * self.head_dim
    }

    /// Bytes that one block takes over `layers` layers.
    pub fn block_bytes(&self, layers: usize) -> usize {
        self.block_elements() * layers * size_of::<bf16>()
    }

    /// Where the key of `token` in `block` starts in a layer; its value lies [`value_offset`](Self::value_offset) on.
    pub(crate) fn key_at(&self, block: usize, kv_head: usize, token: usize) -> usize {
        block * self.block_elements() + (kv_head * self.block_tokens + token) * self.head_dim
    }

    /// Distance from a key to its value.
    pub(crate) fn value_offset(&self) -> usize {
        self.kv_heads * self.block_tokens * self.head_dim
    }
}

/// Keys and values of all sequences in bf16: `[layer][block][K|V][kv_head][token][dim]`.
///
/// Which block holds what is the caller's business: each call names blocks through block tables.
#[derive(Debug)]
pub struct KvCache {
    layout: KvLayout,
    blocks: usize,
    layers: Vec<Buffer<bf16>>,
}

impl KvCache {
    /// A zeroed cache (its pages take memory when first written) of `blocks` blocks in each of `layers` layers.
    pub fn new(layout: KvLayout, layers: usize, blocks: usize) -> Self {
        let layers = (0..layers).map(|_| Buffer::zeroed(blocks * layout.block_elements())).collect();
        KvCache { layout, blocks, layers }
    }

    /// The shape of a block.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Blocks per layer.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of all layers.
    pub fn bytes(&self) -> usize {
        self.layout.block_bytes(self.layers()) * self.blocks
    }

    /// Copies keys and values of block `from` into block `to`, in every layer.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn copy_block(&mut self, from: usize, to: usize) {
        assert!(from < self.blocks && to < self.blocks, "block {from} into {to} of {}", self.blocks);
        let elements = self.layout.block_elements();
        for layer in &mut self.layers {
            layer.copy_within(from * elements..(from + 1) * elements, to * elements);
        }
    }

    pub(crate) fn layer(&self, layer: usize) -> &[bf16] {
        &self.layers[layer]
    }

    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut [bf16] {
        &mut self.layers[layer]
    }
}
