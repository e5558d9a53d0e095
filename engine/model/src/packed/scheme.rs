//! `quantization_config`: how a checkpoint's matrices were quantized, and what their parts are called.

use serde_json::{Value, json};
use windlass_checkpoint::HubFolder;

use crate::config::{ConfigError, Unsupported};

/// Where it is.
const KEY: &str = "config.json: quantization_config";

/// How a checkpoint's matrices were quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    pub layout: Layout,
    /// Inputs that share a scale; absent for all of them.
    pub group: Option<usize>,
    /// What the matrices multiply was meant to be rounded to 8 bits, too (W8A8).
    pub rounds_inputs: bool,
}

/// How values lie in a matrix's tensors. Bits are those of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Words of inputs, `[inputs · bits / 32, outputs]`.
    Gptq { bits: u32, zeros: GptqZeros },
    /// Words of eight outputs, `[inputs, outputs / 8]`.
    Awq,
    /// Words of inputs, `[outputs, inputs · bits / 32]`.
    Packed { bits: u32, symmetric: bool },
    /// Bytes, `[outputs, inputs]`.
    Bytes { symmetric: bool },
    /// Eight-bit floats (e4m3), `[outputs, inputs]`.
    Float8 { scales: Float8Scales, inverse: bool },
    /// Nibbles that name entries of a table, the first in the high half; scales in blocks of the whole matrix
    /// (Dettmers et al. 2023).
    Bnb4,
    /// Bytes with a largest magnitude for each output (Dettmers et al. 2022).
    Bnb8,
}

/// Where GPTQ's zero points are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GptqZeros {
    /// In the middle of the codes, whatever is stored: not all tools agree on that (`sym`).
    Middle,
    /// As they are stored, in the second version.
    Stored,
    /// One above what is stored, in the first.
    StoredLessOne,
}

/// What shares a scale of eight-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float8Scales {
    Matrix,
    Outputs,
    /// So many outputs by so many inputs.
    Blocks([usize; 2]),
}

impl Scheme {
    /// Of weights alone.
    const fn of_weights(layout: Layout, group: Option<usize>) -> Scheme {
        Scheme { layout, group, rounds_inputs: false }
    }

    /// Reads `quantization_config`; `None` where the checkpoint has none.
    pub fn read(folder: &HubFolder) -> Result<Option<Scheme>, ConfigError> {
        let config = Config(&folder.config()["quantization_config"]);
        match &config.0["quant_method"] {
            Value::Null if config.0.is_null() => Ok(None),
            Value::String(method) => config.scheme(method).map(Some),
            _ => Err(config.unsupported("quant_method", "a checkpoint quantized this way")),
        }
    }

    /// What the checkpoint calls the codes of the matrix `name`.
    pub fn codes_name(self, name: &str) -> String {
        match self.layout {
            Layout::Gptq { .. } | Layout::Awq => replace(name, "qweight"),
            Layout::Packed { .. } => replace(name, "weight_packed"),
            _ => name.to_owned(),
        }
    }

    /// Names of the other tensors of the matrix `name`, which may be there.
    pub fn other_names(self, name: &str) -> Vec<String> {
        let parts: &[&str] = match self.layout {
            Layout::Gptq { .. } => &["qzeros", "scales", "g_idx"],
            Layout::Awq => &["qzeros", "scales"],
            Layout::Packed { .. } => &["weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"],
            // Activations are rounded as they come: scales that were measured for them beforehand are not needed.
            Layout::Bytes { .. } => &["weight_scale", "weight_zero_point", "input_scale", "input_zero_point"],
            Layout::Float8 { .. } => &["weight_scale", "weight_scale_inv", "input_scale", "activation_scale"],
            Layout::Bnb4 => &[
                "weight.absmax",
                "weight.quant_map",
                "weight.nested_absmax",
                "weight.nested_quant_map",
                "weight.quant_state.bitsandbytes__nf4",
                "weight.quant_state.bitsandbytes__fp4",
            ],
            Layout::Bnb8 => &["SCB", "weight_format"],
        };
        parts.iter().map(|part| replace(name, part)).collect()
    }
}

/// `…q_proj.weight` to `…q_proj.PART`.
pub(super) fn replace(name: &str, part: &str) -> String {
    format!("{}{part}", name.strip_suffix("weight").unwrap_or(name))
}

