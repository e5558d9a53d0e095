//! Pooling: makes one vector of the vectors of tokens, as the files of `sentence-transformers` beside the model say.

use super::EncoderError;
use candle_core::{D, DType, Result, Tensor};
use serde_json::Value;
use windlass_checkpoint::HubFolder;

/// How the vectors of tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pooling {
    /// Their mean.
    Mean,
    /// The first one.
    First,
    /// The maximum of each component.
    Max,
}

impl Pooling {
    /// The pooling that the folder names, else the mean.
    pub(super) fn read(folder: &HubFolder) -> std::result::Result<Pooling, EncoderError> {
        let Some(config) = folder.json("1_Pooling/config.json")? else { return Ok(Pooling::Mean) };
        let modes = config.as_object().into_iter().flatten();
        let on = |(name, value): (&String, &Value)| (*value == true).then(|| name.clone());
        let on: Vec<String> = modes.filter_map(on).filter(|name| name.starts_with("pooling_mode_")).collect();
        match on.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
            ["pooling_mode_mean_tokens"] => Ok(Pooling::Mean),
            ["pooling_mode_cls_token"] => Ok(Pooling::First),
            ["pooling_mode_max_tokens"] => Ok(Pooling::Max),
            other => Err(EncoderError::Pooling(other.join(" and "))),
        }
    }

    /// `states` is `[texts, tokens, width]`, `mask` is 1 for tokens and 0 for padding; returns `[texts, width]`.
    pub(super) fn pool(self, states: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let mask = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
        match self {
            Pooling::First => states.narrow(1, 0, 1)?.squeeze(1),
            Pooling::Mean => states.broadcast_mul(&mask)?.sum(1)?.broadcast_div(&mask.sum(1)?),
            Pooling::Max => states.broadcast_add(&mask.affine(1e9, -1e9)?)?.max(1),
        }
    }
}

/// Whether vectors are normalized to length 1. They are if the folder does not say, as in vLLM.
pub(super) fn normalizes(folder: &HubFolder) -> std::result::Result<bool, EncoderError> {
    let Some(modules) = folder.json("modules.json")? else { return Ok(true) };
    let kinds = modules.as_array().into_iter().flatten().filter_map(|module| module["type"].as_str());
    Ok(kinds.into_iter().any(|kind| kind.ends_with("Normalize")))
}

/// Normalizes vectors to length 1.
pub(super) fn normalized(vectors: &Tensor) -> Result<Tensor> {
    let length = vectors.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?;
    vectors.broadcast_div(&length.maximum(1e-12)?)
}
