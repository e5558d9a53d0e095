//! Fields that name tokens of the vocabulary, by id or by text.

use super::bounds::out_of_range;
use crate::text::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use windlass_engine_api::error::FieldError;
use windlass_engine_core::request::TokenId;

/// Tokens with a bias.
const MAX_BIASES: usize = 1024;
/// Largest bias, up or down.
const MAX_BIAS: f64 = 100.0;
/// Bytes of a cache salt.
const MAX_SALT_BYTES: usize = 1024;
/// Texts to keep out.
const MAX_BAD_WORDS: usize = 128;
/// Bytes of one of them.
const MAX_BAD_WORD_BYTES: usize = 1024;

/// Biases by token id.
pub(super) fn logit_bias(biases: &BTreeMap<String, f64>, vocabulary: u32) -> Result<Vec<(TokenId, f32)>, FieldError> {
    if biases.len() > MAX_BIASES {
        let message = format!("`logit_bias` has {} tokens; at most {MAX_BIASES} are biased", biases.len());
        return Err(FieldError::invalid("logit_bias", message));
    }
    let one = |(token, bias): (&String, &f64)| match (token.parse(), *bias) {
        (Ok(token), bias) if token < vocabulary && bias.abs() <= MAX_BIAS => Ok((token, bias as f32)),
        _ => {
            let message = format!(
                "`logit_bias` maps {token:?} to {bias}; it must map token ids below {vocabulary} to numbers from \
                 -{MAX_BIAS} to {MAX_BIAS}"
            );
            Err(FieldError::invalid("logit_bias", message))
        }
    };
    biases.iter().map(one).collect()
}

/// A salt of a sensible length.
pub(super) fn cache_salt(salt: Option<String>) -> Result<Option<String>, FieldError> {
    match salt.as_ref().map(String::len) {
        None | Some(1..=MAX_SALT_BYTES) => Ok(salt),
        Some(bytes) => {
            let message = format!("`cache_salt` has {bytes} bytes; it must have 1 to {MAX_SALT_BYTES}");
            Err(FieldError::invalid("cache_salt", message))
        }
    }
}

/// The only tokens that may come; empty for all.
pub(super) fn allowed_tokens(allowed: Option<&[TokenId]>, vocabulary: u32) -> Result<Vec<TokenId>, FieldError> {
    let Some(allowed) = allowed else { return Ok(Vec::new()) };
    if allowed.is_empty() || allowed.len() > vocabulary as usize {
        let message = format!("`allowed_token_ids` has {} tokens; it must have 1 to {vocabulary}", allowed.len());
        return Err(FieldError::invalid("allowed_token_ids", message));
    }
    match allowed.iter().find(|token| **token >= vocabulary) {
        Some(token) => Err(out_of_range("allowed_token_ids", token, format!("below {vocabulary}, the vocabulary"))),
        None => Ok(allowed.to_vec()),
    }
}

/// The tokens of texts that must not come, as they are spelled at the start of a text and inside one.
pub(super) fn bad_words(words: &[String], tokenizer: &Tokenizer) -> Result<Vec<Vec<TokenId>>, FieldError> {
    if words.len() > MAX_BAD_WORDS {
        let message = format!("`bad_words` holds {} strings; at most {MAX_BAD_WORDS} are kept out", words.len());
        return Err(FieldError::invalid("bad_words", message));
    }
    let wrong = |word: &&String| word.trim().is_empty() || word.len() > MAX_BAD_WORD_BYTES;
    if let Some(word) = words.iter().find(wrong) {
        let message = format!(
            "a string in `bad_words` has {} bytes; each must have 1 to {MAX_BAD_WORD_BYTES}, not all of them spaces",
            word.len()
        );
        return Err(FieldError::invalid("bad_words", message));
    }
    let spellings = words.iter().flat_map(|word| [word.clone(), format!(" {}", word.trim_start())]);
    let encode =
        |text: String| tokenizer.encode(&text).map_err(|error| FieldError::invalid("bad_words", error.to_string()));
    let mut tokens = spellings.map(encode).collect::<Result<Vec<_>, FieldError>>()?;
    tokens.retain(|tokens| !tokens.is_empty());
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}
