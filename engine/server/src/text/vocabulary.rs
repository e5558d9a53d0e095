//! The bytes that each token adds to the output.

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
}

impl Vocabulary {
    /// Adds the next token; `append` writes its bytes.
    pub fn push(&mut self, append: impl FnOnce(&mut Vec<u8>)) {
        append(&mut self.bytes);
        self.ends.push(self.bytes.len() as u32);
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
}
