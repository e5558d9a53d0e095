//! Waiting for a condition, never for a time.

use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// Between two looks. A look usually starts `kubectl`, so a shorter pause would compete with what is waited for.
const PAUSE: Duration = Duration::from_millis(250);

/// What a look found.
pub enum Look<T> {
    /// It is so.
    Done(T),
    /// Not yet, and what was seen instead.
    NotYet(String),
}

impl<T> Look<T> {
    /// `Done(value)` if `holds`, else what was `seen`.
    pub fn when(holds: bool, value: T, seen: impl Into<String>) -> Look<T> {
        if holds { Look::Done(value) } else { Look::NotYet(seen.into()) }
    }
}

/// Looks until it is so.
///
/// # Errors
/// After `timeout`, saying what was awaited and what the last look saw or why it failed. A failed look alone is no
/// reason to stop: an API server may be busy.
pub fn until<T>(what: &str, timeout: Duration, mut look: impl FnMut() -> Result<Look<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        let seen = match look() {
            Ok(Look::Done(value)) => return Ok(value),
            Ok(Look::NotYet(seen)) => seen,
            Err(error) => format!("{error:#}"),
        };
        if started.elapsed() >= timeout {
            bail!("{what}: not within {} s. Last seen: {seen}", timeout.as_secs());
        }
        std::thread::sleep(PAUSE);
    }
}
