//! Why the program ends without having done its work: one reason with an exit code, one message for people.

use std::fmt::Display;
use std::path::Path;
use windlass_engine_contract::paths::TERMINATION_LOG;
use windlass_engine_contract::termination::{Reason, Termination};

/// A fatal error with its stable reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// Decides the exit code and the condition's reason.
    pub reason: Reason,
    /// One or two sentences with the numbers and the next step.
    pub message: String,
}

/// Messages quote files and flags, which may hold anything; Kubernetes keeps 4 KiB of a last word.
const MAX_MESSAGE_CHARS: usize = 2000;

/// `text`, or its beginning.
pub fn bounded(mut text: String, most_chars: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(most_chars) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl Failure {
    /// A failure with this reason.
    pub fn new(reason: Reason, message: impl Display) -> Failure {
        Failure { reason, message: bounded(message.to_string(), MAX_MESSAGE_CHARS) }
    }

    /// A flag is wrong.
    pub fn configuration(message: impl Display) -> Failure {
        Failure::new(Reason::InvalidConfiguration, message)
    }

    /// A defect of ours.
    pub fn internal(message: impl Display) -> Failure {
        Failure::new(Reason::Internal, message)
    }

    /// Tells the person at the terminal and, through `log`, the operator.
    ///
    /// Without `log` the default file is used if it exists: inside a pod it always does, elsewhere it is not ours to
    /// create.
    pub fn report(&self, log: Option<&Path>) {
        eprintln!("windlass-engine: {:?}: {}", self.reason, self.message);
        let termination = Termination { reason: self.reason, message: self.message.clone() };
        last_word(&termination.to_json(), log);
    }
}

/// Leaves `text` as the process's termination message: in `log`, or where Kubernetes looks for it.
pub fn last_word(text: &str, log: Option<&Path>) {
    let default = Path::new(TERMINATION_LOG);
    let Some(path) = log.or_else(|| default.exists().then_some(default)) else { return };
    if let Err(error) = std::fs::write(path, text) {
        eprintln!("windlass-engine: could not write the termination message to {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_has_an_end() {
        let failure = Failure::configuration(format!("the architecture {} is not known", "é".repeat(200_000)));
        assert_eq!(failure.message.chars().count(), MAX_MESSAGE_CHARS + 1);
    }

    #[test]
    fn a_failure_leaves_its_last_word() {
        let file = tempfile::NamedTempFile::new().unwrap();
        Failure::new(Reason::ChecksumMismatch, "expected a, found b").report(Some(file.path()));
        let written = std::fs::read_to_string(file.path()).unwrap();
        let read = Termination::parse(&written).unwrap();
        assert_eq!((read.reason, read.message.as_str()), (Reason::ChecksumMismatch, "expected a, found b"));
    }
}
