//! Log lines on standard error, dropped where nobody reads them: whoever writes them leads others.

use crate::config::LogFormat;
use std::io::{IsTerminal, Write, stderr};
use tracing::Subscriber;
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt;

/// Lines that wait for their reader; more are dropped.
const MAX_WAITING_LINES: usize = 10_000;

/// Starts logging for the whole process. What waits is written when the guard goes.
///
/// # Errors
/// Directives that do not parse, or a second call.
pub fn start(format: LogFormat, level: &str) -> anyhow::Result<WorkerGuard> {
    let filter = EnvFilter::try_new(level).map_err(|error| anyhow::anyhow!("--log-level {level:?}: {error}"))?;
    let (lines, guard) = lines(format, filter, stderr().is_terminal(), stderr());
    lines.try_init().map_err(|error| anyhow::anyhow!("logging: {error}"))?;
    Ok(guard)
}

/// Writes to `to` from a thread of its own.
fn lines(
    format: LogFormat,
    filter: EnvFilter,
    is_coloured: bool,
    to: impl Write + Send + 'static,
) -> (Box<dyn Subscriber + Send + Sync>, WorkerGuard) {
    let (writer, guard) = NonBlockingBuilder::default().buffered_lines_limit(MAX_WAITING_LINES).finish(to);
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_ansi(is_coloured);
    let lines: Box<dyn Subscriber + Send + Sync> = match format {
        LogFormat::Text => Box::new(lines.finish()),
        LogFormat::Json => Box::new(lines.json().flatten_event(true).with_span_list(false).finish()),
    };
    (lines, guard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::mpsc;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn a_log_that_nobody_reads_holds_up_nobody() {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let (lines, guard) = lines(LogFormat::Json, EnvFilter::new("info"), false, writer);
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            // Sixteen times what a pipe holds.
            let long = "word ".repeat(20_000);
            tracing::subscriber::with_default(lines, || (0..10).for_each(|_| tracing::info!(long, "said")));
            done.send(()).expect("a listener");
        });
        is_done.recv_timeout(PATIENCE).expect("every line was taken, or dropped, at once");
        // A reader who comes late has the first of them.
        let mut beginning = [0; 1 << 10];
        reader.read_exact(&mut beginning).expect("a line");
        assert!(String::from_utf8_lossy(&beginning).contains("\"long\":\"word word"));
        drop((reader, guard));
    }
}
