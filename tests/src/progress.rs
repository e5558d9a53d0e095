//! Says what is going on, one line a phase, and keeps how long each took.

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The phases of a run.
pub struct Progress {
    started: Instant,
    phases: Vec<(String, Duration)>,
}

impl Default for Progress {
    fn default() -> Self {
        Progress { started: Instant::now(), phases: Vec::new() }
    }
}

impl Progress {
    /// Counts from the moment that `WINDLASS_STARTED_MS` names (milliseconds since 1970), which a calling script sets so
    /// that its own work, `title`, is not left out; from now without it.
    pub fn since_environment(title: &str) -> Progress {
        let set = std::env::var("WINDLASS_STARTED_MS").ok().and_then(|value| value.parse().ok());
        let before =
            set.and_then(|started| SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_millis(started)).ok());
        let started = before.and_then(|before| Some((Instant::now().checked_sub(before)?, before)));
        let Some((started, before)) = started else { return Progress::default() };
        eprintln!("✓ {title} {}", dotted(title, before));
        Progress { started, phases: vec![(title.to_owned(), before)] }
    }

    /// Does one phase and prints its time. The phase gets the bar that turns meanwhile; it must suspend it to print.
    ///
    /// # Errors
    /// The phase's own, with its title.
    pub fn phase<T>(&mut self, title: &str, work: impl FnOnce(&ProgressBar) -> Result<T>) -> Result<T> {
        let spinner = spinner(title);
        let started = Instant::now();
        let result = work(&spinner);
        let took = started.elapsed();
        spinner.finish_and_clear();
        eprintln!("{} {title} {}", mark(&result), dotted(title, took));
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

/// Counts many of a kind as they end: a line for each, and on a terminal a bar below them.
pub struct Tally {
    bar: ProgressBar,
}

impl Tally {
    /// For so many.
    pub fn new(total: usize) -> Tally {
        let bar = ProgressBar::new(total as u64);
        let style = ProgressStyle::with_template("{bar:40} {pos} of {len}, {elapsed}, {eta} more");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Tally { bar }
    }

    /// Does one of them and prints its time, and at once what went wrong.
    ///
    /// # Errors
    /// Its own.
    pub fn one<T>(&self, title: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let result = work();
        let took = started.elapsed();
        self.bar.suspend(|| {
            eprintln!("{} {title} {}", mark(&result), dotted(title, took));
            let _ = result.as_ref().inspect_err(|error| eprintln!("{error:#}"));
        });
        self.bar.inc(1);
        result
    }
}

fn mark<T>(result: &Result<T>) -> &'static str {
    if result.is_ok() { "✓" } else { "✗" }
}

/// Turns on a terminal; draws nothing elsewhere.
fn spinner(title: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg} {elapsed:.dim}");
    let spinner = ProgressBar::new_spinner().with_message(title.to_owned());
    spinner.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    spinner.enable_steady_tick(Duration::from_millis(120));
    spinner
}

/// Dots up to a common column, then seconds.
fn dotted(title: &str, took: Duration) -> String {
    let dots = 52_usize.saturating_sub(title.chars().count());
    format!("{} {:>6.1} s", ".".repeat(dots), took.as_secs_f64())
}
