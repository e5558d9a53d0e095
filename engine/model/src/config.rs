//! The configuration of a decoder, read from a checkpoint and checked once.

pub(crate) mod family;
mod gguf;
mod hub;
pub(crate) mod names;
pub(crate) mod quantization_config;
mod yarn;

use std::ops::{Range, RangeInclusive};

use windlass_checkpoint::{Checkpoint, MetadataError};
use windlass_engine_contract::shape::{ModelShape, WindowedLayers};
use windlass_engine_contract::sharding::{Shard, Stage};
use windlass_kernels::ops::RopePairing;

use family::Family;
use names::{ExpertNames, Naming, Nesting};
use quantization_config::Schemes;

/// Longest context that a file may claim, in tokens. The longest published one is ten million.
const MAX_CONTEXT_TOKENS: u32 = 1 << 24;
/// Most layers, and largest head, that a file may claim. Published models have up to 130 layers and heads of 576
/// values. Memory for each layer is allocated before any tensor is checked.
const MAX_LAYERS: usize = 1 << 16;
const MAX_HEAD_DIM: usize = 1 << 16;
/// Allowed factors of the length of rotated vectors. Published ones are between 0.5 and 2; attention scores grow by
/// their square.
const MAGNITUDES: RangeInclusive<f32> = 0.001..=1000.0;
/// Base of the rotary frequencies if a file has none (Su et al. 2021).
const DEFAULT_ROPE_THETA: f32 = 10_000.0;

/// A decoder like Llama: pre-norm, rotary positions, grouped-query attention, gated feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Name of the architecture in the file.
    pub architecture: String,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward block; in a mixture of experts, of the widest expert.
    pub feed_forward: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Values in one head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Longest sequence that the model was trained for.
    pub context_tokens: u32,
    /// Added to the mean square before its root.
    pub norm_epsilon: f32,
    /// Rotary position embedding of the layers that see all keys.
    pub rope: RopeConfig,
    /// Layers with sliding-window attention; `None` if there are none.
    pub local: Option<LocalAttention>,
    /// Factor of the products of queries and keys.
    pub attention_scale: f32,
    /// Soft cap of attention scores: `cap · tanh(score / cap)` (Gemma 2).
    pub attention_soft_cap: Option<f32>,
    /// Soft cap of logits.
    pub logit_soft_cap: Option<f32>,
    /// Factor of the token embedding.
    pub embedding_scale: f32,
    /// Activation of the feed-forward block's gate.
    pub activation: Activation,
    /// Added to the weights of norms.
    pub norm_offset: f32,
    /// Whether the outputs of attention and of the feed-forward block are normed before they are added.
    pub post_norms: bool,
    /// Whether queries, keys and values are one matrix in the file, and gate and up another.
    pub fused: bool,
    /// The mixture of experts; `None` for a model with one feed-forward block in each layer.
    pub experts: Option<ExpertsConfig>,
    /// Whether queries, keys and values have biases.
    pub biases: bool,
    /// Whether each query and key head is normed before rotation.
    pub head_norms: bool,
    /// How another tool quantized the matrices; `None` if it did not.
    pub(crate) schemes: Option<Schemes>,
    /// How tensors are named.
    pub(crate) naming: Naming,
    /// Whether the head uses the matrix of the token embedding.
    pub tied_output: bool,
}

/// The activation of the gate in a gated feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e⁻ˣ)`.
    Silu,
    /// The Gaussian error linear unit, approximated by tanh (Hendrycks and Gimpel 2016).
    GeluTanh,
}

/// Layers with sliding-window attention.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalAttention {
    /// Number of keys that a query sees, its own included.
    pub window: usize,
    /// The layers that it applies to.
    pub layers: LayerSet,
    /// Their rotary embedding, if it differs from that of other layers.
    pub rope: Option<RopeConfig>,
}

impl LocalAttention {
    /// The configuration of some consecutive layers, which are counted from 0.
    fn of_layers(&self, run: Range<u32>) -> LocalAttention {
        let layers = LayerSet::Listed(run.map(|layer| self.layers.contains(layer as usize)).collect());
        LocalAttention { layers, ..self.clone() }
    }
}

