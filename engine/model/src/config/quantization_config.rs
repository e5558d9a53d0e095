//! Reads `quantization_config`, in which tools describe how they quantized a checkpoint.

mod groups;
mod overrides;
mod scheme;
mod schemes;

use overrides::ReadScheme;
use serde_json::Value;
use windlass_checkpoint::HubFolder;

use super::{ConfigError, Unsupported};
pub(crate) use scheme::{Float8Scales, GptqZeros, Layout, Scheme, replace};
pub(crate) use schemes::Schemes;
use schemes::{MAX_RULES, Modules, Pattern, Rule};

/// The name of the object in messages.
const KEY: &str = "config.json: quantization_config";

impl Schemes {
    /// Reads `quantization_config`; `None` if the checkpoint has none.
    pub fn read(folder: &HubFolder) -> Result<Option<Schemes>, ConfigError> {
        let config = Config { values: &folder.config()["quantization_config"], path: KEY.to_owned() };
        match &config.values["quant_method"] {
            Value::Null if config.values.is_null() => Ok(None),
            Value::String(method) => config.schemes(method).map(Some),
            _ => Err(config.unsupported("quant_method", "a checkpoint quantized this way")),
        }
    }
}

/// `quantization_config`, or an object in it.
struct Config<'a> {
    values: &'a Value,
    /// The name of the object in messages.
    path: String,
}

impl<'a> Config<'a> {
    /// The object at `key`, which may be missing.
    fn inside(&self, key: &str) -> Config<'a> {
        Config { values: &self.values[key], path: format!("{}.{key}", self.path) }
    }

    fn schemes(&self, method: &str) -> Result<Schemes, ConfigError> {
        match method {
            "gptq" => self.gptq_by_pattern(),
            "compressed-tensors" => self.groups(),
            "auto-round" => self.auto_round(),
            _ => self.scheme(method).map(Schemes::of_all),
        }
    }

    fn scheme(&self, method: &str) -> Result<Scheme, ConfigError> {
        let all = |layout| Ok(Scheme::of_weights(layout, None));
        let float8 = |scales, inverse| {
            let rounds_inputs = method == "fbgemm_fp8" || self.values["activation_scheme"].is_string();
            Ok(Scheme { rounds_inputs, ..Scheme::of_weights(Layout::Float8 { scales, inverse }, None) })
        };
        match method {
            "awq" => self.awq(),
            "fp8" if self.values["weight_block_size"].is_null() => float8(Float8Scales::Matrix, false),
            "fp8" => float8(self.blocks("weight_block_size")?, true),
            "fbgemm_fp8" => float8(Float8Scales::Outputs, false),
            "bitsandbytes" if self.values["load_in_8bit"] == true => all(Layout::Bnb8),
            "bitsandbytes" if self.values["load_in_4bit"] == true => {
                self.expect("bnb_4bit_quant_storage", &["uint8".into(), Value::Null])?;
                all(Layout::Bnb4)
            }
            _ => Err(self.unsupported("quant_method", "a checkpoint quantized this way")),
        }
    }

    fn gptq(&self) -> Result<Scheme, ConfigError> {
        let bits = self.bits("bits", &[2, 3, 4, 8])?;
        let zeros = match (self.values["sym"] == true, self.values["checkpoint_format"] == "gptq_v2") {
            (true, _) => GptqZeros::Middle,
            (false, true) => GptqZeros::Stored,
            (false, false) => GptqZeros::StoredLessOne,
        };
        Ok(Scheme::of_weights(Layout::Gptq { bits, zeros }, self.group("group_size")?))
    }

    fn awq(&self) -> Result<Scheme, ConfigError> {
        self.bits("bits", &[4])?;
        self.expect("version", &["gemm".into(), "GEMM".into(), Value::Null])?;
        Ok(Scheme::of_weights(Layout::Awq, self.group("group_size")?))
    }

    /// Reads the configuration of auto-round, which packs integers as GPTQ or AWQ does.
    fn auto_round(&self) -> Result<Schemes, ConfigError> {
        self.expect("data_type", &["int".into()])?;
        let scheme: ReadScheme = match self.values["packing_format"].as_str() {
            Some("auto_round:auto_gptq") => |config| config.gptq(),
            Some("auto_round:auto_awq") => |config| config.awq(),
            _ => return Err(self.unsupported("packing_format", "this layout")),
        };
        Ok(Schemes { rules: self.auto_round_by_layer(scheme)?, others: Some(scheme(self)?) })
    }

    fn bits(&self, key: &str, known: &[u32]) -> Result<u32, ConfigError> {
        let bits = self.values[key].as_u64();
        let bits = bits.and_then(|bits| known.iter().copied().find(|known| u64::from(*known) == bits));
        bits.ok_or_else(|| self.unsupported(key, "a checkpoint quantized this way"))
    }

    fn blocks(&self, key: &str) -> Result<Float8Scales, ConfigError> {
        let sizes = self.values[key].as_array().map(|sizes| sizes.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
        match sizes.as_deref() {
            Some([rows @ 1..=0x10000, cols @ 1..=0x10000]) => {
                Ok(Float8Scales::Blocks([*rows as usize, *cols as usize]))
            }
            _ => Err(self.unsupported(key, "blocks that are no pair of sizes")),
        }
    }

    fn expect(&self, key: &str, wanted: &[Value]) -> Result<(), ConfigError> {
        match wanted.contains(&self.values[key]) {
            true => Ok(()),
            false => Err(self.unsupported(key, "a checkpoint quantized this way")),
        }
    }

    /// The group size; -1 and a missing value stand for all inputs.
    fn group(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        match self.values[key].as_i64() {
            None if self.values[key].is_null() => Ok(None),
            Some(-1) => Ok(None),
            Some(group @ 32..=0x10000) if group % 32 == 0 => Ok(Some(group as usize)),
            _ => Err(self.unsupported(key, "a group that is no multiple of 32")),
        }
    }

    /// Fails if there are more rules at `key` than are searched for each matrix.
    fn check_rules(&self, key: &str, rules: usize) -> Result<(), ConfigError> {
        match rules {
            0..=MAX_RULES => Ok(()),
            _ => {
                let (key, found) = (format!("{}.{key}", self.path), format!("{rules} names of groups and patterns"));
                Err(ConfigError::Invalid { key, found, expected: format!("at most {MAX_RULES}") })
            }
        }
    }

    fn unsupported(&self, key: &str, feature: &'static str) -> ConfigError {
        let (key, value) = (format!("{}.{key}", self.path), self.values[key].to_string());
        Unsupported::Feature { key, value, feature }.into()
    }
}

/// The rule for modules whose names match the pattern at `key`; `compile` says where in the name it matches.
fn rule_of_pattern(
    key: &str,
    pattern: &str,
    compile: fn(&str) -> Option<Pattern>,
    scheme: Option<Scheme>,
) -> Result<Rule, ConfigError> {
    match compile(pattern) {
        Some(pattern) => Ok(Rule { modules: Modules::Like(pattern), scheme }),
        None => {
            let feature = "what is no regular expression, too large a one, or one that looks around";
            let (key, value) = (key.to_owned(), format!("{pattern:?}"));
            Err(Unsupported::Feature { key, value, feature }.into())
        }
    }
}
