//! Prompt lookup: proposes what followed the last tokens at their previous occurrence in the sequence (Saxena,
//! "Prompt lookup decoding", 2023; vLLM's method `ngram`).

use super::{DraftRequest, DraftTree, Proposer, continuation};
use crate::request::{RequestId, TokenId};

/// Last tokens of a sequence that are searched: they bound the time of a proposal.
const WINDOW_TOKENS: usize = 16_384;

/// Searches the sequence for its own last tokens. Stateless.
#[derive(Clone, Copy, Debug)]
pub struct PromptLookup {
    min: usize,
    max: usize,
}

impl PromptLookup {
    /// Matches of `min` to `max` tokens count; longer ones are preferred.
    ///
    /// # Panics
    /// Unless `1 <= min <= max`.
    pub fn new(min: usize, max: usize) -> PromptLookup {
        assert!(0 < min && min <= max, "prompt lookup of {min} to {max} tokens");
        PromptLookup { min, max }
    }

    /// Index after the longest earlier occurrence; among equally long ones, after the last.
    fn find(&self, tokens: &[TokenId]) -> Option<usize> {
        let (last, before) = tokens.split_last()?;
        let mut best = (self.min - 1, None);
        for end in (0..before.len()).rev().filter(|end| before[*end] == *last) {
            let pairs = before[..end].iter().rev().zip(before.iter().rev()).take(self.max - 1);
            let length = 1 + pairs.take_while(|(one, other)| one == other).count();
            if length > best.0 {
                best = (length, Some(end + 1));
            }
            if length == self.max {
                break;
            }
        }
        best.1
    }
}

impl Proposer for PromptLookup {
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Vec<DraftTree> {
        let draft = |request: &DraftRequest<'_>| {
            let tokens = &request.tokens[request.tokens.len().saturating_sub(WINDOW_TOKENS)..];
            self.find(tokens).map_or_else(DraftTree::default, |from| continuation(tokens, from, request.max_tokens))
        };
        requests.iter().map(draft).collect()
    }

    fn is_free(&self) -> bool {
        true
    }

    fn forget(&mut self, _: RequestId) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(min: usize, max: usize, tokens: &[TokenId]) -> DraftTree {
        PromptLookup::new(min, max).propose(&[DraftRequest { request: RequestId(0), tokens, max_tokens: 3 }]).remove(0)
    }

    #[test]
    fn the_longest_occurrence_counts_and_of_these_the_last() {
        // 1 2 occurs twice, 2 alone once more behind them.
        let tokens = [1, 2, 7, 7, 1, 2, 8, 8, 2, 9, 9, 1, 2];
        assert_eq!(draft(1, 3, &tokens), DraftTree::chain([8, 8, 2]));
        assert_eq!(draft(1, 1, &tokens), DraftTree::chain([9, 9, 1]));
        assert_eq!(draft(3, 4, &tokens), DraftTree::default());
        assert_eq!(draft(1, 3, &[4]), DraftTree::default());
        assert!(PromptLookup::new(1, 3).is_free());
        // More than two tokens do not count, however many are the same.
        assert_eq!(draft(1, 2, &[6, 5, 1, 2, 7, 9, 5, 1, 2, 8, 6, 5, 1, 2]), DraftTree::chain([8, 6, 5]));
    }
}
