//! The waiting queue: requests in order of arrival, preempted ones before all others; and its limits.

use std::collections::VecDeque;

use crate::request::{RejectReason, RequestId};
use crate::sequence::Sequence;

/// Limits of the waiting queue. Requests beyond them are rejected at once, while the client can still go elsewhere.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueLimits {
    /// Most waiting requests, beyond the free rows of the running batch.
    pub max_waiting_requests: u32,
    /// Most waiting prompt tokens. A single request may exceed it if nothing else waits.
    pub max_queued_prompt_tokens: u64,
    /// Longest predicted time to the first token of a request that has to wait, seconds.
    pub max_predicted_ttft_seconds: Option<f64>,
}

impl QueueLimits {
    /// Rejects `requests` that arrive together, with `prompt_tokens` tokens in all, if an idle engine with
    /// `max_running` rows would reject some of them: a retry would be in vain.
    pub fn admit_together(&self, requests: u32, prompt_tokens: u64, max_running: u32) -> Result<(), RejectReason> {
        let most = self.max_waiting_requests.saturating_add(max_running);
        if requests > most {
            return Err(RejectReason::TooMany { requests, limit: most });
        }
        let limit_tokens = self.max_queued_prompt_tokens;
        match requests > 1 && prompt_tokens > limit_tokens {
            true => Err(RejectReason::TooManyTokens { prompt_tokens, limit_tokens }),
            false => Ok(()),
        }
    }
}

#[derive(Debug)]
pub(super) struct Queue {
    limits: QueueLimits,
    sequences: VecDeque<Sequence>,
    prompt_tokens: u64,
}

impl Queue {
    pub(super) fn new(limits: QueueLimits) -> Queue {
        Queue { limits, sequences: VecDeque::new(), prompt_tokens: 0 }
    }

    /// Whether a request may wait, if the running batch has `free_rows` free rows.
    pub(super) fn admits(&self, sequence: &Sequence, free_rows: usize) -> Result<(), RejectReason> {
        let many = self.len() >= self.limits.max_waiting_requests as usize + free_rows;
        let long = self.prompt_tokens + sequence.backlog_tokens as u64 > self.limits.max_queued_prompt_tokens;
        match many || (long && !self.is_empty()) {
            true => Err(RejectReason::QueueFull { waiting: self.len() as u32, queued_tokens: self.prompt_tokens }),
            false => Ok(()),
        }
    }

    /// Whether the time to the first token is limited.
    pub(super) fn bounds_ttft(&self) -> bool {
        self.limits.max_predicted_ttft_seconds.is_some()
    }

    /// Rejects a request whose predicted time to the first token is above the limit.
    pub(super) fn is_in_time(&self, predicted_ttft_seconds: Option<f64>) -> Result<(), RejectReason> {
        match (predicted_ttft_seconds, self.limits.max_predicted_ttft_seconds) {
            (Some(predicted), Some(limit)) if predicted > limit => {
                let [predicted_milliseconds, limit_milliseconds] = [predicted, limit].map(|time| (time * 1e3) as u64);
                Err(RejectReason::TooSlow { predicted_milliseconds, limit_milliseconds })
            }
            _ => Ok(()),
        }
    }

    /// Whether a request is likely to be admitted at a time when `waiting` requests with `queued_tokens` prompt
    /// tokens are predicted to wait, and its first token after `after_seconds`. Uses half of the limits, as
    /// predictions err.
    pub(super) fn has_room(&self, waiting: usize, queued_tokens: u64, prompt_tokens: u32, after_seconds: f64) -> bool {
        let QueueLimits { max_waiting_requests, max_queued_prompt_tokens, max_predicted_ttft_seconds } = self.limits;
        let few = waiting <= max_waiting_requests as usize / 2;
        let short = waiting == 0 || queued_tokens + u64::from(prompt_tokens) <= max_queued_prompt_tokens / 2;
        few && short && max_predicted_ttft_seconds.is_none_or(|limit| waiting == 0 || after_seconds <= limit / 2.0)
    }

    /// Adds a new arrival at the end.
    pub(super) fn push_back(&mut self, sequence: Sequence) {
        self.prompt_tokens += sequence.backlog_tokens as u64;
        self.sequences.push_back(sequence);
    }

    /// Returns a sequence that ran: before all that arrived later. Mostly that is the front, but a sequence that waited for its last
    /// token may have outrun an earlier one.
    pub(super) fn put_back(&mut self, sequence: Sequence) {
        self.prompt_tokens += sequence.backlog_tokens as u64;
        let is_later = |waiting: &Sequence| waiting.arrival_seconds >= sequence.arrival_seconds;
        let index = self.sequences.iter().position(is_later).unwrap_or(self.sequences.len());
        self.sequences.insert(index, sequence);
    }

    pub(super) fn get(&self, index: usize) -> Option<&Sequence> {
        self.sequences.get(index)
    }

    pub(super) fn take(&mut self, id: RequestId) -> Option<Sequence> {
        self.remove(self.sequences.iter().position(|sequence| sequence.id == id)?)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.sequences.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.sequences.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    pub(super) fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens
    }

    pub(super) fn remove(&mut self, index: usize) -> Option<Sequence> {
        let sequence = self.sequences.remove(index)?;
        self.prompt_tokens -= sequence.backlog_tokens as u64;
        Some(sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Request;

    #[test]
    fn a_prediction_is_held_against_its_limit_where_there_are_both() {
        let limits = QueueLimits {
            max_waiting_requests: 16,
            max_queued_prompt_tokens: 100,
            max_predicted_ttft_seconds: Some(2.0),
        };
        let admits = |limits, predicted| Queue::new(limits).is_in_time(predicted);
        assert_eq!((admits(limits, None), admits(limits, Some(2.0))), (Ok(()), Ok(())));
        let slow = RejectReason::TooSlow { predicted_milliseconds: 2500, limit_milliseconds: 2000 };
        assert_eq!(admits(limits, Some(2.5)), Err(slow));
        assert_eq!(admits(QueueLimits { max_predicted_ttft_seconds: None, ..limits }, Some(2.5)), Ok(()));
    }

    #[test]
    fn a_sequence_that_ran_goes_back_behind_earlier_ones_and_before_all_others() {
        let limits =
            QueueLimits { max_waiting_requests: 16, max_queued_prompt_tokens: 100, max_predicted_ttft_seconds: None };
        let sequence = |id| Sequence::new(Request::greedy(RequestId(id), vec![1], 1), id as f64);
        for (returns, expected) in [(0, [0, 2, 4]), (3, [2, 3, 4]), (9, [2, 4, 9])] {
            let mut queue = Queue::new(limits);
            [4, 2, returns].into_iter().for_each(|id| queue.put_back(sequence(id)));
            assert_eq!(queue.iter().map(|sequence| sequence.id.0).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn what_an_idle_engine_would_refuse_is_refused_for_good() {
        let limits =
            QueueLimits { max_waiting_requests: 16, max_queued_prompt_tokens: 100, max_predicted_ttft_seconds: None };
        assert_eq!(limits.admit_together(24, 100, 8), Ok(()));
        assert_eq!(limits.admit_together(25, 1, 8), Err(RejectReason::TooMany { requests: 25, limit: 24 }));
        let long = RejectReason::TooManyTokens { prompt_tokens: 101, limit_tokens: 100 };
        assert_eq!(limits.admit_together(2, 101, 8), Err(long));
        assert_eq!(limits.admit_together(1, 101, 8), Ok(()), "one alone may be longer");
    }
}
