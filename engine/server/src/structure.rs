//! Answers of a given form: JSON by a schema, a regular expression, one of several texts, a grammar.
//!
//! `llguidance` decides which tokens keep the form; it is compiled away from the engine and from the runtime's threads,
//! after a process of its own has shown that it can be, within limits of size, time and number, and kept for the next
//! request. The engine asks for the allowed tokens while
//! the model computes.

mod chain;
mod form;
mod grammar;
mod lanes;
mod limited;
mod prepared;
mod thought;
mod trial;
mod walk;

use crate::machine;
use crate::text::chat_template::TemplateError;
use crate::text::renderers::{Answer, Job, Renderers};
use crate::text::tokenizer::Tokenizer;
use limited::{GivenUp, Limits, limited};
use prepared::Prepared;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use windlass_engine_api::structure::Structure;

pub use form::Source;
pub(crate) use form::with_whitespace;
pub use grammar::Grammar;
pub use thought::Thought;
pub use trial::try_out;

/// How long compiling may take.
const LIMITS: Limits = Limits { time: Duration::from_secs(1), patience: Duration::from_secs(10) };
/// Forms compiled at once: more than one, so that one that was given up and goes on does not keep all others out.
const AT_ONCE: usize = 2;
/// Compiled forms kept.
const KEPT: usize = 64;

/// The forms of one model.
pub struct Structures {
    tokenizer: Arc<Tokenizer>,
    /// Where forms are tried.
    trials: Arc<Renderers>,
    /// What `llguidance` knows of the vocabulary.
    prepared: OnceLock<Result<Prepared, String>>,
    kept: Mutex<VecDeque<(Source, Grammar)>>,
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
    /// There is no process to try it in.
    #[error("there is no process to compile the form of the answer in: {0}")]
    NoProcess(String),
    /// Others take the time.
    #[error("there is no time now to compile the form of the answer; try again")]
    Busy,
}

impl Structures {
    /// Knows no form yet. `program` is this one: forms are tried in processes of it.
    pub fn new(tokenizer: Arc<Tokenizer>, program: &Path) -> Structures {
        let (prepared, kept) = (OnceLock::new(), Mutex::default());
        let trials = Renderers::new(program.to_owned(), AT_ONCE);
        Structures { tokenizer, trials, prepared, kept, permits: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Compiles a form, or finds it among those that were.
    pub async fn compile(self: &Arc<Structures>, structure: Structure) -> Result<Grammar, StructureError> {
        let field = structure.field;
        let invalid = |reason| StructureError::Invalid { field, reason };
        let source = form::of(structure).map_err(invalid)?;
        if let Some(known) = self.find(&source) {
            return Ok(known);
        }
        self.prepare().await;
        let permit = timeout(LIMITS.patience, self.permits.clone().acquire_owned()).await;
        let permit = permit.ok().and_then(Result::ok).ok_or(StructureError::Busy)?;
        self.try_out(field, &source).await?;
        let structures = self.clone();
        let compiled = limited(LIMITS, move || {
            // Held until the work is done, though nobody may wait for it any more.
            let _permit = permit;
            structures.compile_now(source)
        });
        match compiled.await {
            Ok(compiled) => compiled.map_err(invalid),
            Err(GivenUp::TooSlow) => Err(StructureError::TooSlow { field }),
            Err(GivenUp::Busy) => Err(StructureError::Busy),
            Err(GivenUp::Panicked) => Err(invalid("compiling it failed".to_owned())),
        }
    }

    /// Whether compiling it takes no more than there is.
    async fn try_out(&self, field: &'static str, source: &Source) -> Result<(), StructureError> {
        match self.trials.run(Job::Form(source.clone())).await {
            Ok(Answer::Tried { bytes }) if self.has_room(bytes) => Ok(()),
            Ok(Answer::Tried { .. }) => Err(StructureError::Busy),
            Ok(other) => Err(StructureError::NoProcess(other.unexpected().to_string())),
            Err(TemplateError::Busy) => Err(StructureError::Busy),
            Err(TemplateError::Failed(reason)) => Err(StructureError::Invalid { field, reason }),
            Err(error) => Err(StructureError::NoProcess(error.to_string())),
        }
    }

    /// Whether there is memory for a form with which a process held so much. Forms that are kept make room.
    fn has_room(&self, bytes: u64) -> bool {
        let has_room = || machine::free_memory_bytes().is_none_or(|free| free >= room_for(bytes));
        has_room() || {
            self.kept.lock().unwrap_or_else(PoisonError::into_inner).clear();
            has_room()
        }
    }

    /// Tokens that they choose from.
    pub fn vocabulary(&self) -> u32 {
        self.tokenizer.vocabulary().len()
    }

    /// Bytes of the tables that all forms share, once there are any.
    pub fn table_bytes(&self) -> Option<u64> {
        self.prepared.get()?.as_ref().ok().map(|prepared| prepared.bytes)
    }

    /// Reads the vocabulary, which takes longer than a form may: when the server starts, or for the first form if that is
    /// as early.
    pub async fn prepare(self: &Arc<Structures>) {
        if self.prepared.get().is_none() {
            let structures = self.clone();
            // What goes wrong is said to the form that needs it.
            let _ = tokio::task::spawn_blocking(move || structures.prepared().is_ok()).await;
        }
    }

    fn prepared(&self) -> Result<&Prepared, String> {
        self.prepared.get_or_init(|| Prepared::new(&self.tokenizer)).as_ref().map_err(String::clone)
    }

    fn compile_now(&self, source: Source) -> Result<Grammar, String> {
        let grammar = self.prepared()?.compile(&source)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back((source, grammar.clone()));
        if kept.len() > KEPT {
            kept.pop_front();
        }
        Ok(grammar)
    }

    fn find(&self, source: &Source) -> Option<Grammar> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|(known, _)| known == source).map(|(_, grammar)| grammar.clone())
    }
}

/// What has to be free to compile a form with which a process held so much: as much again for what the vocabulary adds,
/// and something for everything else.
fn room_for(bytes: u64) -> u64 {
    const REST: u64 = 16 << 20;
    2 * bytes + REST
}

/// A form of a test, which is harmless.
#[cfg(test)]
pub(crate) fn compiled(tokenizer: &Tokenizer, structure: Structure) -> Grammar {
    let prepared = Prepared::new(tokenizer).expect("a vocabulary with an end");
    prepared.compile(&form::of(structure).expect("a form")).expect("a form that compiles")
}
