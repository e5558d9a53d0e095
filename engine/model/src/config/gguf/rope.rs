//! Rotary embeddings of GGUF files.

use windlass_checkpoint::{GgufFile, Metadata};
use windlass_kernels::{WeightType, floats};

use super::super::{ConfigError, DEFAULT_ROPE_THETA, LayerSet, LongRope, RopeConfig};
use super::Keys;
use crate::names::ROPE_FACTORS;

impl Keys<'_> {
    pub(super) fn rope(self, file: &GgufFile, head_dim: usize) -> Result<RopeConfig, ConfigError> {
        let dims = self.positive_or("rope.dimension_count", head_dim)?;
        if !dims.is_multiple_of(2) || dims > head_dim {
            return Err(self.invalid("rope.dimension_count", dims, format!("even and at most {head_dim}")));
        }
        let theta = self.theta("rope.freq_base", DEFAULT_ROPE_THETA)?;
        let [any, long, short] = ROPE_FACTORS;
        let name = if file.tensor(short).is_some() { short } else { any };
        let factors = combine(rope_factors(file, name, dims / 2)?, self.linear_scaling()?, dims / 2);
        let long = rope_factors(file, long, dims / 2)?.map(|factors| self.long_rope(factors)).transpose()?;
        let layers = self.family.still_interval.map_or(LayerSet::All, LayerSet::AllButEvery);
        Ok(RopeConfig { dims, theta, factors, long, pairing: self.family.gguf_pairing, layers })
    }

    /// The rotary embedding of layers with a window, where it is another one: never scaled.
    pub(super) fn local_rope(self, file: &GgufFile, head_dim: usize, theta: f32) -> Result<RopeConfig, ConfigError> {
        let theta = self.theta("rope.freq_base_swa", theta)?;
        Ok(RopeConfig { theta, factors: None, long: None, ..self.rope(file, head_dim)? })
    }

    fn theta(self, name: &str, default: f32) -> Result<f32, ConfigError> {
        match self.metadata.f32(&self.key(name))?.unwrap_or(default) {
            theta if !theta.is_finite() || theta < 1.0 => Err(self.invalid(name, theta, "finite and at least 1")),
            theta => Ok(theta),
        }
    }

    fn long_rope(self, factors: Vec<f32>) -> Result<LongRope, ConfigError> {
        let beyond_tokens = self.positive("rope.scaling.original_context_length")?;
        let name = "rope.scaling.attn_factor";
        match self.metadata.f32(&self.key(name))?.unwrap_or(1.0) {
            magnitude if magnitude.is_finite() && magnitude > 0.0 => Ok(LongRope { beyond_tokens, factors, magnitude }),
            magnitude => Err(self.invalid(name, magnitude, "finite and positive")),
        }
    }

    /// What divides all frequencies (Chen et al. 2023), if positions are scaled linearly.
    fn linear_scaling(self) -> Result<Option<f32>, ConfigError> {
        let name = "rope.scaling.type";
        match self.metadata.str(&self.key(name))? {
            None | Some("none" | "longrope") => return Ok(None),
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
}

/// Per-pair factors (Llama 3's, LongRoPE's), which converters write as a tensor.
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

fn combine(factors: Option<Vec<f32>>, linear: Option<f32>, pairs: usize) -> Option<Vec<f32>> {
    match (factors, linear) {
        (factors, None) => factors,
        (None, Some(linear)) => Some(vec![linear; pairs]),
        (Some(factors), Some(linear)) => Some(factors.iter().map(|factor| factor * linear).collect()),
    }
}
