//! The shape of a decoder: what memory arithmetic and placement need of a model, and nothing more.

use serde::{Deserialize, Serialize};

/// Dimensions of a Llama-class decoder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelShape {
    /// Architecture as the checkpoint names it (`llama`, `qwen3`, …).
    pub architecture: String,
    /// Decoder layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width of the feed-forward block.
    pub feed_forward: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements in one head.
    pub head_dim: u32,
    /// Rows of the embedding.
    pub vocabulary: u32,
    /// Longest sequence the model was trained for, tokens.
    pub context_tokens: u32,
    /// Bytes of all weights as stored, a tied output counted once.
    pub weight_bytes: u64,
}
