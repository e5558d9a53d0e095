//! A simulation of the steps ahead, which predicts when each running and waiting sequence gets its first token. It
//! jumps over runs of identical steps.
//!
//! Given are the order of service, the lengths of answers and the duration of steps. Rows and blocks are freed when
//! answers end, and prefill shares steps with decodes as in [`Scheduler::schedule`]. Nothing is preempted.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Scheduler;
use crate::executor::MAX_IN_FLIGHT;
use crate::request::RequestDemand;

/// A prompt to compute, and an answer to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) demand: RequestDemand,
    /// Tokens of the answer.
    pub(super) answer_tokens: u64,
    /// Blocks that it holds.
    pub(super) blocks: u64,
}

/// When a workload starts and gets its first token, in seconds from now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forecast {
    /// When it is admitted to the batch.
    pub(super) starts: f64,
    /// When its first token is sampled.
    pub(super) first_token: f64,
}

/// State at the start of a step.
#[derive(Clone)]
pub(super) struct ForecastState<'a> {
    scheduler: &'a Scheduler,
    /// Steps from now.
    step: u64,
    /// Seconds from now.
    seconds: f64,
    /// Decode rows of the step.
    rows: u32,
    /// Prompt tokens that are in the step already.
    filled: u64,
    /// For each decoding sequence, the step from which its row is free, and the blocks freed then.
    ends: BinaryHeap<Reverse<(u64, u64)>>,
    /// Rows reserved for running sequences whose prefill is not simulated yet.
    reserved: usize,
    blocks: u64,
}

impl<'a> ForecastState<'a> {
    /// The state before the next step. `reserved` running sequences have yet to be
    /// [added](ForecastState::add_prefill).
    pub(super) fn new(scheduler: &'a Scheduler, reserved: usize) -> Option<ForecastState<'a>> {
        let in_flight = scheduler.in_flight.iter().filter(|_| !scheduler.is_pipelined());
        let seconds =
            in_flight.map(|step| scheduler.step_time.predict(step.stats.prefill_tokens, step.stats.decode_tokens));
        let seconds = seconds.sum::<Option<f64>>()?;
        let (step, rows, filled, ends) = (0, 0, 0, BinaryHeap::new());
        let blocks = scheduler.kv.available() as u64;
        Some(ForecastState { scheduler, step, seconds, rows, filled, ends, reserved, blocks })
    }

    /// Adds a decoding sequence with this many tokens to come, including the one being sampled, and this many blocks.
    pub(super) fn add_decode(&mut self, tokens: u64, blocks: u64) {
        self.ends.push(Reverse((self.scheduler.stages as u64 * tokens.max(1), blocks)));
        self.rows = self.decode_rows();
    }

    /// Adds a running sequence that continues its prefill.
    pub(super) fn add_prefill(&mut self, workload: &Workload) {
        self.prefill(workload);
        self.reserved -= 1;
    }

    /// Admits a sequence from the queue, as soon as it has a row and blocks.
    pub(super) fn admit(&mut self, workload: &Workload) -> Forecast {
        while !self.has_room(workload.blocks) && !self.ends.is_empty() {
            self.advance(self.like_steps());
        }
        self.blocks = self.blocks.saturating_sub(workload.blocks);
        Forecast { starts: self.seconds, first_token: self.prefill(workload) }
    }

    /// Advances to `seconds` from now, with nothing admitted until then.
    pub(super) fn advance_until(&mut self, seconds: f64) {
        while self.seconds < seconds && !self.ends.is_empty() {
            let steps = ((seconds - self.seconds) / self.step_seconds()).ceil() as u64;
            self.advance(steps.clamp(1, self.like_steps()));
        }
        self.seconds = self.seconds.max(seconds);
    }

    fn has_room(&self, blocks: u64) -> bool {
        let running = self.ends.len() + self.reserved;
        let geometry = &self.scheduler.geometry;
        let spare = running as u64 * u64::from(geometry.groups.count());
        running < geometry.max_step_rows as usize && blocks + spare <= self.blocks
    }

    /// Simulates the prefill, through all stages. Returns the seconds until it is done.
    fn prefill(&mut self, workload: &Workload) -> f64 {
        let mut left = u64::from(workload.demand.prompt_tokens.max(1));
        loop {
            let room = self.prefill_room();
            if left <= room {
                break;
            }
            let steps = (left - 1).checked_div(room).unwrap_or(u64::MAX).min(self.like_steps());
            self.filled += room;
            left -= room * steps;
            self.advance(steps);
        }
        self.filled += left;
        // The row is free when the last token was collected; each token after the first takes one more round of the
        // stages.
        let (stages, rounds) = (self.scheduler.stages as u64, workload.answer_tokens.saturating_sub(1));
        let seen = stages.max(MAX_IN_FLIGHT as u64);
        self.ends.push(Reverse((self.step + stages * rounds + seen, workload.blocks)));
        self.seconds + self.scheduler.stages as f64 * self.step_seconds()
    }

    /// Prompt tokens that still fit the step.
    fn prefill_room(&self) -> u64 {
        let budget = u64::from(self.scheduler.prefill_budget(self.rows));
        budget.max(u64::from(self.ends.is_empty())).saturating_sub(self.filled)
    }

    /// Advances by this many identical steps.
    fn advance(&mut self, steps: u64) {
        self.seconds += steps as f64 * self.step_seconds();
        self.step += steps;
        self.filled = 0;
        while let Some(Reverse((_, blocks))) = self.ends.peek().filter(|Reverse((end, _))| *end <= self.step) {
            self.blocks += blocks;
            self.ends.pop();
        }
        self.rows = self.decode_rows();
    }

    fn step_seconds(&self) -> f64 {
        self.scheduler.step_time.predict(self.filled as u32, self.rows).unwrap_or_default()
    }

    /// Number of steps that are identical to this one.
    fn like_steps(&self) -> u64 {
        match self.ends.peek().filter(|_| self.filled == 0) {
            Some(Reverse((end, _))) => end - self.step,
            None => 1,
        }
    }

    /// Decode rows of a step: the decoding sequences are divided among the stages.
    fn decode_rows(&self) -> u32 {
        self.ends.len().div_ceil(self.scheduler.stages) as u32
    }
}
