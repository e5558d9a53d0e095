//! The order of service that the [`Policy`] defines, for running and for waiting sequences.

use super::Scheduler;
use crate::policy::Policy;
use crate::sequence::{RunId, Running};

/// Waiting requests among which the longest cached prefix is looked for.
const LOOKAHEAD: usize = 16;
/// Seconds after which a request is no longer passed over for longer prefixes.
const MAX_PASSED_OVER_SECONDS: f64 = 2.0;

impl Scheduler {
    /// Running sequences in order of service.
    pub(super) fn service_order(&self) -> Vec<RunId> {
        let mut order: Vec<_> = self.running.iter().map(|run| self.service_rank(run)).collect();
        if matches!(self.policy, Policy::Priority { .. }) {
            order.sort_unstable();
        }
        order.into_iter().map(|(_, run_id)| run_id).collect()
    }

    /// Position of a running sequence in the order: lower ones are served first and preempted last.
    pub(super) fn service_rank(&self, run: &Running) -> (i32, RunId) {
        let priority = if matches!(self.policy, Policy::Priority { .. }) { run.sequence.priority } else { 0 };
        (priority, run.id)
    }

    /// Index of the waiting request to admit next.
    pub(super) fn next_waiting(&mut self, now: f64) -> Option<usize> {
        match self.policy {
            Policy::Fcfs => (!self.waiting.is_empty()).then_some(0),
            Policy::Priority { .. } => self.most_urgent(),
            Policy::Fair => {
                let tenant = self.fairness.as_mut()?.next(self.waiting.iter().map(|sequence| sequence.tenant))?;
                self.waiting.iter().position(|sequence| sequence.tenant == tenant)
            }
            Policy::LongestPrefix => self.longest_prefix(now),
        }
    }

    /// Preempts running sequences for a waiting one that is more urgent by more than the threshold, if it finds no
    /// row or not enough blocks otherwise.
    pub(super) fn preempt_for_urgent(&mut self) {
        if !matches!(self.policy, Policy::Priority { .. }) {
            return;
        }
        while let Some(urgent) = self.most_urgent().and_then(|next| self.waiting.get(next)) {
            let (tokens, headroom) = (urgent.tokens.len(), self.running.len());
            let fits = self.kv.would_fit(tokens, urgent.cacheable(), urgent.cache_scope, headroom);
            if self.free_rows() > 0 && fits {
                return;
            }
            let bound = self.preemptible_above(urgent.priority);
            let victims = self.running.iter().enumerate().filter(|(_, run)| run.uncomputed() > 0);
            let less_urgent = victims.filter(|(_, run)| run.sequence.priority > bound);
            let Some((victim, _)) = less_urgent.max_by_key(|(_, run)| self.service_rank(run)) else { return };
            self.preempt(victim);
        }
    }

    /// Running sequences with a priority value above this are preempted for waiting ones of `priority`.
    pub(super) fn preemptible_above(&self, priority: i32) -> i32 {
        match self.policy {
            Policy::Priority { preemption_threshold } => priority.saturating_add_unsigned(preemption_threshold),
            Policy::Fcfs | Policy::Fair | Policy::LongestPrefix => i32::MAX,
        }
    }

    /// Arrival of the oldest waiting request.
    pub(super) fn oldest_arrival_seconds(&self) -> Option<f64> {
        self.waiting.iter().map(|sequence| sequence.arrival_seconds).min_by(f64::total_cmp)
    }

    fn most_urgent(&self) -> Option<usize> {
        let urgencies = self.waiting.iter().enumerate().map(|(index, sequence)| (sequence.priority, index));
        urgencies.min().map(|(_, index)| index)
    }

    fn longest_prefix(&mut self, now: f64) -> Option<usize> {
        let first = self.waiting.get(0)?;
        if now - first.arrival_seconds > MAX_PASSED_OVER_SECONDS {
            return Some(0);
        }
        let mut best = (0, 0);
        for (index, sequence) in self.waiting.iter().enumerate().take(LOOKAHEAD) {
            let cached = self.kv.cached_tokens(&sequence.tokens, sequence.cache_scope);
            if cached > best.1 {
                best = (index, cached);
            }
        }
        Some(best.0)
    }
}
