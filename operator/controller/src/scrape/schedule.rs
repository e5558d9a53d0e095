//! Which pod is read when. No clock and no randomness: both are parameters.

use super::Target;
use crate::written::ServiceKey;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// When each pod is due, by its UID.
#[derive(Debug, Default)]
pub struct Schedule {
    pods: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    service: ServiceKey,
    due: Instant,
    is_under_way: bool,
}

impl Schedule {
    /// Those of `targets` whose time has come, the longest overdue first; they are under way until
    /// [`Schedule::put_back`]. A pod not seen before is due after `delay()`, one that is no target any more is forgotten.
    pub fn take(&mut self, targets: Vec<Target>, now: Instant, mut delay: impl FnMut() -> Duration) -> Vec<Target> {
        let mut kept = HashMap::with_capacity(targets.len());
        let mut due = Vec::new();
        for target in targets {
            let known = self.pods.remove(&target.uid);
            let entry = known.unwrap_or_else(|| {
                let service = target.service.clone();
                Entry { service, due: now + delay(), is_under_way: false }
            });
            if !entry.is_under_way && entry.due <= now {
                due.push((entry.due, target.clone()));
            }
            kept.insert(target.uid, entry);
        }
        self.pods = kept;
        due.sort_by_key(|(time, _)| *time);
        let chosen: Vec<_> = due.into_iter().map(|(_, target)| target).collect();
        for target in &chosen {
            if let Some(entry) = self.pods.get_mut(&target.uid) {
                entry.is_under_way = true;
            }
        }
        chosen
    }

    /// The reading of `uid` is over; the next is due at `due`.
    pub fn put_back(&mut self, uid: &str, due: Instant) {
        if let Some(entry) = self.pods.get_mut(uid) {
            (entry.due, entry.is_under_way) = (due, false);
        }
    }

    /// Every pod of `service` is due by `due` at the latest.
    pub fn hasten(&mut self, service: &ServiceKey, due: Instant) {
        for entry in self.pods.values_mut().filter(|entry| entry.service == *service) {
            entry.due = entry.due.min(due);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(uids: &[&str]) -> Vec<Target> {
        let target = |uid: &&str| Target {
            uid: (*uid).to_owned(),
            service: ("n".into(), "a".into()),
            pod: (*uid).to_owned(),
            address: ([127, 0, 0, 1], 1).into(),
        };
        uids.iter().map(target).collect()
    }

    fn names(taken: Vec<Target>) -> Vec<String> {
        taken.into_iter().map(|target| target.uid).collect()
    }

    #[test]
    fn a_new_pod_waits_for_its_delay_and_is_then_taken_once() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert!(schedule.take(targets(&["a"]), start, || second).is_empty());
        assert_eq!(names(schedule.take(targets(&["a"]), start + second, || second)), ["a"]);
        assert!(schedule.take(targets(&["a"]), start + second * 9, || second).is_empty(), "still under way");
        schedule.put_back("a", start + second * 20);
        assert!(schedule.take(targets(&["a"]), start + second * 19, || second).is_empty());
        assert_eq!(names(schedule.take(targets(&["a"]), start + second * 20, || second)), ["a"]);
    }

    #[test]
    fn the_longest_overdue_go_first() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let mut delay = 0;
        let mut growing = || {
            delay += 1;
            Duration::from_secs(10 - delay)
        };
        assert!(schedule.take(targets(&["a", "b", "c"]), start, &mut growing).is_empty());
        let later = start + Duration::from_secs(60);
        assert_eq!(names(schedule.take(targets(&["a", "b", "c"]), later, &mut growing)), ["c", "b", "a"]);
    }

    #[test]
    fn a_service_that_wakes_up_is_read_at_once() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        let minute = Duration::from_secs(60);
        schedule.take(targets(&["a", "b"]), now, || minute);
        schedule.hasten(&("n".into(), "other".into()), now);
        assert!(schedule.take(targets(&["a", "b"]), now, || minute).is_empty());
        schedule.hasten(&("n".into(), "a".into()), now);
        assert_eq!(schedule.take(targets(&["a", "b"]), now, || minute).len(), 2);
    }

    #[test]
    fn a_pod_that_left_is_forgotten() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        schedule.take(targets(&["a"]), now, || Duration::ZERO);
        schedule.take(Vec::new(), now, || Duration::ZERO);
        schedule.put_back("a", now);
        assert!(schedule.pods.is_empty());
    }
}
