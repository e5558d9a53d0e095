//! `spec.engine`: image, number formats, limits, other flags.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use windlass_engine_contract::flags::{self, ManagedFlag};

/// How the engine runs the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Engine {
    /// Image of the engine. Absent: the operator's default at the time of the last change of this spec; an operator
    /// upgrade alone does not change it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512), regex(pattern = r"^[^\s]+$"))]
    pub image: Option<String>,
    /// Format of the weights. Auto: as the file has them, or where that fits nowhere, floats as INT8 or INT4; what was
    /// chosen is in `status.choices` and stays until the spec changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<Quantization>,
    /// Format of the KV cache. Auto: the engine's choice for the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_data_type: Option<KvCacheDataType>,
    /// Longest sequence, prompt and answer together, tokens. Absent: what the
    /// KV cache holds, at most what the model was trained for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 16_777_216))]
    pub max_model_tokens: Option<i32>,
    /// Most sequences computed at once. Absent: the engine's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536))]
    pub max_sequences: Option<i32>,
    /// Further flags of `windlass-engine serve`. Flags that a field of this resource sets are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)), extend(
        "x-kubernetes-list-type" = "atomic",
        "x-kubernetes-validations" = managed_flag_rules()
    ))]
    pub extra_args: Vec<String>,
}

/// A rule for each managed flag, so that the refusal can name the field that owns it.
fn managed_flag_rules() -> Value {
    let rule = |managed: &ManagedFlag| {
        let flag = managed.flag;
        json!({
            "rule": format!("self.all(argument, argument != '{flag}' && !argument.startsWith('{flag}='))"),
            "message": format!("spec.engine.extraArgs: {}", managed.refusal()),
        })
    };
    flags::MANAGED.iter().map(rule).collect()
}

/// Format of the weights. INT8, FP8 and INT4 convert floats as they are loaded, and FP8 takes those of a file as they are;
/// every other name is that of the file's own format and refuses a file of another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Quantization {
    /// As the file has them, or as fits.
    #[default]
    Auto,
    /// Floats become 8 bits in groups of 32 as they are loaded.
    #[serde(rename = "INT8")]
    Int8,
    /// Floats become floats of 8 bits (e4m3) with a scale for each output as they are loaded, the embedding and the head
    /// integers of 8 bits. GPUs that multiply such floats (Ada and later) round activations alike.
    FP8,
    /// Floats become 4 bits in groups of 32 as they are loaded, the embedding and the head 8 bits.
    #[serde(rename = "INT4")]
    Int4,
    /// 2 bits, super-blocks of 256.
    #[serde(rename = "Q2_K")]
    Q2K,
    /// 3 bits, super-blocks of 256.
    #[serde(rename = "Q3_K")]
    Q3K,
    /// 4 bits, blocks of 32 with a scale.
    #[serde(rename = "Q4_0")]
    Q4_0,
    /// 4 bits, blocks of 32 with scale and minimum.
    #[serde(rename = "Q4_1")]
    Q4_1,
    /// 4 bits, super-blocks of 256.
    #[serde(rename = "Q4_K")]
    Q4K,
    /// 5 bits, blocks of 32 with a scale.
    #[serde(rename = "Q5_0")]
    Q5_0,
    /// 5 bits, blocks of 32 with scale and minimum.
    #[serde(rename = "Q5_1")]
    Q5_1,
    /// 5 bits, super-blocks of 256.
    #[serde(rename = "Q5_K")]
    Q5K,
    /// 6 bits, super-blocks of 256.
    #[serde(rename = "Q6_K")]
    Q6K,
    /// 8 bits, blocks of 32 with a scale.
    #[serde(rename = "Q8_0")]
    Q8_0,
    /// 4 bits of a table, blocks of 32.
    #[serde(rename = "IQ4_NL")]
    IQ4NL,
    /// 4 bits of a table, super-blocks of 256.
    #[serde(rename = "IQ4_XS")]
    IQ4XS,
    /// Floats of 4 bits, blocks of 32 with an exponent.
    MXFP4,
    /// Half float.
    F16,
    /// Brain float.
    BF16,
    /// Single float.
    F32,
}

impl Quantization {
    /// As `--quantization` spells it; `None` for Auto.
    pub fn flag(self) -> Option<&'static str> {
        FLAGS.into_iter().find(|(quantization, _)| *quantization == self).map(|(_, flag)| flag)
    }

    /// What an engine that was told so says it built; `None` for Auto.
    pub fn built(self) -> Option<&'static str> {
        match self {
            Quantization::Int8 | Quantization::FP8 => Some("q8_0"),
            Quantization::Int4 => Some("q4_1"),
            as_stored => as_stored.flag(),
        }
    }

    /// The one that `--quantization` spells so.
    pub fn of_flag(flag: &str) -> Option<Quantization> {
        FLAGS.into_iter().find(|(_, spelled)| *spelled == flag).map(|(quantization, _)| quantization)
    }
}

/// Every format but Auto, and how `--quantization` spells it.
const FLAGS: [(Quantization, &str); 19] = [
    (Quantization::Int8, "int8"),
    (Quantization::FP8, "fp8"),
    (Quantization::Int4, "int4"),
    (Quantization::Q2K, "q2_k"),
    (Quantization::Q3K, "q3_k"),
    (Quantization::Q4_0, "q4_0"),
    (Quantization::Q4_1, "q4_1"),
    (Quantization::Q4K, "q4_k"),
    (Quantization::Q5_0, "q5_0"),
    (Quantization::Q5_1, "q5_1"),
    (Quantization::Q5K, "q5_k"),
    (Quantization::Q6K, "q6_k"),
    (Quantization::Q8_0, "q8_0"),
    (Quantization::IQ4NL, "iq4_nl"),
    (Quantization::IQ4XS, "iq4_xs"),
    (Quantization::MXFP4, "mxfp4"),
    (Quantization::F16, "f16"),
    (Quantization::BF16, "bf16"),
    (Quantization::F32, "f32"),
];

/// Format of the KV cache. Auto: the engine's choice for the device. The forms of one byte hold nearly twice the tokens in the
/// same memory, INT4 nearly four times, each less exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KvCacheDataType {
    /// The engine's choice for the device.
    #[default]
    Auto,
    /// Brain float.
    BF16,
    /// Half float.
    F16,
    /// Floats of a byte (e4m3), with a float for each token and head.
    FP8,
    /// Bytes, with a float for each token and head.
    #[serde(rename = "INT8")]
    Int8,
    /// Half bytes, with a float for each token and head.
    #[serde(rename = "INT4")]
    Int4,
}

impl KvCacheDataType {
    /// As `--kv-cache-dtype` and `/stats` spell it; `None` for Auto.
    pub fn flag(self) -> Option<&'static str> {
        match self {
            KvCacheDataType::Auto => None,
            KvCacheDataType::BF16 => Some("bf16"),
            KvCacheDataType::F16 => Some("f16"),
            KvCacheDataType::FP8 => Some("fp8"),
            KvCacheDataType::Int8 => Some("int8"),
            KvCacheDataType::Int4 => Some("int4"),
        }
    }
}
