//! The families of encoders: a configuration and candle's model of it.

use super::batch::Padded;
use super::{EncoderError, misfit};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{bert, xlm_roberta};
use serde::de::DeserializeOwned;
use serde_json::Value;
use windlass_checkpoint::HubFolder;

/// Largest size in a configuration: four times the largest vocabulary in use.
const MAX_SIZE: u64 = 1 << 20;

/// The layers of an encoder.
pub(super) struct Trunk {
    model: Model,
    sizes: Sizes,
}

enum Model {
    Bert(bert::BertModel),
    Roberta(xlm_roberta::XLMRobertaModel),
}

#[derive(Clone, Copy)]
struct Sizes {
    width: usize,
    heads: usize,
    vocabulary: usize,
    max_tokens: usize,
    padding: u32,
}

impl Trunk {
    pub(super) const NAMES: [&str; 3] = ["Bert", "Roberta", "XLMRoberta"];

    pub(super) fn load(
        name: &str,
        folder: &HubFolder,
        weights: &VarBuilder<'_>,
    ) -> std::result::Result<Trunk, EncoderError> {
        let config = folder.config();
        check_sizes(config)?;
        let family = match name {
            name if name.starts_with("Bert") => "bert",
            name if name.starts_with("XLMRoberta") || name.starts_with("Roberta") => "roberta",
            other => return Err(EncoderError::Unsupported(other.to_owned())),
        };
        // Heads put their trunk under its name.
        let prefixed = folder.tensors().any(|tensor| tensor.name.starts_with(&format!("{family}.")));
        let weights = if prefixed { weights.pp(family) } else { weights.clone() };
        match family {
            "bert" => bert_trunk(config, weights),
            _ => roberta_trunk(config, weights),
        }
    }

    /// Numbers of each token's vector.
    pub(super) fn width(&self) -> usize {
        self.sizes.width
    }

    /// Parts of each layer's attention.
    pub(super) fn heads(&self) -> usize {
        self.sizes.heads
    }

    pub(super) fn vocabulary(&self) -> usize {
        self.sizes.vocabulary
    }

    /// Longest text, tokens.
    pub(super) fn max_tokens(&self) -> usize {
        self.sizes.max_tokens
    }

    /// The token that stands where there is none.
    pub(super) fn padding(&self) -> u32 {
        self.sizes.padding
    }

    /// A vector for each token, `[texts, longest, width]`.
    pub(super) fn forward(&self, batch: &Padded) -> Result<Tensor> {
        match &self.model {
            Model::Bert(model) => model.forward(&batch.tokens, &batch.types, Some(&batch.mask)),
            Model::Roberta(model) => {
                let mask = batch.mask.to_dtype(DType::F32)?;
                model.forward(&batch.tokens, &mask, &batch.types.zeros_like()?, None, None, None)
            }
        }
    }
}

fn bert_trunk(config: &Value, weights: VarBuilder<'_>) -> std::result::Result<Trunk, EncoderError> {
    let config: bert::Config = parse(config)?;
    let sizes = Sizes {
        width: config.hidden_size,
        heads: config.num_attention_heads,
        vocabulary: config.vocab_size,
        max_tokens: config.max_position_embeddings,
        padding: config.pad_token_id as u32,
    };
    Ok(Trunk { model: Model::Bert(bert::BertModel::load(weights, &config).map_err(misfit)?), sizes })
}

fn roberta_trunk(config: &Value, weights: VarBuilder<'_>) -> std::result::Result<Trunk, EncoderError> {
    let config: xlm_roberta::Config = parse(config)?;
    let sizes = Sizes {
        width: config.hidden_size,
        heads: config.num_attention_heads,
        vocabulary: config.vocab_size,
        // Positions are counted from the one after the padding's.
        max_tokens: config.max_position_embeddings.saturating_sub(config.pad_token_id as usize + 1),
        padding: config.pad_token_id,
    };
    Ok(Trunk { model: Model::Roberta(xlm_roberta::XLMRobertaModel::new(&config, weights).map_err(misfit)?), sizes })
}

/// What is absurd is refused before anything is computed with it.
fn check_sizes(config: &Value) -> std::result::Result<(), EncoderError> {
    let numbers = config.as_object().into_iter().flatten().filter_map(|(name, value)| Some((name, value.as_u64()?)));
    let sizes = numbers.filter(|(name, _)| name.ends_with("_size") || name.contains("num_") || name.contains("max_"));
    match sizes.clone().find(|(name, size)| *size > MAX_SIZE || (*size == 0 && name.contains("hidden"))) {
        Some((name, size)) => Err(EncoderError::Config(format!("{name} is {size}"))),
        None => {
            let size = |name: &str| config[name].as_u64();
            match (size("hidden_size"), size("num_attention_heads")) {
                (Some(width), Some(heads)) if heads == 0 || width % heads != 0 => {
                    Err(EncoderError::Config(format!("hidden_size {width} is not shared evenly by {heads} heads")))
                }
                _ => Ok(()),
            }
        }
    }
}

fn parse<T: DeserializeOwned>(config: &Value) -> std::result::Result<T, EncoderError> {
    let mut config = config.clone();
    // Newer files leave out what was never anything else.
    if config["position_embedding_type"].is_null() {
        config["position_embedding_type"] = "absolute".into();
    }
    serde_json::from_value(config).map_err(|error| EncoderError::Config(error.to_string()))
}
