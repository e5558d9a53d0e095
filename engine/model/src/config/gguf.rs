//! A decoder's configuration from a GGUF file's metadata.

use windlass_checkpoint::{GgufFile, Metadata};
use windlass_kernels::{WeightType, floats};

use super::{
    ConfigError, DEFAULT_ROPE_THETA, DecoderConfig, MAX_CONTEXT_TOKENS, RopeConfig, RotaryLayers, Unsupported,
};
use crate::family::Family;

/// Reads the configuration of a file.
pub(super) fn read(file: &GgufFile) -> Result<DecoderConfig, ConfigError> {
    let architecture = file.metadata().require("general.architecture", Metadata::str)?;
    let family = Family::of_gguf(architecture).ok_or_else(|| Unsupported::Architecture(architecture.to_owned()))?;
    let keys = Keys { metadata: file.metadata(), architecture, family };
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
        biases: family.biases,
        head_norms: family.head_norms,
        scheme: None,
        tied_output: file.tensor("output.weight").is_none(),
    })
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
    family: &'static Family,
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
        let layers = self.family.still_interval.map_or(RotaryLayers::All, RotaryLayers::AllButEvery);
        Ok(RopeConfig { dims, theta, factors, pairing: self.family.gguf_pairing, layers })
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
    let factors = floats(WeightType::F32, tensor.bytes);
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
