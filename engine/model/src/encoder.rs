//! Encoders: a text to a vector, or two texts to a score, by candle-transformers' models in f32 on the CPU.
//!
//! The decoder has kernels of its own; encoders are small and run whole batches, for which candle's matrix products do.

mod batch;
mod head;
mod pooling;
mod trunk;

use crate::encoder::batch::Padded;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use head::Head;
use pooling::Pooling;
use std::collections::HashMap;
use trunk::Trunk;
use windlass_checkpoint::{HubError, HubFolder};

pub use batch::EncoderInput;

/// A loaded encoder.
pub struct Encoder {
    trunk: Trunk,
    head: Head,
    shape: EncoderShape,
}

/// What an encoder takes and gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderShape {
    /// What its results are.
    pub purpose: Purpose,
    /// Longest text, tokens with the special ones.
    pub max_tokens: u32,
    /// Token ids are below it.
    pub vocabulary: u32,
    /// Bytes of its weights in memory.
    pub weight_bytes: u64,
}

/// What an encoder's results are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A vector of so many numbers for each text.
    Vectors {
        /// How many numbers.
        dimensions: u32,
    },
    /// How well a text answers another.
    Scores,
}

/// A folder that is no encoder of this engine's, or one that cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum EncoderError {
    /// Another architecture.
    #[error("the encoder {0:?} is not known; this engine runs those of Bert, Roberta and XLMRoberta")]
    Unsupported(String),
    /// It gives more than a score.
    #[error("it sorts texts into {0} classes; only scores, of one class, are served")]
    Classes(usize),
    /// Another way to make a vector of a text's vectors.
    #[error("its pooling is not known: {0}; this engine takes the mean, the first token or the maximum")]
    Pooling(String),
    /// The configuration makes no sense.
    #[error("config.json: {0}")]
    Config(String),
    /// A file cannot be read.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// A tensor is missing, of another shape or type.
    #[error("its tensors do not fit its configuration: {0}")]
    Tensors(String),
    /// Computing failed.
    #[error("computing failed: {0}")]
    Compute(String),
}

impl Encoder {
    /// Whether a folder's configuration names an encoder rather than a model that generates.
    pub fn is_in(folder: &HubFolder) -> bool {
        let name = architecture(folder);
        ["Model", "ForSequenceClassification", "ForMaskedLM"].iter().any(|end| name.ends_with(end))
            && Trunk::NAMES.iter().any(|begin| name.starts_with(begin))
    }

    /// Loads a folder's weights as f32.
    pub fn load(folder: &HubFolder) -> Result<Encoder, EncoderError> {
        let name = architecture(folder);
        let weights = tensors(folder)?;
        let weight_bytes = weights.values().map(|tensor| (tensor.elem_count() * 4) as u64).sum();
        let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
        let trunk = Trunk::load(&name, folder, &weights)?;
        let head = match name.ends_with("ForSequenceClassification") {
            true => Head::score(&trunk, folder.config(), &weights)?,
            false => Head::Vector { pooling: Pooling::read(folder)?, normalize: pooling::normalizes(folder)? },
        };
        let purpose = match head {
            Head::Vector { .. } => Purpose::Vectors { dimensions: trunk.width() as u32 },
            Head::Score { .. } => Purpose::Scores,
        };
        let max_tokens = max_tokens(folder, &trunk)?;
        let shape = EncoderShape { purpose, max_tokens, vocabulary: trunk.vocabulary() as u32, weight_bytes };
        Ok(Encoder { trunk, head, shape })
    }

    /// What it takes and gives.
    pub fn shape(&self) -> &EncoderShape {
        &self.shape
    }

    /// Bytes that computing the largest batch takes, of at most so many texts and so many tokens, padding counted: one
    /// text is always taken. Of scores, which each head has for each pair of tokens of a text, candle has four copies at
    /// once; of a layer's states some eighteen; and there is what its products pack, whatever the batch. These were
    /// fitted to the peaks of one model, and larger batches have taken up to a fifth more.
    pub fn workspace_bytes(&self, max_texts: usize, max_tokens: usize) -> u64 {
        const SCORES: usize = 4;
        const STATES: usize = 18;
        const PACKED_BYTES: usize = 28 << 20;
        let longest = self.shape.max_tokens as usize;
        let tokens = (max_tokens / longest).clamp(1, max_texts.max(1)) * longest;
        let scores = self.trunk.heads() * longest;
        (4 * tokens * (SCORES * scores + STATES * self.trunk.width()) + PACKED_BYTES) as u64
    }

    /// A vector, or a score of its own, for each text. Texts have 1 to [`EncoderShape::max_tokens`] tokens.
    pub fn run(&self, texts: &[EncoderInput]) -> Result<Vec<Vec<f32>>, EncoderError> {
        if let Some(text) = texts.iter().find(|text| !self.takes(text)) {
            return Err(EncoderError::Compute(format!("a text of {} tokens is not one of this encoder's", text.len())));
        }
        let run = || -> candle_core::Result<Vec<Vec<f32>>> {
            let padded = Padded::new(texts, self.trunk.padding())?;
            let states = self.trunk.forward(&padded)?;
            self.head.forward(&states, &padded.mask)?.to_vec2()
        };
        if texts.is_empty() { Ok(Vec::new()) } else { run().map_err(|error| EncoderError::Compute(error.to_string())) }
    }

    fn takes(&self, text: &EncoderInput) -> bool {
        (1..=self.shape.max_tokens as usize).contains(&text.len())
            && text.tokens.iter().all(|token| *token < self.shape.vocabulary)
    }
}

fn architecture(folder: &HubFolder) -> String {
    folder.config()["architectures"][0].as_str().unwrap_or_default().to_owned()
}

/// What the trunk has positions for, or fewer where the folder says so.
fn max_tokens(folder: &HubFolder, trunk: &Trunk) -> Result<u32, EncoderError> {
    let own = trunk.max_tokens() as u64;
    let asked = folder.json("sentence_bert_config.json")?.and_then(|config| config["max_seq_length"].as_u64());
    match asked.unwrap_or(own).min(own) {
        0..3 => Err(EncoderError::Config("texts of fewer than 3 tokens are no texts".to_owned())),
        tokens => Ok(tokens.min(u32::MAX.into()) as u32),
    }
}

/// Every float tensor as f32.
fn tensors(folder: &HubFolder) -> Result<HashMap<String, Tensor>, EncoderError> {
    let float = |tensor: windlass_checkpoint::Tensor<'_>| {
        let kind = match tensor.kind.name() {
            "f32" => DType::F32,
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            _ => return Ok(None),
        };
        let shape: Vec<usize> = tensor.dims.iter().rev().map(|dim| *dim as usize).collect();
        let read = Tensor::from_raw_buffer(&tensor.bytes, kind, &shape, &Device::Cpu);
        Ok(Some((tensor.name.to_owned(), read?.to_dtype(DType::F32)?)))
    };
    let read: candle_core::Result<Vec<_>> = folder.tensors().map(float).collect();
    Ok(read.map_err(misfit)?.into_iter().flatten().collect())
}

fn misfit(error: candle_core::Error) -> EncoderError {
    EncoderError::Tensors(error.to_string())
}