/// A mixture of experts: a router sends each token through a few of many feed-forward blocks (Shazeer et al. 2017).
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts of a layer.
    pub count: usize,
    /// The experts that this rank has: all, unless ranks have different experts.
    pub held: Range<usize>,
    /// Number of experts that each token goes through.
    pub used: usize,
    /// Width of an expert.
    pub feed_forward: usize,
    /// Width of the shared expert, which every token goes through; `None` without one.
    pub shared_feed_forward: Option<usize>,
    /// Whether the weights of a token's experts are scaled to a sum of one.
    pub sum_to_one: bool,
    pub(crate) names: &'static ExpertNames,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Number of rotated values of a head, from its start; even.
    pub dims: usize,
    /// Base of the frequencies.
    pub theta: f32,
    /// Divisors of each pair's frequency (`dims / 2` values); `None` for 1.
    pub factors: Option<Vec<f32>>,
    /// Divisors for models whose sequences may be long.
    pub long: Option<LongRope>,
    /// Factor of the length of rotated vectors.
    pub magnitude: f32,
    /// Which values form a pair.
    pub pairing: RopePairing,
    /// The layers that it applies to.
    pub layers: LayerSet,
}

/// Divisors of frequencies for long sequences (LongRoPE, Ding et al. 2024). Cached keys cannot be rotated again, so the
/// longest possible sequence decides which divisors are used.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Longest sequence, in tokens, with the ordinary divisors.
    pub beyond_tokens: usize,
    /// Divisors of each pair's frequency (`dims / 2` values); `None` for 1.
    pub factors: Vec<f32>,
}

impl RopeConfig {
    /// The divisors if no sequence is longer than `tokens`; `None` for 1.
    pub fn factors_for(&self, tokens: usize) -> Option<&[f32]> {
        match &self.long {
            Some(long) if tokens > long.beyond_tokens => Some(&long.factors),
            _ => self.factors.as_deref(),
        }
    }
}

/// Some of a decoder's layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerSet {
    /// All layers.
    All,
    /// All layers but every n-th.
    AllButEvery(usize),
    /// The layers that are true in the list.
    Listed(Vec<bool>),
}

impl LayerSet {
    /// Whether `layer`, counted from 0, is one of them.
    pub fn contains(&self, layer: usize) -> bool {
        match self {
            LayerSet::All => true,
            LayerSet::AllButEvery(interval) => !(layer + 1).is_multiple_of(*interval),
            LayerSet::Listed(members) => members.get(layer).copied().unwrap_or(true),
        }
    }
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A key is missing or has another type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// It is valid but not supported.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A value is invalid, or contradicts another one.
    #[error("metadata key {key:?} is {found}; it must be {expected}")]
    Invalid {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// Valid values.
        expected: String,
    },
    /// A tensor that the configuration depends on is invalid.
    #[error("tensor {name:?}: {problem}")]
    Tensor {
        /// The tensor.
        name: &'static str,
        /// What is wrong.
        problem: String,
    },
}

