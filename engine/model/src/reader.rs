//! Runs a model over a given text: logits at every position.

use windlass_checkpoint::Checkpoint;
use windlass_engine_core::plan::BlockId;
use windlass_engine_core::request::TokenId;

use crate::batch::{Batch, Logits};
use crate::cpu::{Built, CpuDecoder};
use crate::error::LoadError;
use crate::load::build;
use crate::sizes::{KvBudget, LoadOptions};

/// Tokens in a step: enough for efficient products, few enough for their logits to be small.
const STEP_TOKENS: usize = 64;

/// A model, with a KV cache for one text.
pub struct Reader {
    decoder: CpuDecoder,
    vocabulary: usize,
    blocks: Vec<BlockId>,
    batch: Batch,
    /// The weight format of most weights, as `q4_1`.
    pub weight_type: &'static str,
}

impl Reader {
    /// Loads a model for texts of at most `tokens` tokens.
    pub fn load(checkpoint: &Checkpoint, tokens: usize, options: &LoadOptions) -> Result<Reader, LoadError> {
        let blocks = tokens.div_ceil(options.block_tokens as usize) as u32;
        let options = LoadOptions {
            kv: KvBudget::Blocks(blocks),
            max_sequences: STEP_TOKENS as u32,
            max_step_tokens: STEP_TOKENS as u32,
            max_model_tokens: Some(tokens as u32),
            ..options.clone()
        };
        let Built { decoder, geometry, weight_type, .. } = build(checkpoint, &options)?;
        let blocks = (0..geometry.blocks).map(BlockId).collect();
        let vocabulary = geometry.vocabulary as usize;
        Ok(Reader { decoder, vocabulary, blocks, batch: Batch::default(), weight_type })
    }

    /// Size of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Computes the next tokens of a text of which `position` tokens are computed, at most
    /// [`STEP_TOKENS`](Self::STEP_TOKENS). Returns the logits after each, `[tokens, vocabulary]`.
    ///
    /// # Panics
    /// If the text is longer than the model was loaded for, or a token is outside the vocabulary.
    pub fn read(&mut self, tokens: &[TokenId], position: usize) -> Vec<f32> {
        self.batch.clear();
        self.batch.push(tokens.iter().copied(), position as u32, &self.blocks, Logits::leading(tokens.len()));
        self.decoder.forward(&self.batch);
        self.decoder.logits(tokens.len())
    }

    /// The most tokens that [`read`](Self::read) takes.
    pub const STEP_TOKENS: usize = STEP_TOKENS;
}
