//! Modelled time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use windlass_engine_core::sim::Pace;

/// A clock that only sleeping moves.
#[derive(Clone, Default)]
pub struct TestClock(Arc<Mutex<Duration>>);

impl Pace for TestClock {
    fn now(&mut self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn sleep_until(&mut self, time: Duration) {
        let mut now = self.0.lock().unwrap();
        *now = time.max(*now);
    }
}
