//! `tokenizer.json`, as the hub has it.

use super::charsmap;
use super::tokenizer::TokenizerError;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use tokenizers::Tokenizer;
use windlass_checkpoint::HubFolder;

/// The tokenizer that a folder's file describes, and the description.
pub fn read(folder: &HubFolder) -> Result<(Tokenizer, Value), TokenizerError> {
    let file = folder.text("tokenizer.json")?.ok_or(TokenizerError::NoTokenizerFile)?;
    let json: Value = serde_json::from_str(&file).map_err(invalid)?;
    check_tables(&json["normalizer"])?;
    Ok((Tokenizer::from_bytes(&file).map_err(invalid)?, json))
}

/// Checks the tables of characters of a normalizer, which may be a sequence of some.
fn check_tables(normalizer: &Value) -> Result<(), TokenizerError> {
    if let Some(table) = normalizer["precompiled_charsmap"].as_str() {
        charsmap::check(&BASE64_STANDARD.decode(table).map_err(invalid)?)?;
    }
    normalizer["normalizers"].as_array().into_iter().flatten().try_for_each(check_tables)
}

fn invalid(problem: impl ToString) -> TokenizerError {
    TokenizerError::Invalid(format!("tokenizer.json: {}", problem.to_string()))
}
