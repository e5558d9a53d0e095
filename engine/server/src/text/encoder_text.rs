//! Texts for encoders: one or two of them as tokens, with the special ones around.

use super::tokenizer::TokenizerError;
use tokenizers::{Encoding, Tokenizer};
use windlass_checkpoint::HubFolder;
use windlass_engine_model::EncoderInput;

/// The tokenizer of an encoder.
pub struct EncoderText(Tokenizer);

impl EncoderText {
    /// Reads `tokenizer.json`. Cutting and padding are decided for each request, not there.
    pub fn read(folder: &HubFolder) -> Result<EncoderText, TokenizerError> {
        let file = folder.text("tokenizer.json")?.ok_or(TokenizerError::NoTokenizerFile)?;
        let invalid = |error: tokenizers::Error| TokenizerError::Invalid(format!("tokenizer.json: {error}"));
        let mut tokenizer = Tokenizer::from_bytes(&file).map_err(invalid)?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(invalid)?;
        Ok(EncoderText(tokenizer))
    }

    /// One text.
    pub fn one(&self, text: &str) -> Result<EncoderInput, String> {
        self.0.encode(text, true).map(|encoding| input(&encoding)).map_err(|error| error.to_string())
    }

    /// A text and another, for models that compare.
    pub fn pair(&self, first: &str, second: &str) -> Result<EncoderInput, String> {
        self.0.encode((first, second), true).map(|encoding| input(&encoding)).map_err(|error| error.to_string())
    }
}

fn input(encoding: &Encoding) -> EncoderInput {
    EncoderInput { tokens: encoding.get_ids().to_vec(), types: encoding.get_type_ids().to_vec() }
}
