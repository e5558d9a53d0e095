//! `tokenizer.json`, as the hub has it.

use super::charsmap;
use super::guarded::guarded;
use super::tokenizer::TokenizerError;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use tokenizers::Tokenizer;
use windlass_checkpoint::HubFolder;

/// What is read of the file beside what the `tokenizers` crate makes of it. All of it as JSON values would take many times its
/// bytes.
#[derive(Deserialize)]
struct Description {
    normalizer: Option<Normalizer>,
    decoder: Option<Decoder>,
}

/// A normalizer, or a sequence of some.
#[derive(Deserialize)]
struct Normalizer {
    precompiled_charsmap: Option<String>,
    normalizers: Option<Vec<Normalizer>>,
}

/// What turns tokens into text, or a sequence of that.
#[derive(Default, Deserialize)]
pub struct Decoder {
    /// The kind.
    #[serde(default, rename = "type")]
    pub kind: String,
    /// The steps of a sequence.
    pub decoders: Option<Vec<Decoder>>,
}

/// The tokenizer that a folder's file describes, and its decoder. Tools leave there how they cut and padded texts last, which is
/// for a request to say.
pub fn read(folder: &HubFolder) -> Result<(Tokenizer, Decoder), TokenizerError> {
    let file = folder.text("tokenizer.json")?.ok_or(TokenizerError::NoTokenizerFile)?;
    let Description { normalizer, decoder } = serde_json::from_str(&file).map_err(invalid)?;
    normalizer.iter().try_for_each(check_tables)?;
    let mut tokenizer = guarded(|| Tokenizer::from_bytes(&file)).map_err(invalid)?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(invalid)?;
    Ok((tokenizer, decoder.unwrap_or_default()))
}

/// Checks the tables of characters of a normalizer.
fn check_tables(normalizer: &Normalizer) -> Result<(), TokenizerError> {
    if let Some(table) = &normalizer.precompiled_charsmap {
        charsmap::check(&BASE64_STANDARD.decode(table).map_err(invalid)?)?;
    }
    normalizer.normalizers.iter().flatten().try_for_each(check_tables)
}

fn invalid(problem: impl ToString) -> TokenizerError {
    TokenizerError::Invalid(format!("tokenizer.json: {}", problem.to_string()))
}
