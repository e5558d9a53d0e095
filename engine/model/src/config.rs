//! What a checkpoint's metadata says of its decoder, checked once.

use windlass_checkpoint::{GgufFile, Metadata, MetadataError};
use windlass_engine_contract::shape::ModelShape;
use windlass_kernels::ops::RopePairing;

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
    #[error("the architecture {0:?} is not supported; \"llama\" is")]
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
    /// A tensor that this decoder has no use for: leaving it out would change the model.
    #[error("tensor {0:?} belongs to no supported decoder of this architecture")]
    ExtraTensor(String),
}

impl DecoderConfig {
    /// Reads the configuration of a GGUF file.
    pub fn read(file: &GgufFile) -> Result<DecoderConfig, ConfigError> {
        let architecture = file.metadata().require("general.architecture", Metadata::str)?;
        if architecture != "llama" {
            return Err(Unsupported::Architecture(architecture.to_owned()).into());
        }
        let keys = Keys { metadata: file.metadata(), architecture };
        keys.refuse_features()?;
        let hidden = keys.positive("embedding_length")?;
        let (heads, kv_heads) = keys.heads()?;
        let head_dim = keys.head_dim(hidden, heads)?;
        Ok(DecoderConfig {
            architecture: architecture.to_owned(),
            layers: keys.positive("block_count")?,
            hidden,
            feed_forward: keys.positive("feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
            vocabulary: vocabulary(file)?,
            context_tokens: keys.context_tokens()?,
            norm_epsilon: keys.norm_epsilon()?,
            rope: keys.rope(file, head_dim)?,
            tied_output: file.tensor("output.weight").is_none(),
        })
    }

    /// Values of all query heads of a token.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Values of all keys, or all values, of a token.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
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

fn vocabulary(file: &GgufFile) -> Result<usize, ConfigError> {
    let name = "token_embd.weight";
    let problem = |problem: String| ConfigError::Tensor { name, problem };
    let tensor = file.tensor(name).ok_or_else(|| problem("missing".into()))?;
    match *tensor.dims {
        [_, rows] if u32::try_from(rows).is_ok() => Ok(rows as usize),
        _ => Err(problem(format!("its dimensions are {:?}, not [embedding_length, vocabulary]", tensor.dims))),
    }
}

/// The metadata of one architecture: keys are `{architecture}.{name}`.
#[derive(Clone, Copy)]
struct Keys<'a> {
    metadata: Metadata<'a>,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn invalid(self, name: &str, found: impl ToString, expected: impl Into<String>) -> ConfigError {
        ConfigError::Invalid { key: self.key(name), found: found.to_string(), expected: expected.into() }
    }

    fn positive(self, name: &str) -> Result<usize, ConfigError> {
        match self.metadata.require(&self.key(name), Metadata::u32)? {
            0 => Err(self.invalid(name, 0, "positive")),
            size => Ok(size as usize),
        }
    }

    fn positive_or(self, name: &str, default: usize) -> Result<usize, ConfigError> {
        match self.metadata.u32(&self.key(name))? {
            None => Ok(default),
            Some(_) => self.positive(name),
        }
    }

    fn heads(self) -> Result<(usize, usize), ConfigError> {
        let heads = self.positive("attention.head_count")?;
        let kv_heads = self.positive_or("attention.head_count_kv", heads)?;
        match heads.is_multiple_of(kv_heads) {
            true => Ok((heads, kv_heads)),
            false => Err(self.invalid("attention.head_count_kv", kv_heads, format!("a divisor of the {heads} heads"))),
        }
    }

    fn head_dim(self, hidden: usize, heads: usize) -> Result<usize, ConfigError> {
        if self.metadata.u32(&self.key("attention.key_length"))?.is_none() && !hidden.is_multiple_of(heads) {
            return Err(self.invalid("attention.head_count", heads, format!("a divisor of the width {hidden}")));
        }
        let head_dim = self.positive_or("attention.key_length", hidden / heads)?;
        let value_dim = self.positive_or("attention.value_length", head_dim)?;
        match value_dim == head_dim {
            true => Ok(head_dim),
            false => Err(self.invalid("attention.value_length", value_dim, format!("{head_dim}, as of the keys"))),
        }
    }

