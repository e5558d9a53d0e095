//! Readings of engines with their ages: bounded, and nothing but arithmetic on them.

use std::collections::{BTreeMap, VecDeque};

use jiff::Timestamp;
use windlass_engine_contract::stats::Stats;

/// Readings of a service's pods, by pod name.
#[derive(Clone, Debug, Default)]
pub struct LoadWindow {
    pods: BTreeMap<String, PodReadings>,
}

/// Readings of one pod.
#[derive(Clone, Debug, Default)]
pub struct PodReadings {
    readings: VecDeque<Reading>,
    failure: Option<Failure>,
}

/// One reading.
#[derive(Clone, Debug)]
pub struct Reading {
    /// When it was taken.
    pub at: Timestamp,
    /// What the engine said.
    pub stats: Stats,
}

/// A scrape that brought nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// When it was tried.
    pub at: Timestamp,
    /// What went wrong.
    pub message: String,
}

impl LoadWindow {
    /// Adds a reading of `pod` and forgets what is too old to matter.
    pub fn record(&mut self, pod: &str, at: Timestamp, stats: Stats) {
        let entry = self.pods.entry(pod.to_owned()).or_default();
        entry.readings.push_back(Reading { at, stats });
        entry.failure = None;
    }

    /// Notes that `pod` did not answer.
    pub fn record_failure(&mut self, pod: &str, at: Timestamp, message: String) {
        self.pods.entry(pod.to_owned()).or_default().failure = Some(Failure { at, message });
    }

    /// Forgets pods that `keep` does not hold.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.pods.retain(|pod, _| keep(pod));
    }

    /// The newest reading of `pod`.
    pub fn latest(&self, pod: &str) -> Option<&Reading> {
        self.pods.get(pod).and_then(|readings| readings.readings.back())
    }
}