/// `quantization_config`, or an object in it.
struct Config<'a>(&'a Value);

impl Config<'_> {
    fn scheme(&self, method: &str) -> Result<Scheme, ConfigError> {
        let all = |layout| Ok(Scheme::of_weights(layout, None));
        let float8 = |scales, inverse| {
            let rounds_inputs = method == "fbgemm_fp8" || self.0["activation_scheme"].is_string();
            Ok(Scheme { rounds_inputs, ..Scheme::of_weights(Layout::Float8 { scales, inverse }, None) })
        };
        match method {
            "gptq" => self.gptq(),
            "awq" => self.awq(),
            "auto-round" => self.auto_round(),
            "compressed-tensors" => self.compressed_tensors(),
            "fp8" if self.0["weight_block_size"].is_null() => float8(Float8Scales::Matrix, false),
            "fp8" => float8(self.blocks("weight_block_size")?, true),
            "fbgemm_fp8" => float8(Float8Scales::Outputs, false),
            "bitsandbytes" if self.0["load_in_8bit"] == true => all(Layout::Bnb8),
            "bitsandbytes" if self.0["load_in_4bit"] == true => {
                self.expect("bnb_4bit_quant_storage", &["uint8".into(), Value::Null])?;
                all(Layout::Bnb4)
            }
            _ => Err(self.unsupported("quant_method", "a checkpoint quantized this way")),
        }
    }

    fn gptq(&self) -> Result<Scheme, ConfigError> {
        let bits = self.bits("bits", &[2, 3, 4, 8])?;
        let zeros = match (self.0["sym"] == true, self.0["checkpoint_format"] == "gptq_v2") {
            (true, _) => GptqZeros::Middle,
            (false, true) => GptqZeros::Stored,
            (false, false) => GptqZeros::StoredLessOne,
        };
        let group = self.group("group_size")?;
        let common = [
            ("bits", bits.into()),
            ("group_size", group.map_or(json!(-1), Value::from)),
            ("sym", (zeros == GptqZeros::Middle).into()),
            ("desc_act", (self.0["desc_act"] == true).into()),
        ];
        let quantized = self.overrides("dynamic")?.filter(|(pattern, _)| !pattern.starts_with("-:"));
        self.refuse_overrides("dynamic", quantized, &common)?;
        Ok(Scheme::of_weights(Layout::Gptq { bits, zeros }, group))
    }

    /// What an object has of single matrices, by their names or patterns of them. Those that were left as they were, which are
    /// behind `-:` in GPTQModel's `dynamic` and have 16 bits in auto-round's `extra_config`, their tensors tell.
    fn overrides(&self, key: &str) -> Result<impl Iterator<Item = (&String, &Value)>, ConfigError> {
        match &self.0[key] {
            Value::Null => Ok(None.into_iter().flatten()),
            Value::Object(overrides) => Ok(Some(overrides).into_iter().flatten()),
            _ => Err(self.unsupported(key, "what is no object of patterns")),
        }
    }

    /// Refuses matrices that are laid out otherwise than by the `common` values.
    fn refuse_overrides<'o>(
        &self,
        key: &str,
        overrides: impl Iterator<Item = (&'o String, &'o Value)>,
        common: &[(&str, Value)],
    ) -> Result<(), ConfigError> {
        for (pattern, own) in overrides {
            let differs = |(key, common): &&(&str, Value)| !own[*key].is_null() && own[*key] != *common;
            if let Some((of, common)) = common.iter().find(differs) {
                let (value, key) = (own[*of].to_string(), format!("{KEY}.{key}[{pattern}].{of}"));
                return Err(Unsupported::Override { key, value, common: common.to_string() }.into());
            }
        }
        Ok(())
    }

    fn awq(&self) -> Result<Scheme, ConfigError> {
        self.bits("bits", &[4])?;
        self.expect("version", &["gemm".into(), "GEMM".into(), Value::Null])?;
        Ok(Scheme::of_weights(Layout::Awq, self.group("group_size")?))
    }

    /// That of auto-round, which packs integers as one of the others does.
    fn auto_round(&self) -> Result<Scheme, ConfigError> {
        self.expect("data_type", &["int".into()])?;
        let scheme = match self.0["packing_format"].as_str() {
            Some("auto_round:auto_gptq") => self.gptq()?,
            Some("auto_round:auto_awq") => self.awq()?,
            _ => return Err(self.unsupported("packing_format", "this layout")),
        };
        let common = ["bits", "group_size", "sym", "data_type"].map(|key| (key, self.0[key].clone()));
        let quantized = self.overrides("extra_config")?.filter(|(_, own)| !(own["bits"] == 16 || own["bits"] == 32));
        self.refuse_overrides("extra_config", quantized, &common)?;
        Ok(scheme)
    }

    fn compressed_tensors(&self) -> Result<Scheme, ConfigError> {
        let groups = self.0["config_groups"].as_object();
        let Some(group) = groups.filter(|groups| groups.len() == 1).and_then(|groups| groups.values().next()) else {
            return Err(self.unsupported("config_groups", "more than one way to quantize"));
        };
        let weights = Config(&group["weights"]);
        let rounds_inputs = group["input_activations"]["num_bits"] == 8;
        let symmetric = weights.0["symmetric"] != false;
        match self.0["format"].as_str() {
            Some("pack-quantized") => {
                weights.expect("type", &["int".into()])?;
                let layout = Layout::Packed { bits: weights.bits("num_bits", &[4, 8])?, symmetric };
                Ok(Scheme::of_weights(layout, weights.group("group_size")?))
            }
            Some("int-quantized") => {
                weights.expect("type", &["int".into()])?;
                weights.bits("num_bits", &[8])?;
                weights.expect("strategy", &["channel".into(), "group".into()])?;
                let scheme = Scheme::of_weights(Layout::Bytes { symmetric }, weights.group("group_size")?);
                Ok(Scheme { rounds_inputs, ..scheme })
            }
            Some("float-quantized" | "naive-quantized") => {
                weights.expect("type", &["float".into()])?;
                weights.bits("num_bits", &[8])?;
                let scales = weights.float8_scales()?;
                let scheme = Scheme::of_weights(Layout::Float8 { scales, inverse: false }, None);
                Ok(Scheme { rounds_inputs, ..scheme })
            }
            _ => Err(self.unsupported("format", "this layout")),
        }
    }

    fn float8_scales(&self) -> Result<Float8Scales, ConfigError> {
        match self.0["strategy"].as_str() {
            Some("tensor") => Ok(Float8Scales::Matrix),
            Some("channel") => Ok(Float8Scales::Outputs),
            Some("block") => self.blocks("block_structure"),
            _ => Err(self.unsupported("strategy", "a checkpoint quantized this way")),
        }
    }

    fn bits(&self, key: &str, known: &[u32]) -> Result<u32, ConfigError> {
        let bits = self.0[key].as_u64().and_then(|bits| known.iter().copied().find(|known| u64::from(*known) == bits));
        bits.ok_or_else(|| self.unsupported(key, "a checkpoint quantized this way"))
    }

    fn blocks(&self, key: &str) -> Result<Float8Scales, ConfigError> {
        let sizes = self.0[key].as_array().map(|sizes| sizes.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
        match sizes.as_deref() {
            Some([rows @ 1..=0x10000, cols @ 1..=0x10000]) => {
                Ok(Float8Scales::Blocks([*rows as usize, *cols as usize]))
            }
            _ => Err(self.unsupported(key, "blocks that are no pair of sizes")),
        }
    }

    fn expect(&self, key: &str, wanted: &[Value]) -> Result<(), ConfigError> {
        match wanted.contains(&self.0[key]) {
            true => Ok(()),
            false => Err(self.unsupported(key, "a checkpoint quantized this way")),
        }
    }

    /// -1 and nothing stand for all inputs.
    fn group(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        match self.0[key].as_i64() {
            None if self.0[key].is_null() => Ok(None),
            Some(-1) => Ok(None),
            Some(group @ 32..=0x10000) if group % 32 == 0 => Ok(Some(group as usize)),
            _ => Err(self.unsupported(key, "a group that is no multiple of 32")),
        }
    }

    fn unsupported(&self, key: &str, feature: &'static str) -> ConfigError {
        let (key, value) = (format!("{KEY}.{key}"), self.0[key].to_string());
        Unsupported::Feature { key, value, feature }.into()
    }
}
