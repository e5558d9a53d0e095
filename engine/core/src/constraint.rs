//! Constrained decoding: token masks from a grammar, for example.

use std::fmt;
use std::time::Duration;

use crate::plan::SequenceFailure;
use crate::request::TokenId;

/// Computes token masks. The executor calls it while the model computes, so a mask may take about as long as a step.
pub trait Constraint: fmt::Debug + Send + Sync {
    /// The tokens that may follow `generated`, or [`MaskUnavailable::NotReady`] if they are not known within
    /// `timeout`; they are then computed in the background. From one call to the next `generated` mostly grows by a
    /// token; after a preemption it may be shorter.
    fn allowed(&self, generated: &[TokenId], timeout: Duration) -> Result<TokenSet, MaskUnavailable>;
}

/// Why there is no token mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MaskUnavailable {
    /// It is not ready: the sequence samples no token in this step.
    NotReady,
    /// The sequence fails.
    Failed(SequenceFailure),
}

impl From<SequenceFailure> for MaskUnavailable {
    fn from(failure: SequenceFailure) -> MaskUnavailable {
        MaskUnavailable::Failed(failure)
    }
}

/// A token mask: a set of tokens as bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u32>,
}

impl TokenSet {
    /// The set of the tokens whose bits are set, 32 to a word, lowest first.
    pub fn from_words(words: Vec<u32>) -> TokenSet {
        TokenSet { words }
    }

    /// The bits. Trailing words without a set bit may be missing.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Adds a token.
    pub fn insert(&mut self, token: TokenId) {
        let word = token as usize / 32;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (token % 32);
    }

    /// Whether a token is in it.
    pub fn contains(&self, token: TokenId) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// The tokens, ascending.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> {
        let bits =
            |(word, bits): (u32, u32)| (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word * 32 + bit);
        (0..).zip(self.words.iter().copied()).flat_map(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_what_was_put_in() {
        let mut set = TokenSet::from_words(vec![0b101]);
        set.insert(31);
        set.insert(64);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 2, 31, 64]);
        assert!(set.contains(64) && !set.contains(1) && !set.contains(4_000_000));
    }
}
