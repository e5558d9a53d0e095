//! Share of the last minute in which the engine was at work: one writer, any readers, no locks.

use std::sync::atomic::{AtomicU64, Ordering};

/// Length of the mean.
const WINDOW_SECONDS: u64 = 60;
/// More than the window, so that a slot being reused is never one being read.
const SLOTS: usize = 64;
const NOT_RUNNING: u64 = u64::MAX;

/// Busy microseconds of each recent second.
#[derive(Debug)]
pub struct BusyWindow {
    /// The second in the upper half, its busy microseconds in the lower.
    slots: [AtomicU64; SLOTS],
    /// When the turn in progress began, microseconds.
    running_since_us: AtomicU64,
}

impl Default for BusyWindow {
    fn default() -> BusyWindow {
        BusyWindow { slots: std::array::from_fn(|_| AtomicU64::new(0)), running_since_us: AtomicU64::new(NOT_RUNNING) }
    }
}

impl BusyWindow {
    /// A turn begins.
    pub fn begin(&self, now: f64) {
        self.running_since_us.store(to_us(now), Ordering::Relaxed);
    }

    /// The turn that began at `began` ends. Called by one thread only.
    pub fn end(&self, began: f64, now: f64) {
        let oldest = to_us(now).saturating_sub(WINDOW_SECONDS * 1_000_000);
        for (second, busy) in seconds_of(to_us(began).max(oldest), to_us(now)) {
            let slot = &self.slots[second as usize % SLOTS];
            let kept = slot.load(Ordering::Relaxed);
            let before = if kept >> 32 == second { kept & u64::from(u32::MAX) } else { 0 };
            slot.store(second << 32 | (before + busy), Ordering::Relaxed);
        }
        self.running_since_us.store(NOT_RUNNING, Ordering::Relaxed);
    }

    /// How long the turn in progress has lasted, if there is one.
    pub fn running_seconds(&self, now: f64) -> Option<f64> {
        match self.running_since_us.load(Ordering::Relaxed) {
            NOT_RUNNING => None,
            since => Some(to_us(now).saturating_sub(since) as f64 * 1e-6),
        }
    }

    /// Mean over the last minute, 0 to 1, a turn in progress included. `None` in the first second.
    pub fn share(&self, now: f64) -> Option<f64> {
        let now_us = to_us(now);
        let second = now_us / 1_000_000;
        let first = second.saturating_sub(WINDOW_SECONDS - 1);
        let ended: u64 = self
            .slots
            .iter()
            .map(|slot| slot.load(Ordering::Relaxed))
            .filter(|kept| (first..=second).contains(&(kept >> 32)))
            .map(|kept| kept & u64::from(u32::MAX))
            .sum();
        let running = match self.running_since_us.load(Ordering::Relaxed) {
            NOT_RUNNING => 0,
            since => now_us.saturating_sub(since.max(first * 1_000_000)),
        };
        let covered = now_us - first * 1_000_000;
        (second > 0).then(|| ((ended + running) as f64 / covered as f64).min(1.0))
    }
}

fn to_us(seconds: f64) -> u64 {
    (seconds * 1e6) as u64
}

/// The part of `[from, to)` that falls in each second.
fn seconds_of(from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
    (from / 1_000_000..=to / 1_000_000).map(move |second| {
        let start = from.max(second * 1_000_000);
        let end = to.min((second + 1) * 1_000_000);
        (second, end.saturating_sub(start))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(window: &BusyWindow, began: f64, ended: f64) {
        window.begin(began);
        window.end(began, ended);
    }

    fn assert_share(window: &BusyWindow, now: f64, expected: f64) {
        let share = window.share(now).unwrap();
        assert!((share - expected).abs() < 0.001, "{share} at {now}, expected {expected}");
    }

    #[test]
    fn the_share_is_of_the_time_since_the_start_and_later_of_a_minute() {
        let window = BusyWindow::default();
        assert_eq!(window.share(0.5), None);
        turn(&window, 1.0, 3.0);
        assert_share(&window, 4.0, 0.5);
        assert_share(&window, 60.0, 2.0 / 59.0 * 59.0 / 59.0);
        assert_share(&window, 200.0, 0.0);
    }

    #[test]
    fn a_turn_in_progress_counts() {
        let window = BusyWindow::default();
        window.begin(10.0);
        assert_share(&window, 20.0, 0.5);
        assert_share(&window, 500.0, 1.0);
    }

    #[test]
    fn an_old_second_gives_its_slot_away() {
        let window = BusyWindow::default();
        for second in 0..500 {
            turn(&window, f64::from(second), f64::from(second) + 0.25);
        }
        assert_share(&window, 500.0, 0.25);
    }
}
