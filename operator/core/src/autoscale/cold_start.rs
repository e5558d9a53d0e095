//! How long replicas take to serve, from the latest that did. Nine in ten of them were faster than what is planned with, so
//! that one slow pull does not count for ever.

use std::collections::VecDeque;
use std::time::Duration;

use jiff::Timestamp;

/// So many are remembered.
pub const REMEMBERED: usize = 20;
/// Of ten, so many are no slower than what is planned with.
const OF_TEN: usize = 9;

/// The latest cold starts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ColdStarts {
    /// Oldest first.
    took: VecDeque<Duration>,
    /// When the last of them served: none counts twice.
    until: Option<Timestamp>,
}

impl ColdStarts {
    /// Those that an earlier process remembered, oldest first.
    pub fn of_parts(took: impl IntoIterator<Item = Duration>, until: Option<Timestamp>) -> ColdStarts {
        ColdStarts { took: took.into_iter().take(REMEMBERED).collect(), until }
    }

    /// Oldest first, and when the last of them served.
    pub fn to_parts(&self) -> (impl Iterator<Item = Duration>, Option<Timestamp>) {
        (self.took.iter().copied(), self.until)
    }

    /// Takes in since when pods serve, and how long each took to do so; those that are known already are left out.
    pub fn learn(&mut self, starts: &[(Timestamp, Duration)]) {
        let is_new = |(since, _): &&(Timestamp, Duration)| self.until.is_none_or(|until| *since > until);
        let mut new: Vec<_> = starts.iter().filter(is_new).copied().collect();
        new.sort();
        self.until = new.last().map(|(since, _)| *since).or(self.until);
        self.took.extend(new.into_iter().map(|(_, took)| took));
        self.took.drain(..self.took.len().saturating_sub(REMEMBERED));
    }

    /// What nine in ten did not exceed; 0 while none is known.
    pub fn p90(&self) -> Duration {
        let mut sorted: Vec<_> = self.took.iter().copied().collect();
        sorted.sort();
        let rank = (sorted.len() * OF_TEN).div_ceil(10);
        rank.checked_sub(1).map_or(Duration::ZERO, |index| sorted[index])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;

    /// Pods that began to serve a second apart, after so many seconds each.
    fn learned(seconds: &[u64]) -> ColdStarts {
        let mut starts = ColdStarts::default();
        for (second, took) in (0..).zip(seconds) {
            starts.learn(&[(at(second), Duration::from_secs(*took))]);
        }
        starts
    }

    #[test]
    fn one_in_ten_may_be_slower_than_what_is_planned_with() {
        for (seconds, expected) in [
            (vec![], 0),
            (vec![30], 30),
            (vec![30, 1800, 40], 1800),
            ([vec![30; 18], vec![1800; 2]].concat(), 30),
            ([vec![30; 17], vec![1800; 3]].concat(), 1800),
            ([vec![1800; 5], vec![30; 20]].concat(), 30),
        ] {
            assert_eq!(learned(&seconds).p90(), Duration::from_secs(expected), "{seconds:?}");
        }
    }

    #[test]
    fn a_pod_counts_once_however_often_it_is_looked_at() {
        let mut starts = ColdStarts::default();
        let seen: Vec<_> = (0..3).map(|pod| (at(pod), Duration::from_secs(10))).collect();
        (0..9).for_each(|_| starts.learn(&seen));
        assert_eq!(starts.to_parts().0.count(), 3);
        let again = ColdStarts::of_parts(starts.to_parts().0, starts.to_parts().1);
        assert_eq!(again, starts);
        let many: Vec<_> = (0..99).map(|pod| (at(pod), Duration::from_secs(10))).collect();
        starts.learn(&many);
        assert_eq!(starts.to_parts().0.count(), REMEMBERED, "bounded");
    }
}
