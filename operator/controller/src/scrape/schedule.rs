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
    target: Target,
    due: Instant,
    is_under_way: bool,
}

impl Schedule {
    /// From now on `targets` and no others; one not seen before is due after `delay()`.
    pub fn follow(&mut self, targets: Vec<Target>, now: Instant, mut delay: impl FnMut() -> Duration) {
        let mut before = std::mem::take(&mut self.pods);
        let entry = |target: Target| {
            let uid = target.uid.clone();
            let entry = match before.remove(&uid) {
                Some(known) => Entry { target, ..known },
                None => Entry { target, due: now + delay(), is_under_way: false },
            };
            (uid, entry)
        };
        self.pods = targets.into_iter().map(entry).collect();
    }

    /// Those whose time has come, the longest overdue first; they are under way until [`Schedule::put_back`].
    pub fn take(&mut self, now: Instant) -> Vec<Target> {
        let mut due: Vec<_> = self.pods.values_mut().filter(|entry| !entry.is_under_way && entry.due <= now).collect();
        due.sort_by_key(|entry| entry.due);
        due.iter_mut().for_each(|entry| entry.is_under_way = true);
        due.into_iter().map(|entry| entry.target.clone()).collect()
    }

    /// Whether `uid` is still to be read: it may have left while it was.
    pub fn follows(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// The reading of `uid` is over; the next is due at `due`.
    pub fn put_back(&mut self, uid: &str, due: Instant) {
        if let Some(entry) = self.pods.get_mut(uid) {
            (entry.due, entry.is_under_way) = (due, false);
        }
    }

    /// Every pod of `service` is due by `due` at the latest.
    pub fn hasten(&mut self, service: &ServiceKey, due: Instant) {
        for entry in self.pods.values_mut().filter(|entry| entry.target.service == *service) {
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
        schedule.follow(targets(&["a"]), start, || second);
        assert!(schedule.take(start).is_empty());
        assert_eq!(names(schedule.take(start + second)), ["a"]);
        schedule.follow(targets(&["a"]), start + second, || second);
        assert!(schedule.take(start + second * 9).is_empty(), "still under way");
        schedule.put_back("a", start + second * 20);
        schedule.follow(targets(&["a"]), start + second * 9, || second);
        assert!(schedule.take(start + second * 19).is_empty());
        assert_eq!(names(schedule.take(start + second * 20)), ["a"]);
    }

    #[test]
    fn the_longest_overdue_go_first() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let mut delay = 0;
        let growing = || {
            delay += 1;
            Duration::from_secs(10 - delay)
        };
        schedule.follow(targets(&["a", "b", "c"]), start, growing);
        assert_eq!(names(schedule.take(start + Duration::from_secs(60))), ["c", "b", "a"]);
    }

    #[test]
    fn a_service_that_wakes_up_is_read_at_once() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        schedule.follow(targets(&["a", "b"]), now, || Duration::from_secs(60));
        schedule.hasten(&("n".into(), "other".into()), now);
        assert!(schedule.take(now).is_empty());
        schedule.hasten(&("n".into(), "a".into()), now);
        assert_eq!(schedule.take(now).len(), 2);
    }

    #[test]
    fn a_pod_that_left_is_forgotten_and_one_that_moved_is_read_where_it_is() {
        let (mut schedule, now) = (Schedule::default(), Instant::now());
        schedule.follow(targets(&["a", "b"]), now, || Duration::ZERO);
        let moved = Target { address: ([127, 0, 0, 2], 1).into(), ..targets(&["b"]).remove(0) };
        schedule.follow(vec![moved.clone()], now, || Duration::ZERO);
        schedule.put_back("a", now);
        assert!(!schedule.follows("a") && schedule.follows("b"));
        assert_eq!(schedule.take(now), [moved]);
        assert_eq!(schedule.pods.len(), 1);
    }
}
