//! Tokens to text, piece by piece, never handing out half a character.

/// Turns the bytes of one request's tokens into text as they come.
///
/// A character whose bytes are spread over tokens appears with the last of them. Bytes that can become no character
/// appear as U+FFFD, exactly where a decoder of the whole byte string would put it.
#[derive(Debug, Default)]
pub struct Detokenizer {
    /// The beginning of a character, at most three bytes.
    incomplete: Vec<u8>,
}

impl Detokenizer {
    /// Appends to `text` what the next token's bytes complete.
    pub fn push(&mut self, piece: &[u8], text: &mut String) {
        if let (true, Ok(whole)) = (self.incomplete.is_empty(), std::str::from_utf8(piece)) {
            return text.push_str(whole);
        }
        self.incomplete.extend_from_slice(piece);
        let held = std::mem::take(&mut self.incomplete);
        let complete = held.len() - incomplete_suffix(&held);
        text.push_str(&String::from_utf8_lossy(&held[..complete]));
        self.incomplete.extend_from_slice(&held[complete..]);
    }

    /// The end of the text: what is still incomplete stays so, and shows as U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        text.push_str(&String::from_utf8_lossy(&self.incomplete));
        self.incomplete.clear();
    }
}

/// Bytes at the end that begin a character and may yet be completed.
fn incomplete_suffix(bytes: &[u8]) -> usize {
    match bytes.utf8_chunks().last() {
        Some(chunk) if !chunk.invalid().is_empty() => {
            let invalid = chunk.invalid();
            // An error without a length is one that more bytes could mend.
            let mendable = std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if mendable { invalid.len() } else { 0 }
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(pieces: &[&[u8]]) -> Vec<String> {
        let mut detokenizer = Detokenizer::default();
        let mut texts: Vec<String> = pieces
            .iter()
            .map(|piece| {
                let mut text = String::new();
                detokenizer.push(piece, &mut text);
                text
            })
            .collect();
        let mut rest = String::new();
        detokenizer.finish(&mut rest);
        texts.push(rest);
        texts
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        assert_eq!(decode(&[b"a\xf0\x9f", b"\x98", b"\x80b"]), ["a", "", "😀b", ""]);
    }

    #[test]
    fn an_incomplete_end_shows_as_a_replacement() {
        assert_eq!(decode(&[b"a\xe2\x82"]), ["a", "\u{fffd}"]);
    }

    proptest! {
        /// However bytes are cut into pieces, the text is that of the whole.
        #[test]
        fn pieces_concatenate_to_the_whole(
            pieces in proptest::collection::vec(proptest::collection::vec(
                prop_oneof![Just(0xf0u8), Just(0x9f), Just(0x98), Just(0x80), Just(0xe2), Just(0xc3), any::<u8>()], 0..6), 0..12)
        ) {
            let slices: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let whole = String::from_utf8_lossy(&pieces.concat()).into_owned();
            prop_assert_eq!(decode(&slices).concat(), whole);
        }
    }
}
