//! Reads the configuration of a decoder from the metadata of a GGUF file.

mod rope;

use std::ops::RangeInclusive;

use windlass_checkpoint::{GgufFile, Metadata};

use super::{
    ConfigError, DecoderConfig, ExpertsConfig, LayerSet, LocalAttention, MAX_CONTEXT_TOKENS, MAX_HEAD_DIM, MAX_LAYERS,
    Unsupported,
};
use crate::config::family::{Family, LocalLayers};
use crate::config::names::Naming;

/// Reads the configuration of a file.
pub(super) fn read(file: &GgufFile) -> Result<DecoderConfig, ConfigError> {
    let architecture = file.metadata().require("general.architecture", Metadata::str)?;
    let family = Family::of_gguf(architecture).ok_or_else(|| Unsupported::Architecture(architecture.to_owned()))?;
    let keys = Keys { metadata: file.metadata(), architecture, family };
    let hidden = keys.positive("embedding_length")?;
    let (heads, kv_heads) = keys.heads()?;
    let head_dim = keys.head_dim(hidden, heads)?;
    let layers = keys.layers()?;
    let experts = keys.experts()?;
    let feed_forward = match &experts {
        Some(experts) => experts.feed_forward.max(experts.shared_feed_forward.unwrap_or(0)),
        None => keys.positive("feed_forward_length")?,
    };
    Ok(DecoderConfig {
        architecture: architecture.to_owned(),
        layers,
        hidden,
        feed_forward,
        heads,
        kv_heads,
        head_dim,
        vocabulary: vocabulary(file)?,
        context_tokens: keys.context_tokens()?,
        norm_epsilon: keys.norm_epsilon()?,
        rope: keys.rope(file, head_dim)?,
        local: keys.local(file, head_dim)?,
        attention_scale: attention_scale(architecture, layers, hidden, heads, head_dim),
        attention_soft_cap: keys.cap("attn_logit_softcapping")?,
        logit_soft_cap: keys.cap("final_logit_softcapping")?,
        embedding_scale: if family.scaled_embedding { (hidden as f32).sqrt() } else { 1.0 },
        activation: family.activation,
        norm_offset: 0.0,
        post_norms: family.post_norms,
        fused: family.fused,
        experts,
        biases: family.biases,
        head_norms: family.head_norms,
        schemes: None,
        naming: Naming::Gguf,
        tied_output: file.tensor("output.weight").is_none(),
    })
}

/// The scale of attention, which files do not have. The largest models of Gemma 2 and of Gemma 3, recognized by their
/// numbers of layers, divide by the square root of `hidden / heads` instead of the head size (`query_pre_attn_scalar`
/// of their `config.json`).
fn attention_scale(architecture: &str, layers: usize, hidden: usize, heads: usize, head_dim: usize) -> f32 {
    let width = match (architecture, layers) {
        ("gemma2", 46) | ("gemma3", 62) => hidden / heads,
        _ => head_dim,
    };
    (width as f32).sqrt().recip()
}

