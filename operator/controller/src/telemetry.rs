//! Log lines on standard error.

use crate::config::LogFormat;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Starts logging for the whole process.
///
/// # Errors
/// Directives that do not parse, or a second call.
pub fn start(format: LogFormat, level: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(level).map_err(|error| anyhow::anyhow!("--log-level {level:?}: {error}"))?;
    let is_terminal = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(is_terminal);
    let started = match format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("logging: {error}"))
}
