//! The bytes that each token adds to the output.

use std::borrow::Cow;
use std::collections::HashMap;
use windlass_engine_core::request::TokenId;

/// The values of `tokenizer.ggml.token_type`.
pub struct TokenType;

impl TokenType {
    /// Text.
    pub const NORMAL: i32 = 1;
    /// Stands for what the vocabulary lacks.
    pub const UNKNOWN: i32 = 2;
    /// A function instead of text.
    pub const CONTROL: i32 = 3;
    /// Text that is always one token.
    pub const USER_DEFINED: i32 = 4;
    /// Reserved.
    pub const UNUSED: i32 = 5;
    /// One byte, spelled `<0xAB>`.
    pub const BYTE: i32 = 6;
}

/// Bytes of every token, in one allocation. Control tokens have none: they are never part of the output.
#[derive(Debug, Default)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    /// How control tokens are written where they are to be seen.
    control: HashMap<TokenId, Box<str>>,
}

impl Vocabulary {
    /// Adds the next token; `append` writes its bytes.
    pub fn push(&mut self, append: impl FnOnce(&mut Vec<u8>)) {
        append(&mut self.bytes);
        self.ends.push(self.bytes.len() as u32);
    }

    /// Adds a control token.
    pub fn push_control(&mut self, spelling: &str) {
        self.control.insert(self.len(), spelling.into());
        self.push(|_| ());
    }

    /// Number of tokens; every id is below it.
    pub fn len(&self) -> u32 {
        self.ends.len() as u32
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Bytes of a token; none for an id outside the vocabulary, which a padded output layer can produce.
    pub fn piece(&self, token: TokenId) -> &[u8] {
        let index = token as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).map_or(0, |previous| self.ends[previous]);
        &self.bytes[start as usize..end as usize]
    }

    /// Bytes of a token, or how it is written if it is a control token.
    pub fn spelling(&self, token: TokenId) -> &[u8] {
        self.control.get(&token).map_or_else(|| self.piece(token), |spelling| spelling.as_bytes())
    }

    /// The token that is written so. Looks at all of them.
    pub fn find(&self, spelling: &str) -> Option<TokenId> {
        (0..self.len()).find(|&token| self.spelling(token) == spelling.as_bytes())
    }

    /// A token by itself, as text.
    pub fn text(&self, token: TokenId) -> Cow<'_, str> {
        String::from_utf8_lossy(self.spelling(token))
    }

    /// Bytes of the longest token, at least one: no text of `n` tokens is longer than `n` times this.
    pub fn longest_piece(&self) -> usize {
        let starts = std::iter::once(&0).chain(&self.ends);
        starts.zip(&self.ends).map(|(start, end)| (end - start) as usize).max().unwrap_or(0).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_found_by_id_and_unknown_ids_are_silent() {
        let mut vocabulary = Vocabulary::default();
        for piece in ["", "ab", "c"] {
            vocabulary.push(|bytes| bytes.extend_from_slice(piece.as_bytes()));
        }
        let pieces: Vec<&[u8]> = (0..4).map(|token| vocabulary.piece(token)).collect();
        assert_eq!(pieces, [&b""[..], b"ab", b"c", b""]);
        assert_eq!((vocabulary.len(), vocabulary.longest_piece()), (3, 2));
    }

    #[test]
    fn control_tokens_have_a_spelling_and_no_text() {
        let mut vocabulary = Vocabulary::default();
        vocabulary.push(|bytes| bytes.extend_from_slice(b"\xff"));
        vocabulary.push_control("<end>");
        assert_eq!((vocabulary.piece(1), vocabulary.spelling(1)), (&b""[..], &b"<end>"[..]));
        assert_eq!((vocabulary.find("<end>"), vocabulary.find("<begin>")), (Some(1), None));
        assert_eq!((vocabulary.text(0).as_ref(), vocabulary.text(1).as_ref()), ("\u{fffd}", "<end>"));
    }
}
