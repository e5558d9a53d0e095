//! When rejected requests may be retried, one after another.
//!
//! Clients that are rejected together and told the same time return together, most of them in vain. So each
//! prediction includes the retries that were promised before and are not due yet, as requests that arrive then.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use super::Scheduler;
use crate::request::RequestDemand;

/// Range of the answers, seconds.
const RETRY_AFTER_SECONDS: RangeInclusive<u32> = 1..=60;
/// Retries that are remembered. Beyond that, all are told the time of the last one.
const REMEMBERED: usize = 256;

/// Pending retries, in order of their times.
#[derive(Debug, Default)]
pub(super) struct RetryTimes {
    pending: VecDeque<RetryTime>,
}

#[derive(Clone, Copy, Debug)]
struct RetryTime {
    due_seconds: f64,
    demand: RequestDemand,
}

impl RetryTimes {
    fn forget_due(&mut self, now: f64) {
        let due = self.pending.partition_point(|retry| retry.due_seconds <= now);
        self.pending.drain(..due);
    }

    fn add(&mut self, due_seconds: f64, demand: RequestDemand) {
        self.pending.push_back(RetryTime { due_seconds, demand });
    }

    /// Time of the last retry, if as many are pending as are remembered.
    fn last_if_full(&self) -> Option<f64> {
        self.pending.get(REMEMBERED - 1).map(|retry| retry.due_seconds)
    }
}

impl Scheduler {
    /// A whole number of seconds after which a rejected request is likely to be admitted, after those that run, that
    /// wait, or that were told to retry before.
    pub(crate) fn retry_after_seconds(&mut self, demand: RequestDemand, now: f64) -> u32 {
        self.retry_times.forget_due(now);
        if let Some(last) = self.retry_times.last_if_full() {
            return (last - now).ceil() as u32;
        }
        let seconds = self.first_admissible_second(demand, now).unwrap_or(*RETRY_AFTER_SECONDS.start());
        self.retry_times.add(now + f64::from(seconds), demand);
        seconds
    }

    /// The first second at which there is room for the request, after all others that are predicted to arrive.
    fn first_admissible_second(&self, demand: RequestDemand, now: f64) -> Option<u32> {
        let mut lengths = self.lengths();
        let mut forecast = self.forecast(demand.priority, &mut lengths)?;
        let waiting = self.waiting_workloads(&mut lengths);
        // A waiting request has no row before it starts.
        let mut starts: Vec<(f64, u32)> =
            waiting.iter().map(|workload| (forecast.admit(workload).starts, workload.demand.prompt_tokens)).collect();
        let mut last = 0.0;
        for RetryTime { due_seconds, demand } in &self.retry_times.pending {
            last = due_seconds - now;
            forecast.advance_until(last);
            starts.push((forecast.admit(&self.workload(*demand, 0, &mut lengths)).starts, demand.prompt_tokens));
        }
        let workload = self.workload(demand, 0, &mut lengths);
        let has_room = |seconds: &u32| {
            let (mut then, seconds) = (forecast.clone(), f64::from(*seconds));
            then.advance_until(seconds);
            let wait = then.admit(&workload).first_token - seconds;
            let before = starts.iter().filter(|(start, _)| *start > seconds);
            let tokens = before.clone().map(|(_, tokens)| u64::from(*tokens)).sum();
            self.waiting.has_room(before.count(), tokens, demand.prompt_tokens, wait)
        };
        let mut chances = RETRY_AFTER_SECONDS.skip_while(|seconds| f64::from(*seconds) < last);
        Some(chances.find(has_room).unwrap_or(*RETRY_AFTER_SECONDS.end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_times_are_forgotten_when_they_are_due_and_a_crowd_is_told_the_last_one() {
        let mut retry_times = RetryTimes::default();
        (1..=3).for_each(|due| retry_times.add(f64::from(due), RequestDemand::MINIMAL));
        retry_times.forget_due(2.0);
        assert_eq!((retry_times.pending.len(), retry_times.last_if_full()), (1, None));
        (1..REMEMBERED).for_each(|_| retry_times.add(9.0, RequestDemand::MINIMAL));
        assert_eq!(retry_times.last_if_full(), Some(9.0));
    }
}
