//! A decoder's configuration from the hub's `config.json`.

use serde_json::Value;
use windlass_checkpoint::HubFolder;
use windlass_kernels::ops::RopePairing;

use super::{
    ConfigError, DEFAULT_ROPE_THETA, DecoderConfig, MAX_CONTEXT_TOKENS, RopeConfig, RotaryLayers, Unsupported,
};
use crate::family::Family;
use crate::names::{Naming, OUTPUT};
use crate::packed::Scheme;

/// Largest dimension of any kind: those of GGUF files are u32 too.
const MAX_SIZE: u64 = u32::MAX as u64;

/// Reads the configuration of a folder.
pub(super) fn read(folder: &HubFolder) -> Result<DecoderConfig, ConfigError> {
    let keys = Keys(folder.config());
    let model_type = keys.0["model_type"].as_str().ok_or_else(|| keys.invalid("model_type", "a name"))?;
    let family = Family::of_hub(model_type).ok_or_else(|| Unsupported::Architecture(model_type.to_owned()))?;
    keys.refuse_features()?;
    let (hidden, layers) = (keys.size("hidden_size")?, keys.size("num_hidden_layers")?);
    let heads = keys.size("num_attention_heads")?;
    let kv_heads = keys.size_or("num_key_value_heads", heads)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(keys.invalid("num_key_value_heads", format!("a divisor of the {heads} heads")));
    }
    if keys.absent("head_dim") && !hidden.is_multiple_of(heads) {
        return Err(keys.invalid("num_attention_heads", format!("a divisor of the width {hidden}")));
    }
    let head_dim = keys.size_or("head_dim", hidden / heads)?;
    let tied = keys.flag("tie_word_embeddings")? || folder.tensor(&Naming::Hub.once(OUTPUT)).is_none();
    Ok(DecoderConfig {
        architecture: model_type.to_owned(),
        layers,
        hidden,
        feed_forward: keys.size("intermediate_size")?,
        heads,
        kv_heads,
        head_dim,
        vocabulary: keys.size("vocab_size")?,
        context_tokens: keys.context_tokens()?,
        norm_epsilon: keys.norm_epsilon()?,
        rope: keys.rope(head_dim, keys.rotary_layers(family)?)?,
        biases: family.biases,
        head_norms: family.head_norms,
        scheme: Scheme::read(folder)?,
        tied_output: tied,
    })
}

/// The keys of `config.json`.
#[derive(Clone, Copy)]
struct Keys<'a>(&'a Value);

impl<'a> Keys<'a> {
    fn absent(self, key: &str) -> bool {
        self.0[key].is_null()
    }

    fn invalid(self, key: &str, expected: impl Into<String>) -> ConfigError {
        let found = if self.absent(key) { "missing".to_owned() } else { self.0[key].to_string() };
        ConfigError::Invalid { key: format!("config.json: {key}"), found, expected: expected.into() }
    }

    fn size(self, key: &str) -> Result<usize, ConfigError> {
        match self.0[key].as_u64() {
            Some(size @ 1..=MAX_SIZE) => Ok(size as usize),
            _ => Err(self.invalid(key, "a positive integer below 2^32")),
        }
    }

    fn size_or(self, key: &str, default: usize) -> Result<usize, ConfigError> {
        if self.absent(key) { Ok(default) } else { self.size(key) }
    }

    /// A Boolean; false where it is absent.
    fn flag(self, key: &str) -> Result<bool, ConfigError> {
        match &self.0[key] {
            Value::Null => Ok(false),
            Value::Bool(flag) => Ok(*flag),
            _ => Err(self.invalid(key, "true or false")),
        }
    }

    /// A finite number above zero, or the default where it is absent.
    fn positive(self, key: &str, default: Option<f32>) -> Result<f32, ConfigError> {
        match (self.0[key].as_f64().map(|number| number as f32), default) {
            (Some(number), _) if number.is_finite() && number > 0.0 => Ok(number),
            (None, Some(default)) if self.absent(key) => Ok(default),
            _ => Err(self.invalid(key, "a positive number")),
        }
    }

    fn context_tokens(self) -> Result<u32, ConfigError> {
        match self.size("max_position_embeddings")? as u32 {
            tokens @ 1..=MAX_CONTEXT_TOKENS => Ok(tokens),
            _ => Err(self.invalid("max_position_embeddings", format!("at most {MAX_CONTEXT_TOKENS}"))),
        }
    }

    fn norm_epsilon(self) -> Result<f32, ConfigError> {
        match self.positive("rms_norm_eps", None)? {
            epsilon if epsilon < 1.0 => Ok(epsilon),
            _ => Err(self.invalid("rms_norm_eps", "below 1")),
        }
    }

