//! Log lines on standard error. `RUST_LOG` chooses what is written; secrets never are, prompts and answers
//! only where flags ask for it ([`crate::text_log`]).

use crate::cli::LogFormat;
use std::io::{IsTerminal, stderr};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

/// Lines that wait for their reader; more are dropped, since whoever writes them serves others.
const MAX_WAITING_LINES: usize = 10_000;

/// Starts logging, at `level` unless the environment names another. What waits is written when the guard goes.
pub fn start(format: LogFormat, level: &str) -> WorkerGuard {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let (writer, guard) = NonBlockingBuilder::default().buffered_lines_limit(MAX_WAITING_LINES).finish(stderr());
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    let started = match format {
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
        LogFormat::Text => subscriber.with_target(false).with_ansi(stderr().is_terminal()).try_init(),
    };
    if let Err(error) = started {
        eprintln!("windlass-engine: logging could not be started: {error}");
    }
    guard
}
