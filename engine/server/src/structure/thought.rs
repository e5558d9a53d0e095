//! A form that begins after what the model thinks first.

use std::sync::Arc;
use std::time::Duration;
use windlass_engine_core::constraint::{Constraint, MaskUnavailable, TokenSet};
use windlass_engine_core::request::TokenId;

/// The tokens around thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thought {
    /// Begins one.
    pub begin: TokenId,
    /// Ends it.
    pub end: TokenId,
    /// The prompt ends inside one.
    pub inside: bool,
}

/// Thoughts are free, the answer after them is not.
#[derive(Debug)]
pub struct AfterThought {
    thought: Thought,
    /// Every token but those that end an answer.
    free: TokenSet,
    answer: Arc<dyn Constraint>,
}

impl Thought {
    /// Puts the thought before an answer's constraint.
    pub fn before(self, answer: Arc<dyn Constraint>, vocabulary: u32, ends: &[TokenId]) -> AfterThought {
        let mut free = TokenSet::default();
        (0..vocabulary).filter(|token| !ends.contains(token)).for_each(|token| free.insert(token));
        AfterThought { thought: self, free, answer }
    }
}

impl Constraint for AfterThought {
    fn allowed(&self, generated: &[TokenId], patience: Duration) -> Result<TokenSet, MaskUnavailable> {
        let Thought { begin, end, inside } = self.thought;
        if !inside && generated.first() != Some(&begin) {
            let mut allowed = self.answer.allowed(generated, patience)?;
            if generated.is_empty() {
                allowed.insert(begin);
            }
            return Ok(allowed);
        }
        match generated.iter().position(|token| *token == end) {
            Some(at) => self.answer.allowed(&generated[at + 1..], patience),
            None => Ok(self.free.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows only token 7.
    #[derive(Debug)]
    struct Seven;

    impl Constraint for Seven {
        fn allowed(&self, _: &[TokenId], _: Duration) -> Result<TokenSet, MaskUnavailable> {
            Ok(TokenSet::from_words(vec![1 << 7]))
        }
    }

    #[test]
    fn thoughts_are_free_and_answers_keep_their_form() {
        let (begin, end, stop) = (1, 2, 3);
        let allowed = |inside: bool, generated: &[TokenId]| -> Vec<TokenId> {
            let thought = Thought { begin, end, inside };
            thought.before(Arc::new(Seven), 10, &[stop]).allowed(generated, Duration::ZERO).unwrap().iter().collect()
        };
        let free = [0, 1, 2, 4, 5, 6, 7, 8, 9];
        assert_eq!(allowed(false, &[]), [begin, 7]);
        assert_eq!(allowed(false, &[7]), [7]);
        assert_eq!(allowed(false, &[begin, 5]), free);
        assert_eq!(allowed(false, &[begin, 5, end]), [7]);
        assert_eq!(allowed(true, &[]), free);
        assert_eq!(allowed(true, &[4, end, 7]), [7]);
    }
}
