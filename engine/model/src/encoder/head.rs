//! The head of an encoder: makes a vector or a score of the vectors of tokens.

use super::pooling::{Pooling, normalized};
use super::trunk::Trunk;
use super::{EncoderError, misfit};
use candle_core::{Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use serde_json::Value;

/// The head.
pub(super) enum Head {
    /// A vector.
    Vector { pooling: Pooling, normalize: bool },
    /// A score from 0 to 1.
    Score { dense: Linear, out: Linear },
}

impl Head {
    /// The head of a model that was trained to score; its names depend on the family.
    pub(super) fn score(
        trunk: &Trunk,
        config: &Value,
        weights: &VarBuilder<'_>,
    ) -> std::result::Result<Head, EncoderError> {
        let labels = config["id2label"].as_object().map(serde_json::Map::len);
        let labels = labels.or(config["num_labels"].as_u64().map(|labels| labels as usize)).unwrap_or(2);
        if labels != 1 {
            return Err(EncoderError::Classes(labels));
        }
        let known = [("bert.pooler.dense", "classifier"), ("classifier.dense", "classifier.out_proj")];
        let has = |name: &str| weights.contains_tensor(&format!("{name}.weight"));
        let found = known.iter().find(|(dense, out)| has(dense) && has(out));
        let missing = || EncoderError::Tensors("it has no head that scores".to_owned());
        let (dense, out) = found.ok_or_else(missing)?;
        let width = trunk.width();
        Ok(Head::Score {
            dense: linear(width, width, weights.pp(dense)).map_err(misfit)?,
            out: linear(width, 1, weights.pp(out)).map_err(misfit)?,
        })
    }

    /// `[texts, width]`, or `[texts, 1]` of scores.
    pub(super) fn forward(&self, states: &Tensor, mask: &Tensor) -> Result<Tensor> {
        match self {
            Head::Vector { pooling, normalize: true } => normalized(&pooling.pool(states, mask)?),
            Head::Vector { pooling, normalize: false } => pooling.pool(states, mask),
            Head::Score { dense, out } => {
                let first = Pooling::First.pool(states, mask)?.contiguous()?;
                candle_nn::ops::sigmoid(&out.forward(&dense.forward(&first)?.tanh()?)?)
            }
        }
    }
}
