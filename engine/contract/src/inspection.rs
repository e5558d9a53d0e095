//! What `windlass-engine inspect --summary` says of a model, read from its header alone: on standard output, and as the
//! termination message of the Job by which the operator learns what a model takes before it is scheduled.

use serde::{Deserialize, Serialize};

use crate::shape::ModelShape;

/// A model's summary, within [`MAX_TERMINATION_BYTES`](crate::termination::MAX_TERMINATION_BYTES) of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    /// Dimensions and bytes.
    pub shape: ModelShape,
    /// Bytes of bf16 KV cache that a token takes.
    pub kv_bytes_per_token: u64,
    /// Weight type that holds most bytes, as `--quantization` spells it.
    pub weight_type: String,
    /// Bytes of all weights with `--quantization int8`. Absent: there are no floats that could be converted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub int8_bytes: Option<u64>,
    /// The same with `--quantization fp8`: on a CPU; a GPU takes a sixteenth less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8_bytes: Option<u64>,
    /// The same with `--quantization int4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub int4_bytes: Option<u64>,
    /// The same of the weights as they are stored, on a GPU, where some types take more than on a CPU. Absent: nobody said, and
    /// it is taken to be the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_bytes: Option<u64>,
    /// Which version of the source was read: a server's entity tag. Absent: the source tells none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

impl Inspection {
    /// Reads what a Job left behind; `None` where it is no summary.
    pub fn parse(text: &str) -> Option<Inspection> {
        serde_json::from_str(text.trim()).ok()
    }
}
