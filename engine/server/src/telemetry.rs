//! Log lines on standard error. `RUST_LOG` chooses what is written; secrets never are, prompts and answers
//! only where flags ask for it ([`crate::text_log`]).

use crate::cli::LogFormat;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Starts logging, at `level` unless the environment names another.
pub fn start(format: LogFormat, level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
        LogFormat::Text => subscriber.with_target(false).with_ansi(std::io::stderr().is_terminal()).try_init(),
    };
    if let Err(error) = started {
        eprintln!("windlass-engine: logging could not be started: {error}");
    }
}