    fn context_tokens(self) -> Result<u32, ConfigError> {
        match self.positive("context_length")? as u32 {
            tokens @ 1..=MAX_CONTEXT_TOKENS => Ok(tokens),
            tokens => Err(self.invalid("context_length", tokens, format!("at most {MAX_CONTEXT_TOKENS}"))),
        }
    }

    fn norm_epsilon(self) -> Result<f32, ConfigError> {
        let name = "attention.layer_norm_rms_epsilon";
        let epsilon = self.metadata.require(&self.key(name), Metadata::f32)?;
        match (0.0..1.0).contains(&epsilon) {
            true => Ok(epsilon),
            false => Err(self.invalid(name, epsilon, "from 0 to below 1")),
        }
    }

    fn rope(self, file: &GgufFile, head_dim: usize) -> Result<RopeConfig, ConfigError> {
        let dims = self.positive_or("rope.dimension_count", head_dim)?;
        if !dims.is_multiple_of(2) || dims > head_dim {
            return Err(self.invalid("rope.dimension_count", dims, format!("even and at most {head_dim}")));
        }
        let theta = self.metadata.f32(&self.key("rope.freq_base"))?.unwrap_or(DEFAULT_ROPE_THETA);
        if !theta.is_finite() || theta < 1.0 {
            return Err(self.invalid("rope.freq_base", theta, "finite and at least 1"));
        }
        let factors = combine(rope_factors(file, dims / 2)?, self.linear_scaling()?, dims / 2);
        // The converter reorders the q and k rows of Llama checkpoints so that neighbours turn together.
        Ok(RopeConfig { dims, theta, factors, pairing: RopePairing::Adjacent })
    }

    /// What divides all frequencies (Chen et al. 2023), if positions are scaled linearly.
    fn linear_scaling(self) -> Result<Option<f32>, ConfigError> {
        let name = "rope.scaling.type";
        match self.metadata.str(&self.key(name))? {
            None | Some("none") => return Ok(None),
            Some("linear") => {}
            Some(other) => return Err(self.unsupported(name, format!("{other:?}"), "this rotary scaling")),
        }
        let name = "rope.scaling.factor";
        let factor = self.metadata.require(&self.key(name), Metadata::f32)?;
        match factor.is_finite() && factor > 0.0 {
            true => Ok(Some(factor)),
            false => Err(self.invalid(name, factor, "finite and positive")),
        }
    }

    /// Features that a file of a supported architecture may ask for and that would change its output.
    fn refuse_features(self) -> Result<(), ConfigError> {
        for (name, feature) in [("expert_count", "a mixture of experts"), ("attention.sliding_window", "a window")] {
            match self.metadata.u32(&self.key(name))? {
                None | Some(0) => {}
                Some(value) => return Err(self.unsupported(name, value.to_string(), feature)),
            }
        }
        Ok(())
    }

    fn unsupported(self, name: &str, value: String, feature: &'static str) -> ConfigError {
        Unsupported::Feature { key: self.key(name), value, feature }.into()
    }
}

/// Llama 3's per-pair factors, which its converter writes as a tensor.
fn rope_factors(file: &GgufFile, pairs: usize) -> Result<Option<Vec<f32>>, ConfigError> {
    let name = "rope_freqs.weight";
    let Some(tensor) = file.tensor(name) else { return Ok(None) };
    if tensor.kind.name() != "f32" || tensor.dims != [pairs as u64] {
        let problem = format!("it is {} {:?}, not f32 [{pairs}]", tensor.kind, tensor.dims);
        return Err(ConfigError::Tensor { name, problem });
    }
    let factors = f32_values(tensor.bytes);
    match factors.iter().find(|factor| !factor.is_finite() || **factor <= 0.0) {
        Some(wrong) => Err(ConfigError::Tensor { name, problem: format!("it holds {wrong}, which divides nothing") }),
        None => Ok(Some(factors)),
    }
}

fn combine(factors: Option<Vec<f32>>, linear: Option<f32>, pairs: usize) -> Option<Vec<f32>> {
    match (factors, linear) {
        (factors, None) => factors,
        (None, Some(linear)) => Some(vec![linear; pairs]),
        (Some(factors), Some(linear)) => Some(factors.iter().map(|factor| factor * linear).collect()),
    }
}

/// The values of little-endian f32 data.
pub(crate) fn f32_values(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}
