//! Rotary embeddings of `config.json`.

use serde_json::Value;
use windlass_kernels::ops::RopePairing;

use super::super::{ConfigError, DEFAULT_ROPE_THETA, LayerSet, LongRope, RopeConfig};
use super::Keys;
use crate::family::Family;

/// What newer files call the rotary parameters of layers that see all keys, and of those that see a window of them.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

impl<'a> Keys<'a> {
    pub(super) fn rotary_layers(self, family: &Family) -> Result<LayerSet, ConfigError> {
        if let Some(list) = self.values["no_rope_layers"].as_array().filter(|_| family.still_interval.is_some()) {
            let turns = list.iter().map(|flag| flag.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1));
            let turns: Option<Vec<bool>> = turns.collect();
            let expected = "a list of 1 (turns) and 0 for each layer";
            let turns =
                turns.filter(|turns| turns.len() as u64 == self.values["num_hidden_layers"].as_u64().unwrap_or(0));
            return turns.map(LayerSet::Listed).ok_or_else(|| self.invalid("no_rope_layers", expected));
        }
        match family.still_interval {
            None => Ok(LayerSet::All),
            Some(default) => Ok(LayerSet::AllButEvery(self.size_or("no_rope_layer_interval", default)?)),
        }
    }

    /// Newer files have one object of rotary parameters, or one for each kind of layer; older ones the base beside an
    /// object of scaling.
    pub(super) fn rope(self, head_dim: usize, layers: LayerSet) -> Result<RopeConfig, ConfigError> {
        let parameters = self.inside("rope_parameters");
        let (base, scaling) = match (self.absent("rope_parameters"), parameters.absent(FULL)) {
            (true, _) => (self, self.inside("rope_scaling")),
            (false, true) => (parameters, parameters),
            (false, false) => (parameters.inside(FULL), parameters.inside(FULL)),
        };
        let theta = base.positive("rope_theta", Some(DEFAULT_ROPE_THETA))?;
        let share = base.positive("partial_rotary_factor", Some(1.0))?;
        let dims = (head_dim as f32 * share) as usize;
        if share > 1.0 || dims == 0 || !dims.is_multiple_of(2) {
            return Err(
                base.invalid("partial_rotary_factor", format!("an even share of the {head_dim} values of a head"))
            );
        }
        let (factors, long) = self.rope_factors(scaling, dims / 2, theta)?;
        Ok(RopeConfig { dims, theta, factors, long, pairing: RopePairing::HalfSplit, layers })
    }

    /// The rotary embedding of layers with a window, where it is another one: never scaled.
    pub(super) fn local_rope(self, head_dim: usize, theta: f32) -> Result<RopeConfig, ConfigError> {
        let sliding = self.inside("rope_parameters").inside(SLIDING);
        let theta = match sliding.values {
            Value::Null => self.positive("rope_local_base_freq", Some(theta))?,
            _ => sliding.positive("rope_theta", Some(theta))?,
        };
        let (pairing, layers) = (RopePairing::HalfSplit, LayerSet::All);
        Ok(RopeConfig { dims: head_dim, theta, factors: None, long: None, pairing, layers })
    }

    /// What divides the frequencies by the object of scaling: at any length, and at great length.
    fn rope_factors(
        self,
        scaling: Keys<'a>,
        pairs: usize,
        theta: f32,
    ) -> Result<(Option<Vec<f32>>, Option<LongRope>), ConfigError> {
        let kind = scaling.values["rope_type"].as_str().or(scaling.values["type"].as_str()).unwrap_or("default");
        match kind {
            "default" => Ok((None, None)),
            "linear" => Ok((Some(vec![scaling.positive("factor", None)?; pairs]), None)),
            "llama3" => Ok((Some(scaling.llama3()?.factors(pairs, theta)), None)),
            "longrope" | "su" => self.long_rope(scaling, pairs).map(|(short, long)| (Some(short), Some(long))),
            _ if scaling.absent("rope_type") => Err(scaling.unsupported("type", "this rotary scaling")),
            _ => Err(scaling.unsupported("rope_type", "this rotary scaling")),
        }
    }

    fn long_rope(self, scaling: Keys<'a>, pairs: usize) -> Result<(Vec<f32>, LongRope), ConfigError> {
        let key = "original_max_position_embeddings";
        let keys = if self.absent(key) { scaling } else { self };
        let original = keys.size(key)?;
        if original < 2 {
            return Err(keys.invalid(key, "at least 2"));
        }
        let extension = self.context_tokens()? as f32 / original as f32;
        let grown = if extension > 1.0 { (1.0 + extension.ln() / (original as f32).ln()).sqrt() } else { 1.0 };
        let magnitude = scaling.positive("attention_factor", Some(grown))?;
        let (short, factors) = (scaling.divisors("short_factor", pairs)?, scaling.divisors("long_factor", pairs)?);
        Ok((short, LongRope { beyond_tokens: original, factors, magnitude }))
    }

    /// A positive number for each pair.
    fn divisors(self, key: &str, pairs: usize) -> Result<Vec<f32>, ConfigError> {
        let number = |value: &Value| value.as_f64().map(|number| number as f32);
        let numbers =
            self.values[key].as_array().and_then(|list| list.iter().map(number).collect::<Option<Vec<f32>>>());
        let numbers = numbers.filter(|list| list.len() == pairs && list.iter().all(|n| n.is_finite() && *n > 0.0));
        numbers.ok_or_else(|| self.invalid(key, format!("{pairs} positive numbers")))
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
    use serde_json::json;

    /// What Phi-3's configuration computes where it says nothing: √(1 + ln(factor) / ln(original length)), of 128k tokens
    /// from 4k by Python.
    #[test]
    fn long_rope_lengthens_by_how_much_the_context_grew() {
        let magnitude = |context: u64, original: u64, scaling: Value| {
            let mut scaling = scaling;
            scaling["short_factor"] = json!([1.0]);
            scaling["long_factor"] = json!([2.0]);
            let config = json!({"max_position_embeddings": context, "original_max_position_embeddings": original});
            Keys::of(&config).long_rope(Keys::of(&scaling), 1).unwrap().1.magnitude
        };
        assert!((magnitude(131_072, 4096, json!({})) - 1.190_238_1).abs() < 1e-6);
        assert_eq!(magnitude(4096, 4096, json!({})), 1.0);
        assert_eq!(magnitude(2048, 4096, json!({})), 1.0);
        assert_eq!(magnitude(131_072, 4096, json!({"attention_factor": 1.5})), 1.5);
    }

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