    fn rotary_layers(self, family: &Family) -> Result<RotaryLayers, ConfigError> {
        if let Some(list) = self.0["no_rope_layers"].as_array().filter(|_| family.still_interval.is_some()) {
            let turns = list.iter().map(|flag| flag.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1));
            let turns: Option<Vec<bool>> = turns.collect();
            let expected = "a list of 1 (turns) and 0 for each layer";
            let turns = turns.filter(|turns| turns.len() as u64 == self.0["num_hidden_layers"].as_u64().unwrap_or(0));
            return turns.map(RotaryLayers::Listed).ok_or_else(|| self.invalid("no_rope_layers", expected));
        }
        match family.still_interval {
            None => Ok(RotaryLayers::All),
            Some(default) => Ok(RotaryLayers::AllButEvery(self.size_or("no_rope_layer_interval", default)?)),
        }
    }

    /// Newer files have one object of rotary parameters, older ones the base beside an object of scaling.
    fn rope(self, head_dim: usize, layers: RotaryLayers) -> Result<RopeConfig, ConfigError> {
        let newer = !self.absent("rope_parameters");
        let (base, scaling) =
            if newer { (Keys(&self.0["rope_parameters"]), "rope_parameters") } else { (self, "rope_scaling") };
        let theta = base.positive("rope_theta", Some(DEFAULT_ROPE_THETA))?;
        let share = base.positive("partial_rotary_factor", Some(1.0))?;
        let dims = (head_dim as f32 * share) as usize;
        if share > 1.0 || dims == 0 || !dims.is_multiple_of(2) {
            return Err(
                self.invalid("partial_rotary_factor", format!("an even share of the {head_dim} values of a head"))
            );
        }
        let factors = Keys(&self.0[scaling]).rope_factors(dims / 2, theta)?;
        Ok(RopeConfig { dims, theta, factors, pairing: RopePairing::HalfSplit, layers })
    }

    /// What divides the frequencies; `self` is the object of scaling.
    fn rope_factors(self, pairs: usize, theta: f32) -> Result<Option<Vec<f32>>, ConfigError> {
        let kind = self.0["rope_type"].as_str().or(self.0["type"].as_str()).unwrap_or("default");
        match kind {
            "default" => Ok(None),
            "linear" => Ok(Some(vec![self.positive("factor", None)?; pairs])),
            "llama3" => Ok(Some(self.llama3()?.factors(pairs, theta))),
            other => Err(self.unsupported("rope_type", format!("{other:?}"), "this rotary scaling")),
        }
    }

    fn llama3(self) -> Result<Llama3Scaling, ConfigError> {
        let scaling = Llama3Scaling {
            factor: self.positive("factor", None)?,
            low: self.positive("low_freq_factor", None)?,
            high: self.positive("high_freq_factor", None)?,
            context: self.positive("original_max_position_embeddings", None)?,
        };
        match scaling.low < scaling.high {
            true => Ok(scaling),
            false => Err(self.invalid("low_freq_factor", format!("below high_freq_factor, {}", scaling.high))),
        }
    }

    /// Features that a file of a supported family may ask for and that would change its output.
    fn refuse_features(self) -> Result<(), ConfigError> {
        for (key, feature) in [
            ("attention_bias", "a bias of the attention's output"),
            ("mlp_bias", "a bias of the feed-forward block"),
            ("use_sliding_window", "a window"),
        ] {
            if self.flag(key)? {
                return Err(self.unsupported(key, "true".into(), feature));
            }
        }
        let silent = self.absent("hidden_act") || self.0["hidden_act"] == "silu";
        if !silent {
            return Err(self.unsupported("hidden_act", self.0["hidden_act"].to_string(), "this activation"));
        }
        self.refuse_window()
    }

    /// A window that the context never leaves is none. Qwen names one that its own flag turns off.
    fn refuse_window(self) -> Result<(), ConfigError> {
        let windowed = self.absent("use_sliding_window")
            && self.0["sliding_window"].as_u64() < self.0["max_position_embeddings"].as_u64()
            && !self.absent("sliding_window");
        match windowed {
            true => Err(self.unsupported("sliding_window", self.0["sliding_window"].to_string(), "a window")),
            false => Ok(()),
        }
    }

    fn unsupported(self, key: &str, value: String, feature: &'static str) -> ConfigError {
        Unsupported::Feature { key: format!("config.json: {key}"), value, feature }.into()
    }
}

/// Llama 3's scaling: long wavelengths are stretched, short ones kept, those between blended.
struct Llama3Scaling {
    factor: f32,
    low: f32,
    high: f32,
    /// Tokens of the context before it was extended.
    context: f32,
}

impl Llama3Scaling {
    fn factors(&self, pairs: usize, theta: f32) -> Vec<f32> {
        (0..pairs).map(|pair| self.factor_of(theta.powf(-(pair as f32) / pairs as f32))).collect()
    }

    /// What divides a frequency, in radians per token.
    fn factor_of(&self, frequency: f32) -> f32 {
        let turns = self.context * frequency / std::f32::consts::TAU;
        let kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        1.0 / ((1.0 - kept) / self.factor + kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The longest and shortest wavelengths of Llama 3.1, whose published factors are 8 and 1.
    #[test]
    fn llama3_stretches_only_long_wavelengths() {
        let scaling = Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, context: 8192.0 };
        let factors = scaling.factors(64, 500_000.0);
        assert_eq!((factors[0], factors[63]), (1.0, 8.0));
        assert!(factors.windows(2).all(|pair| pair[0] <= pair[1]));
        assert!(factors.iter().any(|factor| (1.5..7.0).contains(factor)), "some are between");
    }
}
