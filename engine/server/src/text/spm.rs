//! SentencePiece's byte-pair encoders from a checkpoint's metadata, as the `tokenizers` crate runs them.
//!
//! Spaces are written as U+2581 and, where the model wants it, every stretch of text begins with one. There are no rules
//! for cutting words: the pair whose piece has the highest score is merged first, wherever it is. What no piece covers
//! becomes byte tokens.

use std::collections::HashMap;

use super::bpe::{added, invalid};
use super::tokenizer::TokenizerError;
use super::vocabulary::{TokenType, Vocabulary};
use tokenizers::Tokenizer;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};
use windlass_checkpoint::Metadata;

/// How pieces spell a space.
pub const SPACE: &str = "\u{2581}";

/// Longest piece, bytes: each is looked for in every way to cut it in two.
const MAX_PIECE_BYTES: usize = 1024;

/// Builds the encoder for `spellings`, the vocabulary in order of id, with its `types`.
pub fn build(metadata: Metadata<'_>, spellings: &[&str], types: &[i32]) -> Result<Tokenizer, TokenizerError> {
    refuse_long(spellings)?;
    let scores = scores(metadata, spellings.len())?;
    let vocabulary: Vocab = spellings.iter().zip(0u32..).map(|(text, id)| ((*text).to_owned(), id)).collect();
    let mut model = BPE::builder()
        .vocab_and_merges(vocabulary, merges(spellings, types, &scores))
        .byte_fallback(true)
        .fuse_unk(true);
    if let Some(unknown) = types.iter().position(|kind| *kind == TokenType::UNKNOWN) {
        model = model.unk_token(spellings[unknown].to_owned());
    }
    let mut tokenizer = Tokenizer::new(model.build().map_err(invalid)?);
    let prefixed = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    tokenizer.with_normalizer(Some(normalizer(prefixed)?)).map_err(invalid)?;
    tokenizer.add_tokens(added(spellings, types)).map_err(invalid)?;
    Ok(tokenizer)
}

/// The bytes of every token: text with real spaces, single bytes, and none for tokens with a function.
pub fn pieces(spellings: &[&str], types: &[i32]) -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    for (spelling, kind) in spellings.iter().zip(types) {
        vocabulary.push(|bytes| match *kind {
            TokenType::CONTROL | TokenType::UNKNOWN => (),
            TokenType::BYTE => bytes.extend(byte(spelling)),
            _ => append_text(spelling, bytes),
        });
    }
    vocabulary
}

/// Appends what a spelling stands for where no type tells bytes from text.
pub fn append_bytes(spelling: &str, bytes: &mut Vec<u8>) {
    match byte(spelling) {
        Some(byte) => bytes.push(byte),
        None => append_text(spelling, bytes),
    }
}

fn refuse_long(spellings: &[&str]) -> Result<(), TokenizerError> {
    let Some(id) = spellings.iter().position(|piece| piece.len() > MAX_PIECE_BYTES) else { return Ok(()) };
    let message = format!(
        "entry {id} of tokenizer.ggml.tokens has {} bytes; a piece has at most {MAX_PIECE_BYTES}",
        spellings[id].len()
    );
    Err(TokenizerError::Inconsistent(message))
}

fn append_text(spelling: &str, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(spelling.replace(SPACE, " ").as_bytes());
}

