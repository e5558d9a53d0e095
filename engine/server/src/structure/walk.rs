//! One answer's way through its form. What it may go on with is found on threads for that, for as long as it may take.

use super::grammar::Grammar;
use crate::machine::{ThreadTime, own_time};
use llguidance::{CancellationHandle, Matcher};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use windlass_engine_core::constraint::{Constraint, MaskUnavailable, TokenSet};
use windlass_engine_core::plan::SequenceFailure;
use windlass_engine_core::request::TokenId;

/// Longest time on a processor for one mask: what `llguidance` does within its limits takes a quarter of it.
const MOST_FOR_ONE: Duration = Duration::from_millis(100);
/// The same for all masks of an answer that took longer than a step waits for.
const MOST_FOR_ALL: Duration = Duration::from_secs(2);
/// Longest that an answer waits for a mask, those of others before it included.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// A mask that took longer counts against its answer.
const COUNTS: Duration = Duration::from_millis(5);

/// Where an answer is in its form.
pub(super) struct Walk {
    grammar: Grammar,
    shared: Arc<Shared>,
}

/// What the thread that finds a mask shares with those that ask.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Absent while a mask is found.
    place: Option<Place>,
    /// What is being found.
    finding: Option<Finding>,
    /// What was found last, and behind which tokens.
    found: Option<(Vec<TokenId>, Result<TokenSet, SequenceFailure>)>,
    /// What slow masks took.
    spent: Duration,
    /// Nothing more is found.
    given_up: bool,
}

/// A mask on its way.
struct Finding {
    asked: Instant,
    /// Whose time it takes, and what that was when it began; absent before.
    began: Option<(ThreadTime, Duration)>,
    /// Ends it.
    handle: Option<CancellationHandle>,
}

struct Place {
    matcher: Matcher,
    /// The tokens that led here.
    passed: Vec<TokenId>,
}

impl Walk {
    pub(super) fn new(grammar: Grammar) -> Walk {
        let place = Some(Place { matcher: grammar.begin(), passed: Vec::new() });
        let state = State { place, finding: None, found: None, spent: Duration::ZERO, given_up: false };
        Walk { grammar, shared: Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() }) }
    }

    /// Has the mask behind `text` found, unless another one is.
    fn begin(&self, state: &mut State, text: &[TokenId]) -> Result<(), SequenceFailure> {
        let Some(place) = state.place.take() else { return Ok(()) };
        let handle = place.matcher.cancellation_handle();
        state.finding = Some(Finding { asked: Instant::now(), began: None, handle });
        let (shared, grammar, text) = (self.shared.clone(), self.grammar.clone(), text.to_vec());
        let find = move |time: &ThreadTime| shared.find(place, &grammar, text, time);
        let none = || SequenceFailure::Uncomputable("there is no thread to find what the form allows".into());
        self.grammar.lanes().find(self.grammar.cost(), Box::new(find)).ok_or_else(none)
    }
}

impl Constraint for Walk {
    fn allowed(&self, generated: &[TokenId], patience: Duration) -> Result<TokenSet, MaskUnavailable> {
        let deadline = Instant::now() + patience;
        let text = self.grammar.text(generated);
        let mut state = self.shared.locked();
        loop {
            if let Some((_, found)) = state.found.as_ref().filter(|(behind, _)| behind == text) {
                return Ok(found.clone()?);
            }
            self.begin(&mut state, text)?;
            state.check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(MaskUnavailable::NotReady);
            }
            let waited = self.shared.changed.wait_timeout(state, left.min(MOST_FOR_ONE));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        // Nobody wants it any more.
        self.shared.locked().give_up();
    }
}

impl Shared {
    /// Finds the mask behind `text`, on a thread whose time that is.
    fn find(&self, mut place: Place, grammar: &Grammar, text: Vec<TokenId>, time: &ThreadTime) {
        if !self.locked().begin(time) {
            return;
        }
        let began = own_time();
        let found = place.mask(&text, grammar);
        let took = own_time().saturating_sub(began);
        grammar.cost().was(took);
        let mut state = self.locked();
        state.finding = None;
        state.spent += if took > COUNTS { took } else { Duration::ZERO };
        let found = match state.spent > MOST_FOR_ALL || place.matcher.is_cancelled() {
            true => Err(too_slow()),
            false => found.map_err(failure),
        };
        (state.place, state.found) = (Some(place), Some((text, found)));
        self.changed.notify_all();
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether it still matters.
    fn begin(&mut self, time: &ThreadTime) -> bool {
        if let Some(finding) = &mut self.finding {
            finding.began = Some((time.clone(), time.spent()));
        }
        !self.given_up
    }

    /// Gives up what takes more than it may.
    fn check(&mut self) -> Result<(), SequenceFailure> {
        let spent = |(time, began): &(ThreadTime, Duration)| time.spent().saturating_sub(*began);
        let over = |finding: &Finding| {
            let waited = finding.asked.elapsed();
            waited > LONGEST_WAIT
                || waited > MOST_FOR_ONE && finding.began.as_ref().is_some_and(|began| spent(began) > MOST_FOR_ONE)
        };
        if self.finding.as_ref().is_some_and(over) {
            self.give_up();
        }
        if self.given_up { Err(too_slow()) } else { Ok(()) }
    }

    fn give_up(&mut self) {
        self.given_up = true;
        if let Some(handle) = self.finding.as_ref().and_then(|finding| finding.handle.as_ref()) {
            handle.cancel();
        }
    }
}

impl Place {
    /// What may follow `text`.
    fn mask(&mut self, text: &[TokenId], grammar: &Grammar) -> Result<TokenSet, String> {
        self.go_to(text, grammar)?;
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
        let mut allowed = TokenSet::from_words(mask.as_slice().to_vec());
        if grammar.ends().iter().any(|end| allowed.contains(*end)) {
            grammar.ends().iter().for_each(|end| allowed.insert(*end));
        }
        Ok(allowed)
    }

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

impl fmt::Debug for Walk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Walk")
    }
}

/// What `llguidance` says where its limits are reached (`limits` of [`super::prepared`]); it has no other way to say so.
const LIMIT_REACHED: &str = "Too many items";

fn failure(why: String) -> SequenceFailure {
    if why.contains(LIMIT_REACHED) { too_slow() } else { SequenceFailure::Unsatisfiable(why) }
}

fn too_slow() -> SequenceFailure {
    let why = "finding out what the form of the answer allows next takes too long; make the form simpler, above all less \
               ambiguous";
    SequenceFailure::TooSlow(why.into())
}
