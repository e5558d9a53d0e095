//! The windows of readings, by service: written by the scraper, read by observation.

use crate::written::ServiceKey;
use jiff::Timestamp;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use windlass_engine_contract::stats::Stats;
use windlass_operator_core::window::LoadWindow;

/// Windows of every service; cloning shares them.
#[derive(Clone, Default)]
pub struct Loads {
    windows: Arc<Mutex<HashMap<ServiceKey, Window>>>,
}

#[derive(Default)]
struct Window {
    /// Handed out without a copy; a reading that arrives while a plan holds it copies first.
    load: Arc<LoadWindow>,
    /// Whether the last attempt at each pod brought a reading.
    answering: HashMap<String, bool>,
}

impl Loads {
    /// The window of `service`.
    pub fn of(&self, service: &ServiceKey) -> Arc<LoadWindow> {
        self.lock().get(service).map(|window| window.load.clone()).unwrap_or_default()
    }

    /// The newest reading of `pod`.
    pub fn latest(&self, service: &ServiceKey, pod: &str) -> Option<Stats> {
        let windows = self.lock();
        windows.get(service).and_then(|window| window.load.latest(pod)).map(|reading| reading.stats.clone())
    }

    /// Whether the last attempt at `pod` brought a reading.
    pub fn is_answering(&self, service: &ServiceKey, pod: &str) -> bool {
        let windows = self.lock();
        windows.get(service).and_then(|window| window.answering.get(pod)).copied().unwrap_or(false)
    }

    /// Pods of `service` that were tried.
    pub fn pods(&self, service: &ServiceKey) -> usize {
        self.lock().get(service).map_or(0, |window| window.answering.len())
    }

    /// Adds a reading.
    pub fn record(&self, service: &ServiceKey, pod: &str, at: Timestamp, stats: Stats) {
        let mut windows = self.lock();
        let window = windows.entry(service.clone()).or_default();
        window.answering.insert(pod.to_owned(), true);
        Arc::make_mut(&mut window.load).record(pod, at, stats);
    }

    /// Notes that `pod` was not read.
    pub fn record_failure(&self, service: &ServiceKey, pod: &str, at: Timestamp, message: String) {
        let mut windows = self.lock();
        let window = windows.entry(service.clone()).or_default();
        window.answering.insert(pod.to_owned(), false);
        Arc::make_mut(&mut window.load).record_failure(pod, at, message);
    }

    /// Forgets pods that are not among `pods`.
    pub fn retain<'a>(&self, pods: impl Iterator<Item = (&'a ServiceKey, &'a str)>) {
        let mut windows = self.lock();
        if windows.is_empty() {
            return;
        }
        let mut kept: HashMap<&ServiceKey, HashSet<&str>> = HashMap::new();
        for (service, pod) in pods {
            kept.entry(service).or_default().insert(pod);
        }
        windows.retain(|service, window| {
            let Some(pods) = kept.get(service) else { return false };
            let before = window.answering.len();
            window.answering.retain(|pod, _| pods.contains(pod.as_str()));
            if window.answering.len() < before {
                Arc::make_mut(&mut window.load).retain(|pod| pods.contains(pod));
            }
            true
        });
    }

    /// Forgets a service that was deleted.
    pub fn forget(&self, service: &ServiceKey) {
        self.lock().remove(service);
    }

    /// A panic elsewhere leaves a window that lacks one reading at worst.
    fn lock(&self) -> MutexGuard<'_, HashMap<ServiceKey, Window>> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_engine_contract::fixture::idle;

    #[test]
    fn a_pod_answers_until_it_fails_and_is_forgotten_when_it_leaves() {
        let (loads, service, now) = (Loads::default(), ("n".to_owned(), "a".to_owned()), Timestamp::UNIX_EPOCH);
        assert!(!loads.is_answering(&service, "p"));
        loads.record(&service, "p", now, idle());
        assert!(loads.is_answering(&service, "p"));
        loads.record_failure(&service, "p", now, "gone".into());
        assert!(!loads.is_answering(&service, "p"));
        loads.record(&service, "q", now, idle());
        loads.retain([(&service, "q")].into_iter());
        assert!(loads.latest(&service, "p").is_none() && loads.latest(&service, "q").is_some());
        loads.retain(std::iter::empty());
        assert!(loads.latest(&service, "q").is_none());
    }
}