/// Something that is not supported.
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
    /// Matrices that are quantized differently from the rest.
    #[error(
        "metadata key {key:?} is {value}; it must be {common}, as of all matrices that are not left unquantized (-:)"
    )]
    Override {
        /// The key, with the pattern of their names.
        key: String,
        /// The key's value.
        value: String,
        /// The value of the rest.
        common: String,
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
    /// Integers cannot be quantized again.
    #[error(
        "tensor {name:?} holds {found} and cannot be quantized to {asked}: use auto, or a checkpoint in bf16, f16 or f32"
    )]
    QuantizedTwice {
        /// A layer's matrix.
        name: String,
        /// What was asked for.
        asked: &'static str,
        /// Its type.
        found: &'static str,
    },
    /// An unknown tensor: to ignore it might change the model.
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

    /// Whether the checkpoint has more than a text model; parts that read images are not loaded.
    pub fn is_of_more_than_text(&self) -> bool {
        matches!(self.naming, Naming::Hub(Nesting::Beside | Nesting::Within))
    }

    /// Whether the quantization is meant to round the inputs of matrices to 8 bits, too.
    pub(crate) fn rounds_inputs(&self) -> bool {
        self.schemes.as_ref().is_some_and(Schemes::rounds_inputs)
    }

    /// The window of a layer, in keys; `None` for full attention.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.local.as_ref().filter(|local| local.layers.contains(layer)).map(|local| local.window)
    }

    /// The layers with a window, for memory arithmetic.
    fn windowed_layers(&self) -> Option<WindowedLayers> {
        let layers = (0..self.layers).filter(|layer| self.window(*layer).is_some()).count() as u32;
        let tokens = self.local.as_ref().map(|local| u32::try_from(local.window).unwrap_or(u32::MAX))?;
        (layers > 0).then_some(WindowedLayers { layers, tokens })
    }

    /// The distinct rotary embeddings: first that of layers with full attention, then that of layers with a window, if
    /// it differs.
    pub fn ropes(&self) -> impl Iterator<Item = &RopeConfig> {
        let local = self.local.as_ref().and_then(|local| local.rope.as_ref());
        [&self.rope].into_iter().chain(local)
    }

    /// Number of values per position in all rotary tables.
    pub(crate) fn rotary_dims(&self) -> usize {
        self.ropes().map(|rope| rope.dims).sum()
    }

    /// Index in [`ropes`](Self::ropes) of a layer's rotary embedding.
    pub fn rope_index(&self, layer: usize) -> usize {
        let local = self.local.as_ref().filter(|local| local.rope.is_some() && local.layers.contains(layer));
        usize::from(local.is_some())
    }

    /// Number of values of all query heads of a token.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Number of values of all key heads of a token; value heads have as many.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Widths of an expert and of the shared expert; 0 if there is none.
    pub(crate) fn expert_widths(&self) -> [u32; 2] {
        let experts = self.experts.as_ref();
        let shared = experts.and_then(|experts| experts.shared_feed_forward);
        [experts.map_or(0, |experts| experts.feed_forward), shared.unwrap_or(0)].map(|width| width as u32)
    }

    /// Names and widths of the matrices whose columns are divided among ranks; 0 if there is none.
    pub(crate) fn divided_widths(&self, whole_experts: bool) -> [(&'static str, u32); 3] {
        let [expert, shared] = self.expert_widths();
        let dense = if self.experts.is_some() { 0 } else { self.feed_forward as u32 };
        let expert = if whole_experts { 0 } else { expert };
        [("feed-forward block", dense), ("expert", expert), ("shared expert", shared)]
    }

    /// The experts that a rank has, whole or in part.
    pub(crate) fn experts_of(&self, shard: &Shard) -> Range<usize> {
        match (&shard.experts, &self.experts) {
            (Some(held), _) => held.start as usize..held.end as usize,
            (None, Some(experts)) => 0..experts.count,
            (None, None) => 0..0,
        }
    }

    /// The configuration of the part that a rank of a stage computes. The vocabulary stays whole: every rank gets all
    /// tokens.
    pub(crate) fn of_rank(&self, shard: &Shard, stage: Stage) -> DecoderConfig {
        let [expert, shared] = self.expert_widths().map(|width| shard.columns(width).len());
        let expert = if shard.experts.is_some() { self.expert_widths()[0] as usize } else { expert };
        let feed_forward = if self.experts.is_some() { expert.max(shared) } else { shard.feed_forward.len() };
        let experts = self.experts.as_ref().map(|experts| ExpertsConfig {
            held: self.experts_of(shard),
            feed_forward: expert,
            shared_feed_forward: experts.shared_feed_forward.map(|_| shared),
            ..experts.clone()
        });
        DecoderConfig {
            layers: stage.layers(self.layers as u32).len(),
            heads: shard.heads.len(),
            kv_heads: shard.kv_heads.len(),
            feed_forward,
            experts,
            local: self.local.as_ref().map(|local| local.of_layers(stage.layers(self.layers as u32))),
            ..self.clone()
        }
    }

    /// The shape for memory arithmetic, with `weight_bytes` bytes of weights.
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
            windowed: self.windowed_layers(),
        }
    }
}
