//! SentencePiece's unigram encoders (Kudo 2018) from a checkpoint's metadata, as the `tokenizers` crate runs them: of all
//! ways to cut a text into pieces the one with the highest sum of scores.

use super::bpe::{added, invalid};
use super::charsmap;
use super::spm::{SPACE, scores};
use super::tokenizer::TokenizerError;
use super::vocabulary::TokenType;
use tokenizers::Tokenizer;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{NormalizerWrapper, Precompiled, Prepend, Replace, Sequence, Strip};
use windlass_checkpoint::Metadata;

/// Builds the encoder for `spellings`, the vocabulary in order of id, with its `types`.
pub fn build(metadata: Metadata<'_>, spellings: &[&str], types: &[i32]) -> Result<Tokenizer, TokenizerError> {
    let scores = scores(metadata, spellings.len())?;
    let vocabulary = spellings.iter().zip(&scores).map(|(text, score)| ((*text).to_owned(), f64::from(*score)));
    let unknown = types.iter().position(|kind| *kind == TokenType::UNKNOWN);
    let by_bytes = types.contains(&TokenType::BYTE);
    let mut tokenizer = Tokenizer::new(Unigram::from(vocabulary.collect(), unknown, by_bytes).map_err(invalid)?);
    tokenizer.with_normalizer(Some(normalizer(metadata)?)).map_err(invalid)?;
    tokenizer.add_tokens(added(spellings, types)).map_err(invalid)?;
    Ok(tokenizer)
}

/// The file's own table of characters, then spaces.
fn normalizer(metadata: Metadata<'_>) -> Result<NormalizerWrapper, TokenizerError> {
    let flag = |name: &str| Ok::<_, TokenizerError>(metadata.bool(name)?.unwrap_or(true));
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if let Some(table) = metadata.bytes("tokenizer.ggml.precompiled_charsmap")?.filter(|table| !table.is_empty()) {
        charsmap::check(table)?;
        steps.push(Precompiled::from(table).map_err(|error| TokenizerError::Invalid(error.to_string()))?.into());
    }
    if flag("tokenizer.ggml.remove_extra_whitespaces")? {
        let several = ReplacePattern::Regex(" {2,}".to_owned());
        steps.extend([Strip::new(true, true).into(), Replace::new(several, " ").map_err(invalid)?.into()]);
    }
    if flag("tokenizer.ggml.add_space_prefix")? {
        steps.push(Prepend::new(SPACE.to_owned()).into());
    }
    steps.push(Replace::new(" ", SPACE).map_err(invalid)?.into());
    Ok(Sequence::new(steps).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_checkpoint::GgufFile;
    use windlass_checkpoint::testing::GgufBuilder;

    fn encode(text: &str) -> Vec<String> {
        let tokens = [
            ("<unk>", 0.0, 2),
            ("</s>", 0.0, 3),
            ("\u{2581}", -3.0, 1),
            ("a", -2.0, 1),
            ("b", -2.5, 1),
            ("ab", -4.0, 1),
            ("\u{2581}ab", -4.5, 1),
            ("bab", -3.0, 1),
        ];
        let spellings = tokens.map(|(text, ..)| text.to_owned());
        let file = GgufBuilder::new()
            .str_array("tokenizer.ggml.tokens", &spellings)
            .f32_array("tokenizer.ggml.scores", &tokens.map(|token| token.1))
            .build();
        let file = GgufFile::from_bytes(file).unwrap();
        let tokenizer = build(file.metadata(), &tokens.map(|token| token.0), &tokens.map(|token| token.2)).unwrap();
        tokenizer.encode(text, false).unwrap().get_tokens().to_vec()
    }

    #[test]
    fn the_best_sum_of_scores_wins_and_not_the_longest_piece() {
        assert_eq!(encode("ab"), ["\u{2581}ab"]);
        // "▁ab" and "ab" together are worse than "▁", "a" and "bab".
        assert_eq!(encode("abab"), ["\u{2581}", "a", "bab"]);
        assert_eq!(encode("  a  b "), ["\u{2581}", "a", "\u{2581}", "b"]);
        assert_eq!(encode("a</s>b"), ["\u{2581}", "a", "</s>", "\u{2581}", "b"]);
        assert_eq!(encode("ax"), ["\u{2581}", "a", "x"]);
    }
}
