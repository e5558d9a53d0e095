//! The steps ahead, gone through in strides of like ones: when each of those that run and wait would get its first token.
//!
//! What it takes for known is the order, the lengths of answers and how long steps take. Places and blocks return when
//! answers end, and a prompt shares steps with what decodes then, as [`Scheduler::schedule`] would have it. Nothing is
//! preempted.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Scheduler;
use crate::executor::MAX_IN_FLIGHT;
use crate::request::RequestDemand;

/// What has a prompt to compute, and then an answer to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) demand: RequestDemand,
    /// Tokens to generate after the prompt.
    pub(super) answer_tokens: u64,
    /// Blocks that it takes.
    pub(super) blocks: u64,
}

/// How a job fares, in seconds from now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forecast {
    /// When it has a place.
    pub(super) starts: f64,
    /// When its first token is there.
    pub(super) first_token: f64,
}

/// The state when some step begins.
#[derive(Clone)]
pub(super) struct ForecastState<'a> {
    scheduler: &'a Scheduler,
    /// Steps from now.
    step: u64,
    /// Seconds from now.
    seconds: f64,
    /// Rows of the step that decode.
    rows: u32,
    /// Prompt tokens that the step has already.
    filled: u64,
    /// The steps from which on places are free that are taken now, with the blocks that return.
    ends: BinaryHeap<Reverse<(u64, u64)>>,
    /// Places of those whose prompts come first.
    reserved: usize,
    blocks: u64,
}

impl<'a> ForecastState<'a> {
    /// Before the next step, with places for so many that run and have yet to [go on](Outlook::go_on).
    pub(super) fn new(scheduler: &'a Scheduler, reserved: usize) -> Option<ForecastState<'a>> {
        let in_flight = scheduler.in_flight.iter().filter(|_| !scheduler.is_pipelined());
        let seconds =
            in_flight.map(|step| scheduler.step_time.predict(step.stats.prefill_tokens, step.stats.decode_tokens));
        let seconds = seconds.sum::<Option<f64>>()?;
        let (step, rows, filled, ends) = (0, 0, 0, BinaryHeap::new());
        let blocks = scheduler.kv.available() as u64;
        Some(ForecastState { scheduler, step, seconds, rows, filled, ends, reserved, blocks })
    }

    /// One decodes: for so many tokens yet, the one being drawn among them, in so many blocks.
    pub(super) fn add_decode(&mut self, tokens: u64, blocks: u64) {
        self.ends.push(Reverse((self.scheduler.stages as u64 * tokens.max(1), blocks)));
        self.rows = self.decode_rows();
    }

    /// One that has its place and its blocks goes on with its prompt.
    pub(super) fn add_prefill(&mut self, workload: &Workload) {
        self.prefill(workload);
        self.reserved -= 1;
    }

    /// One leaves the queue.
    pub(super) fn admit(&mut self, workload: &Workload) -> Forecast {
        while !self.has_room(workload.blocks) && !self.ends.is_empty() {
            self.advance(self.like_steps());
        }
        self.blocks = self.blocks.saturating_sub(workload.blocks);
        Forecast { starts: self.seconds, first_token: self.prefill(workload) }
    }

    /// Nobody leaves the queue before so many seconds from now.
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

    /// Goes on to the step that computes the last of the prompt, and through its stages: seconds until then.
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
        // Seen when it was drawn, each token after the first a round of the stages later.
        let (stages, rounds) = (self.scheduler.stages as u64, workload.answer_tokens.saturating_sub(1));
        let seen = stages.max(MAX_IN_FLIGHT as u64);
        self.ends.push(Reverse((self.step + stages * rounds + seen, workload.blocks)));
        self.seconds + self.scheduler.stages as f64 * self.step_seconds()
    }

    /// Prompt tokens that the step may have yet.
    fn prefill_room(&self) -> u64 {
        let budget = u64::from(self.scheduler.prefill_budget(self.rows));
        budget.max(u64::from(self.ends.is_empty())).saturating_sub(self.filled)
    }

    /// Through so many steps, all of them like this one.
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

    /// Steps that are like this one.
    fn like_steps(&self) -> u64 {
        match self.ends.peek().filter(|_| self.filled == 0) {
            Some(Reverse((end, _))) => end - self.step,
            None => 1,
        }
    }

    /// Rows of a step that decode where all that do are divided among the stages.
    fn decode_rows(&self) -> u32 {
        self.ends.len().div_ceil(self.scheduler.stages) as u32
    }
}
