//! What a checkpoint says of its decoder, checked once.

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

/// Longest context that a file may claim, tokens. The largest published one is ten million.
const MAX_CONTEXT_TOKENS: u32 = 1 << 24;
/// Most layers, and most values of a head, that a file may claim. Published ones have up to 130 and 576; what is kept for
/// each is taken before any tensor is looked at.
const MAX_LAYERS: usize = 1 << 16;
const MAX_HEAD_DIM: usize = 1 << 16;
/// Lengths that what was turned may have. Published ones are between 0.5 and 2; scores grow by the square.
const MAGNITUDES: RangeInclusive<f32> = 0.001..=1000.0;
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
    /// Longest sequence the model was trained for.
    pub context_tokens: u32,
    /// Added to the mean square before its root.
    pub norm_epsilon: f32,
    /// Rotary position embedding of the layers that see all keys.
    pub rope: RopeConfig,
    /// The layers that see only a window of keys; absent where there are none.
    pub local: Option<LocalAttention>,
    /// Multiplies the products of queries and keys.
    pub attention_scale: f32,
    /// Bends the scores of attention to `cap · tanh(score / cap)`.
    pub attention_soft_cap: Option<f32>,
    /// Bends the logits alike.
    pub logit_soft_cap: Option<f32>,
    /// Multiplies the token embedding.
    pub embedding_scale: f32,
    /// Of the feed-forward block's gate.
    pub activation: Activation,
    /// What is added to the weights of norms.
    pub norm_offset: f32,
    /// What the attention and the feed-forward block give is normed before it is added.
    pub post_norms: bool,
    /// Queries, keys and values are one matrix, gate and up another.
    pub fused: bool,
    /// Absent where every token goes through the whole feed-forward block.
    pub experts: Option<ExpertsConfig>,
    /// Queries, keys and values have biases.
    pub biases: bool,
    /// Each head of queries and keys is normed before it turns.
    pub head_norms: bool,
    /// How matrices were quantized by another tool.
    pub(crate) schemes: Option<Schemes>,
    /// How tensors are named.
    pub(crate) naming: Naming,
    /// The head multiplies with the token embedding's matrix.
    pub tied_output: bool,
}

/// What a gated feed-forward block does to its gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e⁻ˣ)`.
    Silu,
    /// The Gaussian error unit by its hyperbolic tangent.
    GeluTanh,
}

/// Layers whose queries see only the last keys.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalAttention {
    /// Keys that a query sees, its own among them.
    pub window: usize,
    /// In which layers.
    pub layers: LayerSet,
    /// Their rotary embedding where it is another one.
    pub rope: Option<RopeConfig>,
}

impl LocalAttention {
    /// The same of a run of layers, which count from 0 there.
    fn of_layers(&self, run: Range<u32>) -> LocalAttention {
        let layers = LayerSet::Listed(run.map(|layer| self.layers.contains(layer as usize)).collect());
        LocalAttention { layers, ..self.clone() }
    }
}

/// A mixture of experts: a router sends each token through a few of many feed-forward blocks (Shazeer et al. 2017).
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts of a layer.
    pub count: usize,
    /// Those that are held: all, unless ranks divide them among them.
    pub held: Range<usize>,
    /// Experts of a token.
    pub used: usize,
    /// Width of an expert.
    pub feed_forward: usize,
    /// Width of the expert that every token goes through.
    pub shared_feed_forward: Option<usize>,
    /// The weights of a token's experts are scaled to a sum of one.
    pub sum_to_one: bool,
    pub(crate) names: &'static ExpertNames,
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
    /// What divides them instead where sequences may be long.
    pub long: Option<LongRope>,
    /// Length of what was turned, by whatever factors.
    pub magnitude: f32,
    /// Which values turn together.
    pub pairing: RopePairing,
    /// In which layers.
    pub layers: LayerSet,
}

/// Other factors for long sequences (LongRoPE, Ding et al. 2024). Keys in a cache cannot change theirs, so the longest
/// sequence that there may be decides.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Longest sequence for which the ordinary factors hold, tokens.
    pub beyond_tokens: usize,
    /// What divides each pair's frequency beyond that.
    pub factors: Vec<f32>,
}