/// The byte of a token spelled `<0xAB>`.
fn byte(spelling: &str) -> Option<u8> {
    let digits = spelling.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

fn normalizer(prefixed: bool) -> Result<NormalizerWrapper, TokenizerError> {
    let spaces: NormalizerWrapper = Replace::new(" ", SPACE).map_err(invalid)?.into();
    let prefix: NormalizerWrapper = Prepend::new(SPACE.to_owned()).into();
    Ok(if prefixed { Sequence::new(vec![prefix, spaces]).into() } else { spaces })
}

/// The score of each token.
pub fn scores(metadata: Metadata<'_>, tokens: usize) -> Result<Vec<f32>, TokenizerError> {
    let scores: Vec<f32> = metadata.require("tokenizer.ggml.scores", Metadata::f32_array)?.collect();
    if scores.len() == tokens {
        return Ok(scores);
    }
    let message = format!("tokenizer.ggml.scores has {} entries and tokenizer.ggml.tokens {tokens}", scores.len());
    Err(TokenizerError::Inconsistent(message))
}

/// Every way to put a piece together from two others, the best piece first.
fn merges(spellings: &[&str], types: &[i32], scores: &[f32]) -> Merges {
    let text = |kind: i32| matches!(kind, TokenType::NORMAL | TokenType::USER_DEFINED | TokenType::UNUSED);
    let ids = || (0..spellings.len()).filter(|&id| text(types[id]));
    let by_text: HashMap<&str, usize> = ids().map(|id| (spellings[id], id)).collect();
    let mut whole: Vec<usize> = ids().collect();
    whole.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let mut merges = Merges::new();
    for id in whole {
        let piece = spellings[id];
        let cuts = piece.char_indices().skip(1).map(|(at, _)| piece.split_at(at));
        let known = |(left, right): (&str, &str)| Some((*by_text.get(left)?, *by_text.get(right)?));
        let mut pairs: Vec<(usize, usize)> = cuts.filter_map(known).collect();
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|(left, right)| (spellings[left].to_owned(), spellings[right].to_owned())));
    }
    merges
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_checkpoint::GgufFile;
    use windlass_checkpoint::testing::GgufBuilder;

    /// Pieces with their scores; the better of two ways to cut a word is the one by score.
    fn file(prefixed: bool) -> GgufFile {
        let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), 0.0, TokenType::BYTE));
        let special = [("<unk>", TokenType::UNKNOWN), ("<s>", TokenType::CONTROL), ("</s>", TokenType::CONTROL)];
        let normal = [
            ("\u{2581}", -1000.0),
            ("a", -1001.0),
            ("b", -1002.0),
            ("c", -1003.0),
            ("ab", -5.0),
            ("bc", -2.0),
            ("abc", -9.0),
            ("\u{2581}a", -3.0),
            ("\u{2581}\u{2581}", -1.0),
        ];
        let special = special.map(|(text, kind)| (text.to_owned(), 0.0, kind));
        let normal = normal.map(|(text, score)| (text.to_owned(), score, TokenType::NORMAL));
        let tokens: Vec<(String, f32, i32)> = special.into_iter().chain(bytes).chain(normal).collect();
        let column = |text: &(String, f32, i32)| text.0.clone();
        let file = GgufBuilder::new()
            .str_array("tokenizer.ggml.tokens", &tokens.iter().map(column).collect::<Vec<_>>())
            .f32_array("tokenizer.ggml.scores", &tokens.iter().map(|token| token.1).collect::<Vec<_>>())
            .i32_array("tokenizer.ggml.token_type", &tokens.iter().map(|token| token.2).collect::<Vec<_>>())
            .bool("tokenizer.ggml.add_space_prefix", prefixed);
        GgufFile::from_bytes(file.build()).unwrap()
    }

    fn encode(text: &str, prefixed: bool) -> Vec<String> {
        let file = file(prefixed);
        let spellings: Vec<&str> = file.metadata().str_array("tokenizer.ggml.tokens").unwrap().unwrap().collect();
        let types: Vec<i32> = file.metadata().i32_array("tokenizer.ggml.token_type").unwrap().unwrap().collect();
        let tokenizer = build(file.metadata(), &spellings, &types).unwrap();
        tokenizer.encode(text, false).unwrap().get_tokens().to_vec()
    }

    #[test]
    fn the_best_pair_is_merged_first_wherever_it_is() {
        // "bc" beats "ab", and only then "a" finds "bc".
        assert_eq!(encode("abc", false), ["abc"]);
        assert_eq!(encode("abab", false), ["ab", "ab"]);
        // The space's piece beats "ab": what is left is "b".
        assert_eq!(encode("ab", true), ["\u{2581}a", "b"]);
    }

    #[test]
    fn spaces_prefixes_bytes_and_control_tokens() {
        assert_eq!(encode("a b", true), ["\u{2581}a", "\u{2581}", "b"]);
        assert_eq!(encode("  a", true), ["\u{2581}\u{2581}", "\u{2581}a"]);
        assert_eq!(encode("é", false), ["<0xC3>", "<0xA9>"]);
        assert_eq!(encode("<s>a</s>a", true), ["<s>", "\u{2581}a", "</s>", "\u{2581}a"]);
        assert_eq!(encode("<0x41>", false)[..2], ["<0x3C>", "<0x30>"]);
        assert_eq!(encode("", true), [""; 0]);
    }

    #[test]
    fn a_piece_that_would_be_cut_without_end_is_refused() {
        let (file, long) = (file(true), "a".repeat(MAX_PIECE_BYTES + 1));
        let refusal = build(file.metadata(), &["a", &long], &[TokenType::NORMAL; 2]).unwrap_err().to_string();
        assert_eq!(refusal, "entry 1 of tokenizer.ggml.tokens has 1025 bytes; a piece has at most 1024");
    }

    #[test]
    fn pieces_have_real_spaces_and_bytes() {
        let vocabulary = pieces(&["<s>", "<0xC3>", "\u{2581}a", "x"], &[3, 6, 1, 4]);
        let pieces: Vec<&[u8]> = (0..4).map(|id| vocabulary.piece(id)).collect();
        assert_eq!(pieces, [&b""[..], &[0xC3], b" a", b"x"]);
        assert_eq!([byte("<0x0A>"), byte("<0xZZ>"), byte("<0x100>"), byte("x")], [Some(10), None, None, None]);
    }
}
