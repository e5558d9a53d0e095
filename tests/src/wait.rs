//! Waiting for a condition, never for a time: where rest is the condition, for that nothing has changed for a while.

use anyhow::{Result, bail, ensure};
use std::time::{Duration, Instant};

/// Between two looks, at least; else as long as the look took. Looking usually starts `kubectl`, and without a pause it
/// would compete with what is waited for.
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

/// Looks until what is seen has stayed the same for as long as `still`.
///
/// # Errors
/// After `timeout`, or when a look fails.
pub fn until_still<T: PartialEq>(
    what: &str,
    timeout: Duration,
    still: Duration,
    mut look: impl FnMut() -> Result<T>,
) -> Result<T> {
    let started = Instant::now();
    let (mut seen, mut since) = (look()?, Instant::now());
    while since.elapsed() < still {
        ensure!(started.elapsed() < timeout, "{what}: not still for {still:?} within {} s", timeout.as_secs());
        std::thread::sleep(PAUSE);
        let now = look()?;
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
    }
    Ok(seen)
}

/// Looks until it is so.
///
/// # Errors
/// After `timeout`, saying what was awaited and what the last look saw or why it failed. A failed look alone is no
/// reason to stop: an API server may be busy.
pub fn until<T>(what: &str, timeout: Duration, mut look: impl FnMut() -> Result<Look<T>>) -> Result<T> {
    let started = Instant::now();
    loop {
        let looked = Instant::now();
        let seen = match look() {
            Ok(Look::Done(value)) => return Ok(value),
            Ok(Look::NotYet(seen)) => seen,
            Err(error) => format!("{error:#}"),
        };
        if started.elapsed() >= timeout {
            bail!("{what}: not within {} s. Last seen: {seen}", timeout.as_secs());
        }
        std::thread::sleep(PAUSE.max(looked.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_is_not_still() {
        let mut looks = 0;
        let mut count = |most: u32| {
            looks = (looks + 1).min(most);
            Ok(looks)
        };
        let (still, patience) = (Duration::from_millis(600), Duration::from_secs(20));
        assert_eq!(until_still("three", patience, still, || count(3)).expect("still"), 3);
        let error = until_still("ever more", Duration::from_secs(1), still, || count(1000)).expect_err("never");
        assert!(error.to_string().contains("ever more: not still"), "{error}");
    }
}
