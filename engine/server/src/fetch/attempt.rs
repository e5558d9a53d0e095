//! Attempts that end early, and how often to try again.

use super::agent::unavailable;
use crate::failure::Failure;
use std::time::Duration;
use tracing::warn;

/// Attempts in a row that may bring nothing.
pub const FRUITLESS_ATTEMPTS: u32 = 4;

/// Why an attempt ended early.
#[derive(Debug)]
pub enum Interruption {
    /// Another attempt may go further.
    Retry(String),
    /// It may not.
    Fatal(Failure),
}

/// Attempts something of `source` until it is done, may not be tried again, or has failed too often.
pub fn persist<T>(
    source: &str,
    first_pause: Duration,
    mut attempt: impl FnMut() -> Result<T, Interruption>,
) -> Result<T, Failure> {
    let mut failed = 0;
    loop {
        let cause = match attempt() {
            Ok(done) => return Ok(done),
            Err(Interruption::Fatal(failure)) => return Err(failure),
            Err(Interruption::Retry(cause)) => cause,
        };
        failed += 1;
        if failed == FRUITLESS_ATTEMPTS {
            return Err(unavailable(source, &format!("{cause} ({FRUITLESS_ATTEMPTS} attempts)")));
        }
        warn!("{source}: {cause}; trying again");
        std::thread::sleep(first_pause * (1 << (failed - 1)));
    }
}