fn vocabulary(file: &GgufFile) -> Result<usize, ConfigError> {
    let name = "token_embd.weight";
    let problem = |problem: String| ConfigError::Tensor { name, problem };
    let tensor = file.tensor(name).ok_or_else(|| problem("missing".into()))?;
    let tokens = file.metadata().str_array("tokenizer.ggml.tokens")?.map(|tokens| tokens.len() as u64);
    match *tensor.dims {
        [_, rows] if tokens.is_some_and(|tokens| tokens != rows) => {
            let tokens = tokens.unwrap_or_default();
            Err(problem(format!(
                "it has {rows} rows, and tokenizer.ggml.tokens {tokens} entries: they must be as many"
            )))
        }
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
        if value_dim != head_dim {
            return Err(self.invalid("attention.value_length", value_dim, format!("{head_dim}, as of the keys")));
        }
        match head_dim {
            1..=MAX_HEAD_DIM => Ok(head_dim),
            _ => Err(self.invalid("attention.key_length", head_dim, format!("at most {MAX_HEAD_DIM}"))),
        }
    }

    fn layers(self) -> Result<usize, ConfigError> {
        match self.positive("block_count")? {
            layers @ 1..=MAX_LAYERS => Ok(layers),
            layers => Err(self.invalid("block_count", layers, format!("at most {MAX_LAYERS}"))),
        }
    }

    /// The context length: the tokens that the model was trained for, or to which YaRN extends them, which not all
    /// files count.
    fn context_tokens(self) -> Result<u32, ConfigError> {
        let extended = self.yarn()?.map_or(0, |yarn| yarn.tokens());
        Ok(self.context_length()?.max(extended))
    }

    fn context_length(self) -> Result<u32, ConfigError> {
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

    /// A number in a range, or the default if it is missing.
    fn within(self, name: &str, range: RangeInclusive<f32>, default: f32) -> Result<f32, ConfigError> {
        match self.metadata.f32(&self.key(name))?.unwrap_or(default) {
            number if range.contains(&number) => Ok(number),
            number => Err(self.invalid(name, number, format!("from {} to {}", range.start(), range.end()))),
        }
    }

    /// A soft cap; `None` if it is missing.
    fn cap(self, name: &str) -> Result<Option<f32>, ConfigError> {
        match self.metadata.f32(&self.key(name))? {
            Some(cap) if !cap.is_finite() || cap <= 0.0 => Err(self.invalid(name, cap, "finite and positive")),
            cap => Ok(cap),
        }
    }

    /// The layers with a window; `None` if the context fits in the window.
    fn local(self, file: &GgufFile, head_dim: usize) -> Result<Option<LocalAttention>, ConfigError> {
        let name = "attention.sliding_window";
        let window = match self.metadata.u32(&self.key(name))? {
            None | Some(0) => return Ok(None),
            Some(window) => window as usize,
        };
        let (layers, rope) = match self.family.local {
            LocalLayers::All => (LayerSet::All, None),
            LocalLayers::AllButEvery { interval, rope_theta } => {
                let interval = self.positive_or("attention.sliding_window_pattern", interval)?;
                let rope = rope_theta.map(|theta| self.local_rope(file, head_dim, theta)).transpose()?;
                (LayerSet::AllButEvery(interval), rope)
            }
            // Files do not say which layers.
            LocalLayers::Upper => return Err(self.unsupported(name, window.to_string(), "a window")),
        };
        let needless = window >= self.context_tokens()? as usize && rope.is_none();
        Ok((!needless).then_some(LocalAttention { window, layers, rope }))
    }

    fn experts(self) -> Result<Option<ExpertsConfig>, ConfigError> {
        let count = self.metadata.u32(&self.key("expert_count"))?.unwrap_or(0) as usize;
        let names = match self.family.experts {
            _ if count == 0 => return Ok(None),
            Some(names) => names,
            None => return Err(self.unsupported("expert_count", count.to_string(), "a mixture of experts")),
        };
        let used = self.positive("expert_used_count")?;
        if used > count {
            return Err(self.invalid("expert_used_count", used, format!("at most the {count} experts")));
        }
        let width = "expert_feed_forward_length";
        let feed_forward = match self.metadata.u32(&self.key(width))? {
            None => self.positive("feed_forward_length")?,
            Some(_) => self.positive(width)?,
        };
        let shared_feed_forward = self.metadata.u32(&self.key("expert_shared_feed_forward_length"))?;
        let shared_feed_forward = shared_feed_forward.filter(|width| *width > 0).map(|width| width as usize);
        let sum_to_one = self.family.experts_sum_to_one;
        Ok(Some(ExpertsConfig { count, held: 0..count, used, feed_forward, shared_feed_forward, sum_to_one, names }))
    }

    fn unsupported(self, name: &str, value: String, feature: &'static str) -> ConfigError {
        Unsupported::Feature { key: self.key(name), value, feature }.into()
    }
}
