//! A compiled form, and one answer's way through it.

use super::Thought;
use llguidance::Matcher;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use windlass_engine_core::constraint::{Constraint, TokenSet};
use windlass_engine_core::request::TokenId;

/// A compiled form, at its beginning.
#[derive(Clone)]
pub struct Grammar {
    beginning: Arc<Mutex<Matcher>>,
    /// Tokens that end a text: allowed where the form may end.
    ends: Arc<[TokenId]>,
    /// Tokens of the vocabulary.
    vocabulary: u32,
}

/// Where one answer is in its form.
struct Walk {
    grammar: Grammar,
    place: Mutex<Place>,
}

struct Place {
    matcher: Matcher,
    /// The tokens that led here.
    passed: Vec<TokenId>,
}

impl Grammar {
    pub(super) fn new(matcher: Matcher, ends: Vec<TokenId>, vocabulary: u32) -> Grammar {
        Grammar { beginning: Arc::new(Mutex::new(matcher)), ends: ends.into(), vocabulary }
    }

    /// A constraint for one answer, which begins after the thoughts where there may be some.
    pub fn constraint(&self, thought: Option<Thought>) -> Arc<dyn Constraint> {
        let place = Place { matcher: self.begin(), passed: Vec::new() };
        let walk = Walk { grammar: self.clone(), place: Mutex::new(place) };
        match thought {
            Some(thought) => Arc::new(thought.before(Arc::new(walk), self.vocabulary, &self.ends)),
            None => Arc::new(walk),
        }
    }

    fn begin(&self) -> Matcher {
        locked(&self.beginning).clone()
    }
}

impl Constraint for Walk {
    fn allowed(&self, generated: &[TokenId]) -> Result<TokenSet, String> {
        // An end leads nowhere: what follows it, if the client wants to go on, is the end again.
        let text = generated.iter().position(|token| self.grammar.ends.contains(token));
        let mut place = locked(&self.place);
        place.go_to(&generated[..text.unwrap_or(generated.len())], &self.grammar)?;
        let mask = place.matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
        let mut allowed = TokenSet::from_words(mask.as_slice().to_vec());
        if self.grammar.ends.iter().any(|end| allowed.contains(*end)) {
            self.grammar.ends.iter().for_each(|end| allowed.insert(*end));
        }
        Ok(allowed)
    }
}

impl Place {
    /// Forward, or back first where the answer is not what it was.
    fn go_to(&mut self, text: &[TokenId], grammar: &Grammar) -> Result<(), String> {
        let common = self.passed.iter().zip(text).take_while(|(passed, token)| passed == token).count();
        if common < self.passed.len() {
            self.go_back(common, grammar);
        }
        let ahead = &text[self.passed.len()..];
        self.matcher.consume_tokens(ahead).map_err(|error| error.to_string())?;
        self.passed.extend(ahead);
        Ok(())
    }

    fn go_back(&mut self, passed: usize, grammar: &Grammar) {
        match self.matcher.rollback(self.passed.len() - passed) {
            Ok(()) => self.passed.truncate(passed),
            Err(_) => *self = Place { matcher: grammar.begin(), passed: Vec::new() },
        }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grammar")
    }
}

impl fmt::Debug for Walk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Walk({} tokens)", locked(&self.place).passed.len())
    }
}

/// What panicked under the lock is `llguidance`, which catches its panics and remembers them.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::structure::Structures;
    use crate::text::tokenizer::Tokenizer;
    use windlass_engine_api::structure::{Form, Structure};

    async fn walk(choices: &[&str]) -> (Arc<dyn Constraint>, Arc<Tokenizer>) {
        let tokenizer = Arc::new(Tokenizer::words());
        let form = Form::Choice(choices.iter().map(|choice| (*choice).to_owned()).collect());
        let structures = Arc::new(Structures::new(tokenizer.clone()));
        let structure = Structure { field: "guided_choice", form };
        (structures.compile(structure).await.unwrap().constraint(None), tokenizer)
    }

    #[tokio::test]
    async fn only_what_keeps_the_form_is_allowed_forwards_and_back() {
        let (walk, tokenizer) = walk(&[" the block", " the engine", " of"]).await;
        let tokens = |text: &str| tokenizer.encode(text).unwrap();
        let allowed = |text: &str| walk.allowed(&tokens(text)).unwrap().iter().collect::<Vec<_>>();
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
        assert_eq!(walk.allowed(&[tokens("of")[0], end, end]).unwrap().iter().collect::<Vec<_>>(), [end]);
        assert!(walk.allowed(&tokens("block")).is_err());
    }
}
