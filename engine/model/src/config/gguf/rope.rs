//! Rotary embeddings of GGUF files.

use windlass_checkpoint::{GgufFile, Metadata};
use windlass_kernels::{WeightType, floats};

use super::super::yarn::{self, Yarn};
use super::super::{ConfigError, DEFAULT_ROPE_THETA, LayerSet, LongRope, MAGNITUDES, MAX_CONTEXT_TOKENS, RopeConfig};
use super::Keys;
use crate::config::names::ROPE_FACTORS;

impl Keys<'_> {
    pub(super) fn rope(self, file: &GgufFile, head_dim: usize) -> Result<RopeConfig, ConfigError> {
        let dims = self.positive_or("rope.dimension_count", head_dim)?;
        if !dims.is_multiple_of(2) || dims > head_dim {
            return Err(self.invalid("rope.dimension_count", dims, format!("even and at most {head_dim}")));
        }
        let theta = self.theta("rope.freq_base", DEFAULT_ROPE_THETA)?;
        let [any, long, short] = ROPE_FACTORS;
        let name = if file.tensor(short).is_some() { short } else { any };
        let factors = combine(rope_factors(file, name, dims / 2)?, self.scaling(dims / 2, theta)?);
        let long = rope_factors(file, long, dims / 2)?.map(|factors| self.long_rope(factors)).transpose()?;
        let magnitude = match (&long, self.yarn()?) {
            (Some(_), _) => self.attention_factor()?,
            (None, yarn) => yarn.map_or(1.0, |yarn| yarn.magnitude),
        };
        let layers = self.family.still_interval.map_or(LayerSet::All, LayerSet::AllButEvery);
        Ok(RopeConfig { dims, theta, factors, long, magnitude, pairing: self.family.gguf_pairing, layers })
    }

    /// The rotary embedding of layers with a window, if it differs. It is never scaled.
    pub(super) fn local_rope(self, file: &GgufFile, head_dim: usize, theta: f32) -> Result<RopeConfig, ConfigError> {
        let theta = self.theta("rope.freq_base_swa", theta)?;
        Ok(RopeConfig { theta, factors: None, long: None, magnitude: 1.0, ..self.rope(file, head_dim)? })
    }

    fn theta(self, name: &str, default: f32) -> Result<f32, ConfigError> {
        match self.metadata.f32(&self.key(name))?.unwrap_or(default) {
            theta if !theta.is_finite() || theta < 1.0 => Err(self.invalid(name, theta, "finite and at least 1")),
            theta => Ok(theta),
        }
    }

    fn long_rope(self, factors: Vec<f32>) -> Result<LongRope, ConfigError> {
        let beyond_tokens = self.positive("rope.scaling.original_context_length")?;
        Ok(LongRope { beyond_tokens, factors })
    }

    /// The factor by which llama.cpp multiplies the length of rotated vectors.
    fn attention_factor(self) -> Result<f32, ConfigError> {
        self.within("rope.scaling.attn_factor", MAGNITUDES, 1.0)
    }

    /// The divisors of each pair's frequency, besides a tensor of divisors: one number if positions are scaled linearly
    /// (Chen et al. 2023), or those of YaRN.
    fn scaling(self, pairs: usize, theta: f32) -> Result<Option<Vec<f32>>, ConfigError> {
        let name = "rope.scaling.type";
        match self.metadata.str(&self.key(name))? {
            None | Some("none" | "longrope") => Ok(None),
            Some("linear") => self.linear_factor().map(|factor| Some(vec![factor; pairs])),
            Some("yarn") if theta <= 1.0 => {
                Err(self.invalid("rope.freq_base", theta, "above 1, as YaRN divides by its logarithm"))
            }
            Some("yarn") => Ok(self.yarn()?.map(|yarn| yarn.factors(pairs, theta))),
            Some(other) => Err(self.unsupported(name, format!("{other:?}"), "this rotary scaling")),
        }
    }

    fn linear_factor(self) -> Result<f32, ConfigError> {
        let name = "rope.scaling.factor";
        self.above_zero(name, self.metadata.require(&self.key(name), Metadata::f32)?)
    }

    fn above_zero(self, name: &str, number: f32) -> Result<f32, ConfigError> {
        match number.is_finite() && number > 0.0 {
            true => Ok(number),
            false => Err(self.invalid(name, number, "finite and positive")),
        }
    }

    /// Reads the parameters of YaRN as llama.cpp does; `None` if positions are not scaled so.
    pub(super) fn yarn(self) -> Result<Option<Yarn>, ConfigError> {
        if self.metadata.str(&self.key("rope.scaling.type"))? != Some("yarn") {
            return Ok(None);
        }
        self.refuse_other_yarn()?;
        let factor = self.metadata.require(&self.key("rope.scaling.factor"), Metadata::f32)?;
        let factor = self.within("rope.scaling.factor", yarn::FACTORS, factor)?;
        let beta = |name, default| self.above_zero(name, self.metadata.f32(&self.key(name))?.unwrap_or(default));
        let beta_fast = beta("rope.scaling.yarn_beta_fast", yarn::BETA_FAST)?;
        let beta_slow = beta("rope.scaling.yarn_beta_slow", yarn::BETA_SLOW)?;
        if beta_slow >= beta_fast {
            let expected = format!("below yarn_beta_fast, {beta_fast}");
            return Err(self.invalid("rope.scaling.yarn_beta_slow", beta_slow, expected));
        }
        let original_tokens = self.original_tokens()?;
        let magnitude = yarn::magnitude(factor, 1.0) * self.attention_factor()?;
        Ok(Some(Yarn { factor, original_tokens, beta_fast, beta_slow, truncate: true, magnitude }))
    }

    fn original_tokens(self) -> Result<u32, ConfigError> {
        let name = "rope.scaling.original_context_length";
        match self.positive_or(name, self.context_length()? as usize)? as u32 {
            tokens @ 1..=MAX_CONTEXT_TOKENS => Ok(tokens),
            tokens => Err(self.invalid(name, tokens, format!("at most {MAX_CONTEXT_TOKENS}"))),
        }
    }

    /// Refuses keys that converters write and programs interpret differently: llama.cpp ignores the second, where
    /// transformers uses nothing else, and reads the third as another number for each architecture.
    fn refuse_other_yarn(self) -> Result<(), ConfigError> {
        for (name, usual) in [("yarn_ext_factor", 1.0), ("yarn_attn_factor", f32::NAN), ("yarn_log_multiplier", 0.0)] {
            let name = format!("rope.scaling.{name}");
            if let Some(number) = self.metadata.f32(&self.key(&name))?.filter(|number| *number != usual) {
                return Err(self.unsupported(&name, number.to_string(), "this number of YaRN's"));
            }
        }
        Ok(())
    }
}

/// Divisors for each pair (Llama 3, LongRoPE), which converters write as a tensor.
fn rope_factors(file: &GgufFile, name: &'static str, pairs: usize) -> Result<Option<Vec<f32>>, ConfigError> {
    let Some(tensor) = file.tensor(name) else { return Ok(None) };
    if tensor.kind.name() != "f32" || tensor.dims != [pairs as u64] {
        let problem = format!("it is {} {:?}, not f32 [{pairs}]", tensor.kind, tensor.dims);
        return Err(ConfigError::Tensor { name, problem });
    }
    let factors = floats(WeightType::F32, &tensor.bytes);
    match factors.iter().find(|factor| !factor.is_finite() || **factor <= 0.0) {
        Some(wrong) => Err(ConfigError::Tensor { name, problem: format!("it holds {wrong}, which divides nothing") }),
        None => Ok(Some(factors)),
    }
}

fn combine(factors: Option<Vec<f32>>, scaling: Option<Vec<f32>>) -> Option<Vec<f32>> {
    match (factors, scaling) {
        (Some(factors), Some(scaling)) => Some(factors.iter().zip(scaling).map(|(a, b)| a * b).collect()),
        (factors, scaling) => factors.or(scaling),
    }
}
