//! What a checkpoint says of its decoder, checked once.

mod gguf;
mod hub;

use windlass_checkpoint::{Checkpoint, MetadataError};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::sharding::{Shard, Stage};
use windlass_kernels::ops::RopePairing;

use crate::family::Family;
use crate::packed::Scheme;

/// Longest context that a file may claim, tokens. The largest published one is ten million.
const MAX_CONTEXT_TOKENS: u32 = 1 << 24;
/// Base of the rotary frequencies where a file names none (Su et al. 2021).
const DEFAULT_ROPE_THETA: f32 = 10_000.0;

/// A decoder of the Llama class: pre-norm, rotary positions, grouped queries, gated feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// As the file names it.
    pub architecture: String,
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward block.
    pub feed_forward: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Values in one head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Longest sequence the model was trained for.
    pub context_tokens: u32,
    /// Added to the mean square before its root.
    pub norm_epsilon: f32,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Queries, keys and values have biases.
    pub biases: bool,
    /// Each head of queries and keys is normed before it turns.
    pub head_norms: bool,
    /// How matrices were quantized by another tool.
    pub(crate) scheme: Option<Scheme>,
    /// The head multiplies with the token embedding's matrix.
    pub tied_output: bool,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Values of a head that turn, from its start; even.
    pub dims: usize,
    /// Base of the frequencies.
    pub theta: f32,
    /// What divides each pair's frequency (`dims / 2` values); absent for 1.
    pub factors: Option<Vec<f32>>,
    /// Which values turn together.
    pub pairing: RopePairing,
    /// In which layers.
    pub layers: RotaryLayers,
}

/// The layers whose heads turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RotaryLayers {
    /// Every one.
    All,
    /// Every one but the last of each so many.
    AllButEvery(usize),
    /// Those that are true here.
    Listed(Vec<bool>),
}

impl RotaryLayers {
    /// Whether `layer`, from 0, is one of them.
    pub fn contain(&self, layer: usize) -> bool {
        match self {
            RotaryLayers::All => true,
            RotaryLayers::AllButEvery(interval) => !(layer + 1).is_multiple_of(*interval),
            RotaryLayers::Listed(turns) => turns.get(layer).copied().unwrap_or(true),
        }
    }
}

/// Why a checkpoint's configuration cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A key is missing or has another type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// It is sound, but this engine cannot compute it.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A value contradicts another or makes no sense.
    #[error("metadata key {key:?} is {found}; it must be {expected}")]
    Invalid {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A tensor that the configuration depends on.
    #[error("tensor {name:?}: {problem}")]
    Tensor {
        /// The tensor.
        name: &'static str,
        /// What is wrong.
        problem: String,
    },
}

/// What this engine cannot compute.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unsupported {
    /// A model family.
    #[error("the architecture {0:?} is not supported; supported are {known}", known = Family::known())]
    Architecture(String),
    /// A feature within a supported family.
    #[error("metadata key {key:?} is {value}: {feature} is not supported")]
    Feature {
        /// The key that asks for it.
        key: String,
        /// The key's value.
        value: String,
        /// What it asks for.
        feature: &'static str,
    },
    /// A tensor's element type.
    #[error("tensor {name:?} has type {kind}, which cannot be computed on; supported are {supported}")]
    TensorType {
        /// The tensor.
        name: String,
        /// Its type.
        kind: &'static str,
        /// The types that can be, comma-separated.
        supported: String,
    },
    /// Integers are not quantized again.
    #[error(
        "the checkpoint holds {found} and cannot be quantized to {asked}: use auto, or a checkpoint in bf16, f16 or f32"
    )]
    QuantizedTwice {
        /// What was asked for.
        asked: &'static str,
        /// The type of most of its weights.
        found: &'static str,
    },
    /// A tensor that this decoder has no use for: leaving it out would change the model.
    #[error("tensor {0:?} belongs to no supported decoder of this architecture")]
    ExtraTensor(String),
}

impl DecoderConfig {
    /// Reads the configuration of a checkpoint.
    pub fn read(checkpoint: &Checkpoint) -> Result<DecoderConfig, ConfigError> {
        match checkpoint {
            Checkpoint::Gguf(file) => gguf::read(file),
            Checkpoint::Hub(folder) => hub::read(folder),
        }
    }

    /// Values of all query heads of a token.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Values of all keys, or all values, of a token.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The part of the decoder that a rank of a stage computes. The vocabulary stays whole: every rank reads all tokens.
    pub(crate) fn of_rank(&self, shard: &Shard, stage: Stage) -> DecoderConfig {
        DecoderConfig {
            layers: stage.layers(self.layers as u32).len(),
            heads: shard.heads.len(),
            kv_heads: shard.kv_heads.len(),
            feed_forward: shard.feed_forward.len(),
            ..self.clone()
        }
    }

    /// The shape that memory arithmetic reads; `weight_bytes` as stored.
    pub fn shape(&self, weight_bytes: u64) -> ModelShape {
        // Every dimension was read as a u32.
        let [layers, hidden, feed_forward, heads, kv_heads, head_dim, vocabulary] =
            [self.layers, self.hidden, self.feed_forward, self.heads, self.kv_heads, self.head_dim, self.vocabulary]
                .map(|size| size as u32);
        ModelShape {
            architecture: self.architecture.clone(),
            layers,
            hidden,
            feed_forward,
            heads,
            kv_heads,
            head_dim,
            vocabulary,
            context_tokens: self.context_tokens,
            weight_bytes,
        }
    }
}
