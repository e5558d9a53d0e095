//! Real time for the simulated device.

use std::time::{Duration, Instant};
use windlass_engine_core::sim::Pace;

/// Sleeps on the engine's thread as long as a device would compute.
#[derive(Debug)]
pub struct RealTime(Instant);

impl RealTime {
    /// Starts at zero.
    pub fn start() -> RealTime {
        RealTime(Instant::now())
    }
}

impl Pace for RealTime {
    fn now(&mut self) -> Duration {
        self.0.elapsed()
    }

    fn sleep_until(&mut self, time: Duration) {
        std::thread::sleep(time.saturating_sub(self.0.elapsed()));
    }
}
