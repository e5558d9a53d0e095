//! Answers of a given form: JSON by a schema, a regular expression, one of several texts, a grammar.
//!
//! `llguidance` decides which tokens keep the form; it is compiled away from the engine and from the runtime's threads,
//! within limits of size, time and number, and kept for the next request. The engine asks for the allowed tokens while
//! the model computes.

mod form;
mod grammar;
mod limited;
mod prepared;
mod thought;

use crate::text::tokenizer::Tokenizer;
use limited::{GivenUp, Limits, limited};
use prepared::Prepared;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use windlass_engine_api::structure::Structure;

pub(crate) use form::with_whitespace;
pub use grammar::Grammar;
pub use thought::Thought;

/// How long compiling may take.
const LIMITS: Limits = Limits { time: Duration::from_secs(1), patience: Duration::from_secs(10) };
/// Forms compiled at once: more than one, so that one that was given up and goes on does not keep all others out.
const AT_ONCE: usize = 2;
/// Compiled forms kept.
const KEPT: usize = 64;

/// The forms of one model.
pub struct Structures {
    tokenizer: Arc<Tokenizer>,
    /// What `llguidance` knows of the vocabulary; made when first needed.
    prepared: OnceLock<Result<Prepared, String>>,
    kept: Mutex<VecDeque<(String, Grammar)>>,
    permits: Arc<Semaphore>,
}

/// A form that cannot be kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StructureError {
    /// It is no form, or one beyond the limits.
    #[error("`{field}` cannot be used: {reason}")]
    Invalid {
        /// The request's field.
        field: &'static str,
        /// Why.
        reason: String,
    },
    /// It takes too long.
    #[error("`{field}` takes longer than {} s to compile; make it simpler", LIMITS.time.as_secs())]
    TooSlow {
        /// The request's field.
        field: &'static str,
    },
    /// Others take the time.
    #[error("there is no time now to compile the form of the answer; try again")]
    Busy,
}

impl Structures {
    /// Knows no form yet.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Structures {
        let (prepared, kept) = (OnceLock::new(), Mutex::default());
        Structures { tokenizer, prepared, kept, permits: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Compiles a form, or finds it among those that were.
    pub async fn compile(self: &Arc<Structures>, structure: Structure) -> Result<Grammar, StructureError> {
        let field = structure.field;
        let form = form::of(structure).map_err(|reason| StructureError::Invalid { field, reason })?;
        if let Some(known) = self.find(&form.key) {
            return Ok(known);
        }
        self.prepare().await;
        let permit = timeout(LIMITS.patience, self.permits.clone().acquire_owned()).await;
        let permit = permit.ok().and_then(Result::ok).ok_or(StructureError::Busy)?;
        let structures = self.clone();
        let compiled = limited(LIMITS, move || {
            // Held until the work is done, though nobody may wait for it any more.
            let _permit = permit;
            structures.compile_now(form)
        });
        match compiled.await {
            Ok(compiled) => compiled.map_err(|reason| StructureError::Invalid { field, reason }),
            Err(GivenUp::TooSlow) => Err(StructureError::TooSlow { field }),
            Err(GivenUp::Busy) => Err(StructureError::Busy),
            Err(GivenUp::Panicked) => Err(StructureError::Invalid { field, reason: "compiling it failed".to_owned() }),
        }
    }

    /// Reads the vocabulary for the first form, which takes longer than a form may and is not that one's time.
    async fn prepare(self: &Arc<Structures>) {
        if self.prepared.get().is_none() {
            let structures = self.clone();
            // What goes wrong is said to the form that needs it.
            let _ = tokio::task::spawn_blocking(move || structures.prepared().is_ok()).await;
        }
    }

    fn prepared(&self) -> Result<&Prepared, String> {
        self.prepared.get_or_init(|| Prepared::new(&self.tokenizer)).as_ref().map_err(String::clone)
    }

    fn compile_now(&self, form: form::Compilable) -> Result<Grammar, String> {
        let grammar = self.prepared()?.compile(form.grammar)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back((form.key, grammar.clone()));
        if kept.len() > KEPT {
            kept.pop_front();
        }
        Ok(grammar)
    }

    fn find(&self, key: &str) -> Option<Grammar> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|(known, _)| known == key).map(|(_, grammar)| grammar.clone())
    }
}
