//! WordPiece encoders (Schuster and Nakajima 2012) from a checkpoint's metadata, as the `tokenizers` crate runs them: in
//! lower case and without accents, the longest piece first.
//!
//! Files spell the beginning of a word with U+2581 and what goes on plainly; the crate spells it the other way round.

use super::bpe::{added, invalid};
use super::spm::SPACE;
use super::tokenizer::TokenizerError;
use super::vocabulary::TokenType;
use tokenizers::Tokenizer;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use windlass_checkpoint::Metadata;

/// How the crate spells what goes on.
const CONTINUED: &str = "##";
/// Longest word that is looked up piece by piece; longer ones are unknown.
const MAX_WORD_CHARACTERS: usize = 1000;

/// Builds the encoder for `spellings`, the vocabulary in order of id, with its `types`.
pub fn build(metadata: Metadata<'_>, spellings: &[&str], types: &[i32]) -> Result<Tokenizer, TokenizerError> {
    let unknown = metadata.u32("tokenizer.ggml.unknown_token_id")?.and_then(|id| spellings.get(id as usize));
    let unknown = *unknown.unwrap_or(&"[UNK]");
    let typed = spellings.iter().zip(types).zip(0u32..);
    let vocabulary: Vocab = typed.map(|((text, kind), id)| (respelled(text, *kind, unknown), id)).collect();
    if !vocabulary.contains_key(unknown) {
        return Err(TokenizerError::Inconsistent(format!("the vocabulary lacks the unknown token {unknown:?}")));
    }
    let model = WordPiece::builder()
        .vocab(vocabulary)
        .unk_token(unknown.to_owned())
        .continuing_subword_prefix(CONTINUED.to_owned())
        .max_input_chars_per_word(MAX_WORD_CHARACTERS);
    let mut tokenizer = Tokenizer::new(model.build().map_err(invalid)?);
    tokenizer.with_normalizer(Some(BertNormalizer::new(true, true, Some(true), true))).map_err(invalid)?;
    tokenizer.with_pre_tokenizer(Some(BertPreTokenizer));
    tokenizer.add_tokens(added(spellings, types)).map_err(invalid)?;
    Ok(tokenizer)
}

fn respelled(text: &str, kind: i32, unknown: &str) -> String {
    match text.strip_prefix(SPACE) {
        _ if kind != TokenType::NORMAL || text == unknown => text.to_owned(),
        Some(word) => word.to_owned(),
        None => format!("{CONTINUED}{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_checkpoint::GgufFile;
    use windlass_checkpoint::testing::GgufBuilder;

    #[test]
    fn words_are_cut_into_the_longest_pieces() {
        let tokens = [
            ("[UNK]", 3),
            ("[CLS]", 3),
            ("\u{2581}un", 1),
            ("\u{2581}una", 1),
            ("able", 1),
            ("ff", 1),
            ("\u{2581}!", 1),
            ("ble", 1),
        ];
        let file = GgufFile::from_bytes(GgufBuilder::new().str("general.architecture", "bert").build()).unwrap();
        let tokenizer = build(file.metadata(), &tokens.map(|token| token.0), &tokens.map(|token| token.1)).unwrap();
        let encode = |text: &str| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
        assert_eq!(encode("Ünaffable!"), [3, 5, 4, 6]);
        assert_eq!(encode("unable UNA ffable"), [3, 7, 3, 0]);
        assert_eq!(encode("[CLS]unff"), [1, 2, 5]);
    }
}
