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
    /// The layers that see only a window of keys. Absent: there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windowed: Option<WindowedLayers>,
}

/// Layers whose queries see only the last keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WindowedLayers {
    /// How many.
    pub layers: u32,
    /// Keys that a query sees, its own among them.
    pub tokens: u32,
}
