//! Texts for encoders: one or two of them as tokens, with the special ones around.

use super::guarded::guarded;
use super::tokenizer::TokenizerError;
use super::tokenizer_file;
use super::vocabulary::Vocabulary;
use super::words;
use tokenizers::{Encoding, Tokenizer};
use windlass_checkpoint::HubFolder;
use windlass_engine_model::EncoderInput;

/// The tokenizer of an encoder.
pub struct EncoderText(Kind);

enum Kind {
    File(Box<Tokenizer>),
    /// The simulator's words, with nothing around them.
    Words(Vocabulary),
}

impl EncoderText {
    /// Reads `tokenizer.json`.
    pub fn read(folder: &HubFolder) -> Result<EncoderText, TokenizerError> {
        let (tokenizer, _) = tokenizer_file::read(folder)?;
        Ok(EncoderText(Kind::File(Box::new(tokenizer))))
    }

    /// The simulator's.
    pub fn words() -> EncoderText {
        EncoderText(Kind::Words(words::vocabulary()))
    }

    /// Token ids are below it.
    pub fn vocabulary(&self) -> u32 {
        match &self.0 {
            Kind::File(tokenizer) => tokenizer.get_vocab_size(true) as u32,
            Kind::Words(words) => words.len(),
        }
    }

    /// One text.
    pub fn one(&self, text: &str) -> Result<EncoderInput, String> {
        match &self.0 {
            Kind::File(tokenizer) => read(|| tokenizer.encode(text, true)),
            Kind::Words(vocabulary) => Ok(EncoderInput { tokens: words::encode(text, vocabulary), types: Vec::new() }),
        }
    }

    /// A text and another, for models that compare.
    pub fn pair(&self, first: &str, second: &str) -> Result<EncoderInput, String> {
        match &self.0 {
            Kind::File(tokenizer) => read(|| tokenizer.encode((first, second), true)),
            Kind::Words(vocabulary) => {
                let [mut tokens, second] = [first, second].map(|text| words::encode(text, vocabulary));
                let types = [vec![0; tokens.len()], vec![1; second.len()]].concat();
                tokens.extend(second);
                Ok(EncoderInput { tokens, types })
            }
        }
    }
}

fn read(encode: impl FnOnce() -> tokenizers::Result<Encoding>) -> Result<EncoderInput, String> {
    let encoding = guarded(encode)?;
    Ok(EncoderInput { tokens: encoding.get_ids().to_vec(), types: encoding.get_type_ids().to_vec() })
}
