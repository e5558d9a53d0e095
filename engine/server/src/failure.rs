//! Why the program ends without having done its work: one reason with an exit code, one message for people.

use std::ffi::CString;
use std::fmt::Display;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use windlass_checkpoint::{BYTES, LastWord, say_on_lost_file, say_on_lost_memory};
use windlass_engine_contract::paths::TERMINATION_LOG;
use windlass_engine_contract::termination::{Reason, Termination};
use windlass_engine_model::refused_bytes;

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

    /// Has the system tell the same where a model's file is cut short, or its disk fails, while it is read: that ends the process
    /// wherever it is.
    pub fn prepare_for_lost_files(log: Option<&Path>) -> Result<(), Failure> {
        let message = "a file of the model was cut short, or its disk failed, while it was read: replace files of models that \
                       are in use by renaming others over them, and never write into them";
        let word = Failure::new(Reason::ModelInvalid, message).last_word(log);
        say_on_lost_file(word).map_err(|error| Failure::internal(format!("cannot handle SIGBUS: {error}")))
    }

    /// Has the system tell the same where memory is refused to who cannot do without it.
    pub fn prepare_for_lost_memory(log: Option<&Path>) -> Result<(), Failure> {
        let message = format!(
            "{BYTES} bytes were asked for and the system refused them: let the process have more memory (RLIMIT_AS, or what \
             vm.overcommit_memory allows), or have it take less, by --kv-cache-memory-bytes, --max-num-seqs and \
             --body-memory-bytes"
        );
        let word = Failure::new(Reason::OutOfMemory, message).last_word(log);
        let done = say_on_lost_memory(word, refused_bytes);
        done.map_err(|error| Failure::internal(format!("cannot handle SIGABRT: {error}")))
    }

    /// What is said and left where there is nobody to report.
    fn last_word(&self, log: Option<&Path>) -> LastWord {
        let path = log_path(log).and_then(|path| CString::new(path.as_os_str().as_bytes()).ok());
        let left = path.map(|path| (path, self.termination().to_json()));
        LastWord { said: format!("{}\n", self.line()), left, exit_code: self.reason.exit_code() }
    }

    fn line(&self) -> String {
        format!("windlass-engine: {:?}: {}", self.reason, self.message)
    }

    fn termination(&self) -> Termination {
        Termination { reason: self.reason, message: self.message.clone() }
    }

    /// Tells the person at the terminal and, through `log`, the operator.
    ///
    /// Without `log` the default file is used if it exists: inside a pod it always does, elsewhere it is not ours to
    /// create.
    pub fn report(&self, log: Option<&Path>) {
        eprintln!("{}", self.line());
        last_word(&self.termination().to_json(), log);
    }
}

/// Leaves `text` as the process's termination message: in `log`, or where Kubernetes looks for it.
pub fn last_word(text: &str, log: Option<&Path>) {
    let Some(path) = log_path(log) else { return };
    if let Err(error) = std::fs::write(path, text) {
        eprintln!("windlass-engine: could not write the termination message to {}: {error}", path.display());
    }
}

fn log_path(log: Option<&Path>) -> Option<&Path> {
    let default = Path::new(TERMINATION_LOG);
    log.or_else(|| default.exists().then_some(default))
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
