//! A compiled form.

use super::Thought;
use super::lanes::{Cost, Lanes};
use super::walk::Walk;
use llguidance::Matcher;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use windlass_engine_core::constraint::Constraint;
use windlass_engine_core::request::TokenId;

/// A compiled form, at its beginning.
#[derive(Clone)]
pub struct Grammar {
    beginning: Arc<Mutex<Matcher>>,
    /// Tokens that end a text: allowed where the form may end.
    ends: Arc<[TokenId]>,
    /// Tokens of the vocabulary.
    vocabulary: u32,
    /// Where its masks are found.
    lanes: Arc<Lanes>,
    /// What they cost.
    cost: Cost,
}

impl Grammar {
    pub(super) fn new(matcher: Matcher, ends: Vec<TokenId>, vocabulary: u32, lanes: Arc<Lanes>) -> Grammar {
        let (beginning, cost) = (Arc::new(Mutex::new(matcher)), Cost::default());
        Grammar { beginning, ends: ends.into(), vocabulary, lanes, cost }
    }

    /// A constraint for one answer, which begins after the thoughts where there may be some.
    pub fn constraint(&self, thought: Option<Thought>) -> Arc<dyn Constraint> {
        let walk = Walk::new(self.clone());
        match thought {
            Some(thought) => Arc::new(thought.before(Arc::new(walk), self.vocabulary, &self.ends)),
            None => Arc::new(walk),
        }
    }

    /// What panicked under the lock is `llguidance`, which catches its panics and remembers them.
    pub(super) fn begin(&self) -> Matcher {
        self.beginning.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn ends(&self) -> &[TokenId] {
        &self.ends
    }

    pub(super) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    pub(super) fn cost(&self) -> &Cost {
        &self.cost
    }

    /// The tokens before the end. An end leads nowhere: what follows it, if the client wants to go on, is the end again.
    pub(super) fn text<'a>(&self, generated: &'a [TokenId]) -> &'a [TokenId] {
        let end = generated.iter().position(|token| self.ends.contains(token));
        &generated[..end.unwrap_or(generated.len())]
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grammar")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::structure::compiled;
    use crate::text::tokenizer::Tokenizer;
    use std::time::Duration;
    use windlass_engine_api::structure::{Form, Structure};

    const MINUTE: Duration = Duration::from_secs(60);

    fn walk(choices: &[&str]) -> (Arc<dyn Constraint>, Tokenizer) {
        let tokenizer = Tokenizer::words();
        let form = Form::Choice(choices.iter().map(|choice| (*choice).to_owned()).collect());
        (compiled(&tokenizer, Structure { field: "guided_choice", form }).constraint(None), tokenizer)
    }

    #[test]
    fn only_what_keeps_the_form_is_allowed_forwards_and_back() {
        let (walk, tokenizer) = walk(&[" the block", " the engine", " of"]);
        let tokens = |text: &str| tokenizer.encode(text).unwrap();
        let allowed = |text: &str| walk.allowed(&tokens(text), MINUTE).unwrap().iter().collect::<Vec<_>>();
        let end = tokenizer.special().ends[0];
        assert_eq!(allowed(""), [tokens("the")[0], tokens("of")[0]]);
        let mut next = [tokens("block")[0], tokens("engine")[0]];
        next.sort_unstable();
        assert_eq!(allowed("the"), next);
        assert_eq!(allowed("the engine"), [end]);
        // A preemption takes tokens back, and another text may follow.
        assert_eq!(allowed("the"), next);
        assert_eq!(allowed("of"), [end]);
        assert_eq!(allowed(""), [tokens("the")[0], tokens("of")[0]]);
        assert_eq!(walk.allowed(&[tokens("of")[0], end, end], MINUTE).unwrap().iter().collect::<Vec<_>>(), [end]);
        assert!(walk.allowed(&tokens("block"), MINUTE).is_err());
    }
}
