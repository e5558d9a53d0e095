//! Seconds since the program started: the one time base of the engine, its metrics and its probes.

use std::time::Instant;

/// Measures from the moment it was made. Copies agree with each other.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts at zero.
    pub fn start() -> Clock {
        Clock(Instant::now())
    }

    /// Seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }
}
