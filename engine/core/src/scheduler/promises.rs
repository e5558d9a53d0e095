//! When those that were refused may come again: each in its turn.
//!
//! All who are refused at once and told the same time come back at once, and most of them in vain. So a promise counts those
//! that were made before it and are not due yet: as requests that come then.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use super::Scheduler;
use crate::request::Claim;

/// What is promised at least and at most, seconds.
const PROMISE_SECONDS: RangeInclusive<u32> = 1..=60;
/// Promises that are remembered. Later ones are due with the last of them.
const REMEMBERED: usize = 256;

/// Promises that are not due, in the order in which they will be.
#[derive(Debug, Default)]
pub(super) struct Promises {
    made: VecDeque<Promise>,
}

#[derive(Clone, Copy, Debug)]
struct Promise {
    due_seconds: f64,
    claim: Claim,
}

impl Promises {
    fn forget_due(&mut self, now: f64) {
        let due = self.made.partition_point(|promise| promise.due_seconds <= now);
        self.made.drain(..due);
    }

    fn make(&mut self, due_seconds: f64, claim: Claim) {
        self.made.push_back(Promise { due_seconds, claim });
    }

    /// When the last one is due, if there are as many as are remembered.
    fn last_of_a_crowd(&self) -> Option<f64> {
        self.made.get(REMEMBERED - 1).map(|promise| promise.due_seconds)
    }
}

impl Scheduler {
    /// A whole number of seconds after which a request that was refused is likely to be admitted, behind those that run, wait
    /// or were promised so before.
    pub(crate) fn promise(&mut self, claim: Claim, now: f64) -> u32 {
        self.promises.forget_due(now);
        if let Some(last) = self.promises.last_of_a_crowd() {
            return (last - now).ceil() as u32;
        }
        let seconds = self.first_chance(claim, now).unwrap_or(*PROMISE_SECONDS.start());
        self.promises.make(now + f64::from(seconds), claim);
        seconds
    }

    /// The first second at which there is room for it: as the last of those that are foreseen to come.
    fn first_chance(&self, claim: Claim, now: f64) -> Option<u32> {
        let mut lengths = self.lengths();
        let mut outlook = self.outlook(claim.priority, &mut lengths)?;
        let waiting = self.waiting_jobs(&mut lengths);
        // Who waits has no place before it starts.
        let mut starts: Vec<(f64, u32)> =
            waiting.iter().map(|job| (outlook.take(job).starts, job.claim.prompt_tokens)).collect();
        let mut last = 0.0;
        for Promise { due_seconds, claim } in &self.promises.made {
            last = due_seconds - now;
            outlook.wait_until(last);
            starts.push((outlook.take(&self.job(*claim, 0, &mut lengths)).starts, claim.prompt_tokens));
        }
        let job = self.job(claim, 0, &mut lengths);
        let has_room = |seconds: &u32| {
            let (mut then, seconds) = (outlook.clone(), f64::from(*seconds));
            then.wait_until(seconds);
            let wait = then.take(&job).first_token - seconds;
            let before = starts.iter().filter(|(start, _)| *start > seconds);
            let tokens = before.clone().map(|(_, tokens)| u64::from(*tokens)).sum();
            self.waiting.has_room(before.count(), tokens, claim.prompt_tokens, wait)
        };
        let mut chances = PROMISE_SECONDS.skip_while(|seconds| f64::from(*seconds) < last);
        Some(chances.find(has_room).unwrap_or(*PROMISE_SECONDS.end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_are_forgotten_when_they_are_due_and_a_crowd_is_told_the_last_one() {
        let mut promises = Promises::default();
        (1..=3).for_each(|due| promises.make(f64::from(due), Claim::LEAST));
        promises.forget_due(2.0);
        assert_eq!((promises.made.len(), promises.last_of_a_crowd()), (1, None));
        (1..REMEMBERED).for_each(|_| promises.make(9.0, Claim::LEAST));
        assert_eq!(promises.last_of_a_crowd(), Some(9.0));
    }
}
