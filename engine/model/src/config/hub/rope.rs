//! Reads rotary embeddings from `config.json`.

use serde_json::Value;
use windlass_kernels::ops::RopePairing;

use super::super::yarn::{self, Yarn};
use super::super::{ConfigError, DEFAULT_ROPE_THETA, LayerSet, LongRope, MAGNITUDES, MAX_CONTEXT_TOKENS, RopeConfig};
use super::Keys;
use crate::config::family::Family;

/// Names in newer files for layers with full attention, and for layers with a window.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Divisors of frequencies, and the factor of the length of rotated vectors.
struct Scaling {
    factors: Option<Vec<f32>>,
    long: Option<LongRope>,
    magnitude: f32,
}

impl Scaling {
    fn by(factors: Option<Vec<f32>>) -> Scaling {
        Scaling { factors, long: None, magnitude: 1.0 }
    }
}

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

    /// The objects with the base and with the scaling. Newer files have one object of rotary parameters, or one for
    /// each kind of layer; older files have the base beside an object of scaling.
    fn rotary_keys(self) -> (Keys<'a>, Keys<'a>) {
        let parameters = self.inside("rope_parameters");
        match (self.absent("rope_parameters"), parameters.absent(FULL)) {
            (true, _) => (self, self.inside("rope_scaling")),
            (false, true) => (parameters, parameters),
            (false, false) => (parameters.inside(FULL), parameters.inside(FULL)),
        }
    }

    pub(super) fn rope(self, head_dim: usize, layers: LayerSet) -> Result<RopeConfig, ConfigError> {
        let (base, scaling) = self.rotary_keys();
        let theta = base.positive("rope_theta", Some(DEFAULT_ROPE_THETA))?;
        let share = base.positive("partial_rotary_factor", Some(1.0))?;
        let dims = (head_dim as f32 * share) as usize;
        if share > 1.0 || dims == 0 || !dims.is_multiple_of(2) {
            return Err(
                base.invalid("partial_rotary_factor", format!("an even share of the {head_dim} values of a head"))
            );
        }
        let Scaling { factors, long, magnitude } = match self.yarn()? {
            Some(_) if theta <= 1.0 => {
                return Err(base.invalid("rope_theta", "above 1, as YaRN divides by its logarithm"));
            }
            Some(yarn) => Scaling { magnitude: yarn.magnitude, ..Scaling::by(Some(yarn.factors(dims / 2, theta))) },
            None => self.scaling(scaling, dims / 2, theta)?,
        };
        Ok(RopeConfig { dims, theta, factors, long, magnitude, pairing: RopePairing::HalfSplit, layers })
    }

    /// The rotary embedding of layers with a window, if it differs. It is never scaled.
    pub(super) fn local_rope(self, head_dim: usize, theta: f32) -> Result<RopeConfig, ConfigError> {
        let sliding = self.inside("rope_parameters").inside(SLIDING);
        let theta = match sliding.values {
            Value::Null => self.positive("rope_local_base_freq", Some(theta))?,
            _ => sliding.positive("rope_theta", Some(theta))?,
        };
        let (pairing, layers) = (RopePairing::HalfSplit, LayerSet::All);
        Ok(RopeConfig { dims: head_dim, theta, factors: None, long: None, magnitude: 1.0, pairing, layers })
    }

    /// The divisors of frequencies by the object of scaling, for any length and for long sequences.
    fn scaling(self, scaling: Keys<'a>, pairs: usize, theta: f32) -> Result<Scaling, ConfigError> {
        match scaling.rope_type() {
            "default" => Ok(Scaling::by(None)),
            "linear" => Ok(Scaling::by(Some(vec![scaling.positive("factor", None)?; pairs]))),
            "llama3" => Ok(Scaling::by(Some(scaling.llama3()?.factors(pairs, theta)))),
            "longrope" | "su" => self.long_rope(scaling, pairs),
            _ if scaling.absent("rope_type") => Err(scaling.unsupported("type", "this rotary scaling")),
            _ => Err(scaling.unsupported("rope_type", "this rotary scaling")),
        }
    }

    fn rope_type(self) -> &'a str {
        self.values["rope_type"].as_str().or(self.values["type"].as_str()).unwrap_or("default")
    }

    /// Reads the parameters of YaRN as transformers does; `None` if positions are not scaled so.
    pub(super) fn yarn(self) -> Result<Option<Yarn>, ConfigError> {
        let (_, scaling) = self.rotary_keys();
        if scaling.rope_type() != "yarn" {
            return Ok(None);
        }
        let original_tokens = self.original_tokens(scaling)?;
        let factor = match scaling.absent("factor") {
            true => (self.position_embeddings()? as f32 / original_tokens as f32).max(1.0),
            false => scaling.within("factor", yarn::FACTORS, None)?,
        };
        let beta_fast = scaling.positive("beta_fast", Some(yarn::BETA_FAST))?;
        let beta_slow = scaling.positive("beta_slow", Some(yarn::BETA_SLOW))?;
        if beta_slow >= beta_fast {
            return Err(scaling.invalid("beta_slow", format!("below beta_fast, {beta_fast}")));
        }
        let truncate = scaling.absent("truncate") || scaling.flag("truncate")?;
        let magnitude = scaling.within("attention_factor", MAGNITUDES, Some(scaling.yarn_magnitude(factor)?))?;
        Ok(Some(Yarn { factor, original_tokens, beta_fast, beta_slow, truncate, magnitude }))
    }

    /// Tokens of the original context, which files have in either place, or have not extended.
    fn original_tokens(self, scaling: Keys<'a>) -> Result<u32, ConfigError> {
        let key = "original_max_position_embeddings";
        let keys = match (scaling.absent(key), self.absent(key)) {
            (false, _) => scaling,
            (true, false) => self,
            (true, true) => return self.position_embeddings(),
        };
        match u32::try_from(keys.size(key)?) {
            Ok(tokens @ 1..=MAX_CONTEXT_TOKENS) => Ok(tokens),
            _ => Err(keys.invalid(key, format!("at most {MAX_CONTEXT_TOKENS}"))),
        }
    }

    /// The factor of length by the two scales of DeepSeek's files: both or neither are there; 0 counts as missing.
    fn yarn_magnitude(self, factor: f32) -> Result<f32, ConfigError> {
        let scale = |key| self.within(key, 0.0..=*MAGNITUDES.end(), Some(0.0));
        let (whole, all) = (scale("mscale")?, scale("mscale_all_dim")?);
        Ok(match whole > 0.0 && all > 0.0 {
            true => yarn::magnitude(factor, whole) / yarn::magnitude(factor, all),
            false => yarn::magnitude(factor, 1.0),
        })
    }

    fn long_rope(self, scaling: Keys<'a>, pairs: usize) -> Result<Scaling, ConfigError> {
        let key = "original_max_position_embeddings";
        let keys = if self.absent(key) { scaling } else { self };
        let original = keys.size(key)?;
        if original < 2 {
            return Err(keys.invalid(key, "at least 2"));
        }
        let extension = self.position_embeddings()? as f32 / original as f32;
        let grown = if extension > 1.0 { (1.0 + extension.ln() / (original as f32).ln()).sqrt() } else { 1.0 };
        let magnitude = scaling.within("attention_factor", MAGNITUDES, Some(grown))?;
        let (short, factors) = (scaling.divisors("short_factor", pairs)?, scaling.divisors("long_factor", pairs)?);
        let long = LongRope { beyond_tokens: original, factors };
        Ok(Scaling { long: Some(long), magnitude, ..Scaling::by(Some(short)) })
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

/// Scaling of Llama 3: low frequencies are divided, high frequencies kept, those between interpolated.
struct Llama3Scaling {
    factor: f32,
    low: f32,
    high: f32,
    /// Tokens of the original context, which files have in either place, or have not extended.
    context: f32,
}

impl Llama3Scaling {
    fn factors(&self, pairs: usize, theta: f32) -> Vec<f32> {
        (0..pairs).map(|pair| self.factor_of(theta.powf(-(pair as f32) / pairs as f32))).collect()
    }

    /// The divisor of a frequency, in radians per token.
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

    /// The value that Phi-3's configuration computes by default: √(1 + ln(factor) / ln(original length)), for 128k
    /// tokens from 4k, by Python.
    #[test]
    fn long_rope_lengthens_by_how_much_the_context_grew() {
        let magnitude = |context: u64, original: u64, scaling: Value| {
            let mut scaling = scaling;
            scaling["short_factor"] = json!([1.0]);
            scaling["long_factor"] = json!([2.0]);
            let config = json!({"max_position_embeddings": context, "original_max_position_embeddings": original});
            Keys::of(&config).long_rope(Keys::of(&scaling), 1).unwrap().magnitude
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
