//! `spec.engine`: image, number formats, limits, other flags.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    /// Longest sequence, prompt and answer together, tokens. Absent: what the model was trained for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 16_777_216))]
    pub max_model_tokens: Option<i32>,
    /// Most sequences computed at once. Absent: the engine's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536))]
    pub max_sequences: Option<i32>,
    /// Further flags of `windlass-engine serve`. Flags that a field of this resource sets are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)), extend("x-kubernetes-list-type" = "atomic"))]
    pub extra_args: Vec<String>,
}

/// Format of the weights. INT8 and INT4 convert floats as they are loaded; every other name is that of the file's own
/// format and refuses a file of another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Quantization {
    /// As the file has them, or as fits.
    #[default]
    Auto,
    /// Floats become 8 bits in groups of 32 as they are loaded.
    #[serde(rename = "INT8")]
    Int8,
    /// Floats become 4 bits in groups of 32 as they are loaded, the embedding and the head 8 bits.
    #[serde(rename = "INT4")]
    Int4,
    /// 4 bits, blocks of 32 with a scale.
    #[serde(rename = "Q4_0")]
    Q4_0,
    /// 4 bits, blocks of 32 with scale and minimum.
    #[serde(rename = "Q4_1")]
    Q4_1,
    /// 4 bits, super-blocks of 256.
    #[serde(rename = "Q4_K")]
    Q4K,
    /// 6 bits, super-blocks of 256.
    #[serde(rename = "Q6_K")]
    Q6K,
    /// 8 bits, blocks of 32 with a scale.
    #[serde(rename = "Q8_0")]
    Q8_0,
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
        match self {
            Quantization::Auto => None,
            Quantization::Int8 => Some("int8"),
            Quantization::Int4 => Some("int4"),
            Quantization::Q4_0 => Some("q4_0"),
            Quantization::Q4_1 => Some("q4_1"),
            Quantization::Q4K => Some("q4_k"),
            Quantization::Q6K => Some("q6_k"),
            Quantization::Q8_0 => Some("q8_0"),
            Quantization::F16 => Some("f16"),
            Quantization::BF16 => Some("bf16"),
            Quantization::F32 => Some("f32"),
        }
    }

    /// What an engine that was told so says it built; `None` for Auto.
    pub fn built(self) -> Option<&'static str> {
        match self {
            Quantization::Int8 => Some("q8_0"),
            Quantization::Int4 => Some("q4_1"),
            as_stored => as_stored.flag(),
        }
    }

    /// The one that `--quantization` spells so.
    pub fn of_flag(flag: &str) -> Option<Quantization> {
        Self::ALL.into_iter().find(|quantization| quantization.flag() == Some(flag))
    }

    const ALL: [Quantization; 11] = [
        Quantization::Auto,
        Quantization::Int8,
        Quantization::Int4,
        Quantization::Q4_0,
        Quantization::Q4_1,
        Quantization::Q4K,
        Quantization::Q6K,
        Quantization::Q8_0,
        Quantization::F16,
        Quantization::BF16,
        Quantization::F32,
    ];
}

/// Format of the KV cache. Auto: the engine's choice for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KvCacheDataType {
    /// The engine's choice for the device.
    #[default]
    Auto,
    /// Brain float.
    BF16,
    /// Bytes, with a float for each token and head: nearly twice the tokens in the same memory.
    #[serde(rename = "INT8")]
    Int8,
}

impl KvCacheDataType {
    /// As `--kv-cache-dtype` and `/stats` spell it; `None` for Auto.
    pub fn flag(self) -> Option<&'static str> {
        match self {
            KvCacheDataType::Auto => None,
            KvCacheDataType::BF16 => Some("bf16"),
            KvCacheDataType::Int8 => Some("int8"),
        }
    }
}
