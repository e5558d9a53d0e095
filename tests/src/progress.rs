//! Says what is going on, one line a phase, and keeps how long each took.

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The phases of a run.
pub struct Progress {
    started: Instant,
    phases: Vec<(String, Duration)>,
}

/// A phase in progress.
pub struct Phase {
    spinner: Option<ProgressBar>,
}

impl Phase {
    /// Shows how far the phase is, where there is a terminal to show it on.
    pub fn note(&self, text: impl Into<String>) {
        if let Some(spinner) = &self.spinner {
            spinner.set_prefix(text.into());
        }
    }
}

impl Default for Progress {
    fn default() -> Self {
        Progress { started: Instant::now(), phases: Vec::new() }
    }
}

impl Progress {
    /// Counts from the moment that `WINDLASS_STARTED_MS` names (milliseconds since 1970), which a calling script sets so
    /// that its own time is not left out; from now without it.
    pub fn since_environment() -> Progress {
        let set = std::env::var("WINDLASS_STARTED_MS").ok().and_then(|value| value.parse().ok());
        let before =
            set.and_then(|started| SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_millis(started)).ok());
        let started = before.and_then(|before| Instant::now().checked_sub(before));
        Progress { started: started.unwrap_or_else(Instant::now), phases: Vec::new() }
    }

    /// Does one phase and prints its time.
    ///
    /// # Errors
    /// The phase's own, with its title.
    pub fn phase<T>(&mut self, title: &str, work: impl FnOnce(&Phase) -> Result<T>) -> Result<T> {
        let phase = Phase { spinner: spinner(title) };
        let started = Instant::now();
        let result = work(&phase);
        let took = started.elapsed();
        if let Some(spinner) = &phase.spinner {
            spinner.finish_and_clear();
        }
        let mark = if result.is_ok() { "✓" } else { "✗" };
        eprintln!("{mark} {title} {}", dotted(title, took));
        self.phases.push((title.to_owned(), took));
        result.with_context(|| format!("{title}: failed"))
    }

    /// Since the run began.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Phases in order, with their times.
    pub fn phases(&self) -> &[(String, Duration)] {
        &self.phases
    }
}

fn spinner(title: &str) -> Option<ProgressBar> {
    if !std::io::stderr().is_terminal() {
        return None;
    }
    let style = ProgressStyle::with_template("{spinner} {msg} {prefix:.dim} {elapsed:.dim}");
    let spinner = ProgressBar::new_spinner().with_message(title.to_owned());
    spinner.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    spinner.enable_steady_tick(Duration::from_millis(120));
    Some(spinner)
}

/// Dots up to a common column, then seconds.
fn dotted(title: &str, took: Duration) -> String {
    let dots = 52_usize.saturating_sub(title.chars().count());
    format!("{} {:>6.1} s", ".".repeat(dots), took.as_secs_f64())
}