impl RopeConfig {
    /// What divides the frequencies where no sequence is longer than `tokens`.
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
    /// Every one.
    All,
    /// Every one but the last of each so many.
    AllButEvery(usize),
    /// Those that are true here.
    Listed(Vec<bool>),
}

impl LayerSet {
    /// Whether `layer`, from 0, is one of them.
    pub fn contains(&self, layer: usize) -> bool {
        match self {
            LayerSet::All => true,
            LayerSet::AllButEvery(interval) => !(layer + 1).is_multiple_of(*interval),
            LayerSet::Listed(members) => members.get(layer).copied().unwrap_or(true),
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
    /// Matrices that were quantized otherwise than the rest.
    #[error(
        "metadata key {key:?} is {value}; it must be {common}, as of all matrices that are not left unquantized (-:)"
    )]
    Override {
        /// The key, with the pattern of their names.
        key: String,
        /// The key's value.
        value: String,
        /// That of the rest.
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
    /// Integers are not quantized again.
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

    /// Whether the checkpoint has more than this decoder, which reads text alone: what reads images is left out.
    pub fn is_of_more_than_text(&self) -> bool {
        matches!(self.naming, Naming::Hub(Nesting::Beside | Nesting::Within))
    }

    /// Whether inputs of quantized matrices were meant to be rounded to 8 bits, too.
    pub(crate) fn rounds_inputs(&self) -> bool {
        self.schemes.as_ref().is_some_and(Schemes::rounds_inputs)
    }

    /// The window of a layer whose queries do not see all keys.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.local.as_ref().filter(|local| local.layers.contains(layer)).map(|local| local.window)
    }

    /// The layers that do not, all together.
    fn windowed_layers(&self) -> Option<WindowedLayers> {
        let layers = (0..self.layers).filter(|layer| self.window(*layer).is_some()).count() as u32;
        let tokens = self.local.as_ref().map(|local| u32::try_from(local.window).unwrap_or(u32::MAX))?;
        (layers > 0).then_some(WindowedLayers { layers, tokens })
    }

    /// The rotary embeddings that there are tables of: the first is every layer's, or that of layers without a window.
    pub fn ropes(&self) -> impl Iterator<Item = &RopeConfig> {
        let local = self.local.as_ref().and_then(|local| local.rope.as_ref());
        [&self.rope].into_iter().chain(local)
    }

    /// Values that the tables of one position hold.
    pub(crate) fn rotary_dims(&self) -> usize {
        self.ropes().map(|rope| rope.dims).sum()
    }

    /// Which of [`ropes`](Self::ropes) turns a layer's heads.
    pub fn rope_index(&self, layer: usize) -> usize {
        let local = self.local.as_ref().filter(|local| local.rope.is_some() && local.layers.contains(layer));
        usize::from(local.is_some())
    }

    /// Values of all query heads of a token.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Values of all keys, or all values, of a token.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Widths of an expert and of the one that every token goes through; 0 where there are none.
    pub(crate) fn expert_widths(&self) -> [u32; 2] {
        let experts = self.experts.as_ref();
        let shared = experts.and_then(|experts| experts.shared_feed_forward);
        [experts.map_or(0, |experts| experts.feed_forward), shared.unwrap_or(0)].map(|width| width as u32)
    }

    /// Widths of the blocks whose columns ranks divide, whole experts or not; 0 where there are none.
    pub(crate) fn divided_widths(&self, whole_experts: bool) -> [(&'static str, u32); 3] {
        let [expert, shared] = self.expert_widths();
        let dense = if self.experts.is_some() { 0 } else { self.feed_forward as u32 };
        let expert = if whole_experts { 0 } else { expert };
        [("feed-forward block", dense), ("expert", expert), ("shared expert", shared)]
    }

    /// The experts that a rank holds, whole or columns of them.
    pub(crate) fn experts_of(&self, shard: &Shard) -> Range<usize> {
        match (&shard.experts, &self.experts) {
            (Some(held), _) => held.start as usize..held.end as usize,
            (None, Some(experts)) => 0..experts.count,
            (None, None) => 0..0,
        }
    }

    /// The part of the decoder that a rank of a stage computes. The vocabulary stays whole: every rank reads all tokens.
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
            windowed: self.windowed_layers(),
        }
    }
}
