//! Forward progress: how long work has been there without a finished step.

use std::sync::atomic::{AtomicU64, Ordering};

const IDLE: u64 = u64::MAX;

/// When the engine last got on, while it has work.
#[derive(Debug)]
pub struct Progress(AtomicU64);

impl Default for Progress {
    fn default() -> Progress {
        Progress(AtomicU64::new(IDLE))
    }
}

impl Progress {
    /// Work came, or a step was finished: from `now` on the next step is awaited.
    pub fn made(&self, now: f64) {
        self.0.store((now * 1e6) as u64, Ordering::Relaxed);
    }

    /// There is no work.
    pub fn idle(&self) {
        self.0.store(IDLE, Ordering::Relaxed);
    }

    /// Seconds since the last step, or since work came; 0 without work.
    pub fn stalled_seconds(&self, now: f64) -> f64 {
        match self.0.load(Ordering::Relaxed) {
            IDLE => 0.0,
            since => (now - since as f64 * 1e-6).max(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_with_work_and_without_steps_counts() {
        let progress = Progress::default();
        let assert_stalled = |now: f64, expected: f64| {
            let stalled = progress.stalled_seconds(now);
            assert!((stalled - expected).abs() < 1e-5, "{stalled} at {now}, expected {expected}");
        };
        assert_stalled(100.0, 0.0);
        progress.made(100.0);
        assert_stalled(103.0, 3.0);
        progress.made(104.0);
        assert_stalled(105.0, 1.0);
        progress.idle();
        assert_stalled(9000.0, 0.0);
        // A long rest is no stall when work comes again.
        progress.made(9000.0);
        assert_stalled(9000.5, 0.5);
    }
}
