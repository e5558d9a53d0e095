//! Requests that wait, in order of arrival, and how much may wait.

use std::collections::VecDeque;

use crate::request::{RejectReason, RequestId};
use crate::sequence::Sequence;

/// How much may wait. What is beyond it is refused at once, while its client can still go elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Most requests that wait beyond the free places in the running batch.
    pub max_waiting_requests: u32,
    /// Most prompt tokens that wait. A single request may exceed it when nothing else waits.
    pub max_queued_prompt_tokens: u64,
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

    /// Whether this one may wait, too, when the batch has room for `free_places` sequences.
    pub(super) fn admits(&self, sequence: &Sequence, free_places: usize) -> Result<(), RejectReason> {
        let many = self.len() >= self.limits.max_waiting_requests as usize + free_places;
        let long = self.prompt_tokens + sequence.backlog_tokens as u64 > self.limits.max_queued_prompt_tokens;
        if many || (long && !self.is_empty()) {
            return Err(RejectReason::QueueFull { waiting: self.len() as u32, queued_tokens: self.prompt_tokens });
        }
        Ok(())
    }

    /// Behind all others: a new arrival.
    pub(super) fn push_back(&mut self, sequence: Sequence) {
        self.prompt_tokens += sequence.backlog_tokens as u64;
        self.sequences.push_back(sequence);
    }

    /// Before all others: one that was preempted.
    pub(super) fn push_front(&mut self, sequence: Sequence) {
        self.prompt_tokens += sequence.backlog_tokens as u64;
        self.sequences.push_front(sequence);
    }

    pub(super) fn front(&self) -> Option<&Sequence> {
        self.sequences.front()
    }

    pub(super) fn pop_front(&mut self) -> Option<Sequence> {
        self.remove(0)
    }

    pub(super) fn take(&mut self, id: RequestId) -> Option<Sequence> {
        self.remove(self.sequences.iter().position(|sequence| sequence.id == id)?)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> {
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

    fn remove(&mut self, index: usize) -> Option<Sequence> {
        let sequence = self.sequences.remove(index)?;
        self.prompt_tokens -= sequence.backlog_tokens as u64;
        Some(sequence)
    }
}
