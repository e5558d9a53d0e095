//! The simulator's language: a few common words, so that its answers can be read and repeat themselves exactly.

use crate::text::vocabulary::Vocabulary;
use std::sync::LazyLock;
use windlass_engine_core::request::TokenId;

/// Token 0 ends a sequence and has no text; token `n` is word `n`.
const WORDS: &str = "the of and to in a is that for it as was with be by on not he his but at are this have from or \
    had an they which one you were all her she there would their we him been has when who will no more if out so up \
    said what its about than into them can only other time new some could these two may first then do any like my now \
    over such our man me even most made after also well did many before must years back through much where your way \
    down should because long each just state those people too mister how little good world make very year still see \
    work life men day get here old between both being under three never know same last another while us off might \
    great go come since against right came take used himself few house use during without again place around however \
    home small found thought went say part once general high upon school every engine sequence block token batch";

/// End of sequence.
pub const END: TokenId = 0;

/// Pieces of all words, each with a space before it.
pub fn vocabulary() -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    vocabulary.push(|_| ());
    for word in WORDS.split_whitespace() {
        vocabulary.push(|bytes| {
            bytes.push(b' ');
            bytes.extend_from_slice(word.as_bytes());
        });
    }
    vocabulary
}

/// One token per word of `text`. A word of the list keeps its id, any other takes one by its letters: the simulator
/// needs as many tokens as a prompt has words, always the same ones, and not their meaning.
pub fn encode(text: &str, vocabulary: &Vocabulary) -> Vec<TokenId> {
    text.split_whitespace().map(|word| token_of(word, vocabulary.len())).collect()
}

/// The word for a number drawn at random, never the end.
pub fn draw(number: u64) -> TokenId {
    static COUNT: LazyLock<u64> = LazyLock::new(|| WORDS.split_whitespace().count() as u64);
    1 + (number % *COUNT) as TokenId
}

fn token_of(word: &str, vocabulary: u32) -> TokenId {
    let known = WORDS.split_whitespace().position(|known| known == word);
    known.map_or_else(|| 1 + fnv1a(word.as_bytes()) % (vocabulary - 1), |index| index as TokenId + 1)
}

/// Fowler, Noll and Vo's hash, 32 bits, variant 1a.
fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_words_round_trip_and_others_have_a_fixed_token() {
        let vocabulary = vocabulary();
        let tokens = encode("the engine  frobnicates", &vocabulary);
        assert_eq!(tokens.len(), 3);
        assert_eq!(vocabulary.piece(tokens[0]), b" the");
        assert_eq!(vocabulary.piece(tokens[1]), b" engine");
        assert_eq!(tokens, encode("the engine frobnicates", &vocabulary));
        assert!(tokens.iter().all(|&token| token != END && token < vocabulary.len()));
    }
}
