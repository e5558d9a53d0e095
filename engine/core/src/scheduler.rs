//! Who runs in the next step, with how many tokens, in which blocks; and what its results mean.
//!
//! First come, first served, within a token budget per step: decodes first, then prefill chunks of what runs, then
//! admission from the queue. Where a decode finds no block, the latest arrival is preempted: its blocks are given up
//! and its tokens computed again later. Knows no executor and no clock; steps may be in flight while it decides.
//!
//! Two orders hold by construction: `running` is sorted by stay and by arrival, and everything in it arrived before
//! everything in `waiting`.

mod admission;
mod queue;
mod step;

use std::collections::VecDeque;

use crate::executor::{ExecutorError, Geometry};
use crate::kv::{BlockTable, KvCache};
use crate::plan::{RowOutput, RowScores, StepOutput, Ticket};
use crate::request::{FinishReason, RejectReason, Request, RequestId};
use crate::sequence::{Running, Sequence, StayId};
use crate::update::{EngineStats, RequestUpdate, StepStats};
use queue::Queue;
pub use queue::QueueLimits;
pub(crate) use step::Step;
use step::{StepBuilder, StepRow};

/// All live sequences and the KV cache.
#[derive(Debug)]
pub(crate) struct Scheduler {
    geometry: Geometry,
    kv: KvCache,
    running: Vec<Running>,
    waiting: Queue,
    in_flight: VecDeque<InFlight>,
    stays: u64,
    preemptions: u64,
    prefix_query_tokens: u64,
    prefix_hit_tokens: u64,
}

/// A submitted step, as its results will need it.
#[derive(Debug)]
struct InFlight {
    ticket: Ticket,
    rows: Vec<StepRow>,
    stats: StepStats,
}

impl Scheduler {
    pub(crate) fn new(geometry: Geometry, limits: QueueLimits, enable_prefix_cache: bool) -> Scheduler {
        assert!(geometry.max_step_rows > 0 && geometry.max_step_tokens > 0, "no step fits {geometry:?}");
        Scheduler {
            geometry,
            kv: KvCache::new(geometry.blocks, geometry.block_tokens, enable_prefix_cache),
            running: Vec::new(),
            waiting: Queue::new(limits),
            in_flight: VecDeque::new(),
            stays: 0,
            preemptions: 0,
            prefix_query_tokens: 0,
            prefix_hit_tokens: 0,
        }
    }

    /// Queues a request, or says why not.
    pub(crate) fn add(&mut self, request: Request, now: f64) -> Result<(), RejectReason> {
        let known = self.waiting.iter().chain(self.running.iter().map(|run| &run.sequence));
        assert!(known.map(|sequence| sequence.id).all(|id| id != request.id), "{:?} is already live", request.id);
        admission::fits_engine(&request, &self.geometry)?;
        let sequence = Sequence::new(request, now);
        self.waiting.admits(&sequence, self.free_places())?;
        self.waiting.push_back(sequence);
        Ok(())
    }

    /// Ends a live request with `reason`; `None` if there is none with this id. Steps in flight compute its rows in
    /// vain, and its blocks return after them.
    pub(crate) fn finish(&mut self, id: RequestId, reason: FinishReason) -> Option<RequestUpdate> {
        let sequence = match self.running.iter().position(|run| run.sequence.id == id) {
            Some(index) => self.leave(index),
            None => self.waiting.take(id)?,
        };
        Some(sequence.end(reason))
    }

    /// Decides the next step. `None` if there is nothing that it could compute.
    pub(crate) fn schedule(&mut self, now: f64) -> Option<Step> {
        let mut step = StepBuilder::new(&self.geometry);
        self.schedule_decodes(&mut step);
        self.schedule_prefills(&mut step);
        self.schedule_waiting(&mut step, now);
        step.build()
    }

    /// The step was submitted as `ticket`.
    pub(crate) fn submitted(&mut self, ticket: Ticket, rows: Vec<StepRow>, copied: &[StayId], stats: StepStats) {
        for &stay in copied {
            let run = self.find(stay).expect("nothing ends between scheduling and submitting");
            self.running[run].last_ticket = Some(ticket);
        }
        for (index, row) in rows.iter().enumerate() {
            let run = self.find(row.stay).expect("nothing ends between scheduling and submitting");
            self.running[run].submit(row.end, row.samples, ticket, index as u32);
        }
        self.in_flight.push_back(InFlight { ticket, rows, stats });
    }

    /// The oldest step in flight.
    pub(crate) fn oldest_in_flight(&self) -> Option<Ticket> {
        self.in_flight.front().map(|step| step.ticket)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Takes in what the oldest step in flight produced.
    pub(crate) fn complete(&mut self, output: StepOutput) -> Result<(Vec<RequestUpdate>, StepStats), ExecutorError> {
        let InFlight { ticket, rows, stats } = self.in_flight.pop_front().expect("a step in flight was collected");
        if output.rows.len() != rows.len() {
            return Err(ExecutorError(format!("a step of {} rows gave {} results", rows.len(), output.rows.len())));
        }
        self.kv.collected(ticket);
        let mut updates = Vec::with_capacity(rows.len());
        let mut scores = output.scores.into_iter().peekable();
        for (index, (row, result)) in rows.iter().zip(output.rows).enumerate() {
            let scores = scores.next_if(|scores| scores.row as usize == index);
            updates.extend(self.complete_row(row, result, scores)?);
        }
        Ok((updates, StepStats { busy_seconds: output.busy_seconds, ..stats }))
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.in_flight.is_empty()
    }

    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            oldest_waiting_arrival_seconds: self.waiting.front().map(|sequence| sequence.arrival_seconds),
            queued_prompt_tokens: self.waiting.prompt_tokens(),
            remaining_tokens: self.running.iter().map(|run| run.sequence.remaining_tokens() as u64).sum(),
            kv: self.kv.usage(self.running.iter().map(|run| &run.table)),
            preemptions: self.preemptions,
            prefix_query_tokens: self.prefix_query_tokens,
            prefix_hit_tokens: self.prefix_hit_tokens,
        }
    }

    /// Checks what holds between any two calls; says what does not.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let queued: usize = self.waiting.iter().map(|sequence| sequence.backlog_tokens).sum();
        if queued as u64 != self.waiting.prompt_tokens() {
            return Err(format!("{queued} prompt tokens wait and {} are counted", self.waiting.prompt_tokens()));
        }
        let arrivals = self.running.iter().map(|run| &run.sequence).chain(self.waiting.iter());
        if !arrivals.map(|sequence| sequence.arrival_seconds).is_sorted() {
            return Err("a later arrival runs or waits before an earlier one".into());
        }
        if !self.running.is_sorted_by_key(|run| run.stay) {
            return Err("the running batch is out of order".into());
        }
        self.kv.audit(self.running.iter().map(|run| &run.table))
    }

    /// Sequences with one token to compute, oldest first. Only these may need a block that they do not have: a
    /// prefill got all of its blocks when it was admitted.
    fn schedule_decodes(&mut self, step: &mut StepBuilder) {
        let mut index = 0;
        while index < self.running.len() && step.has_room() {
            if self.running[index].uncomputed() == 1 && self.make_room(index, step) {
                step.push(&self.running[index]);
            }
            index += 1;
        }
    }

    fn schedule_prefills(&mut self, step: &mut StepBuilder) {
        for run in self.running.iter().filter(|run| run.uncomputed() > 1) {
            if !step.has_room() {
                break;
            }
            step.push(run);
        }
    }

    /// Admits from the queue's front while there is room in the step, in the batch and in the pool.
    fn schedule_waiting(&mut self, step: &mut StepBuilder, now: f64) {
        while step.has_room() && self.free_places() > 0 {
            let Some(sequence) = self.waiting.front() else { break };
            let opened = match self.leader(sequence) {
                Some(leader) => self.fork(leader, step),
                None => self.open(),
            };
            let Some((table, cached_tokens)) = opened else { break };
            let sequence = self.waiting.pop_front().expect("the queue has a front");
            step.push(self.enter(sequence, table, cached_tokens, now));
        }
    }

    /// Where the sequence runs whose blocks `sequence` can share.
    fn leader(&self, sequence: &Sequence) -> Option<usize> {
        let leader = sequence.fork_of.filter(|_| sequence.generated() == 0)?;
        let index = self.running.iter().position(|run| run.sequence.id == leader)?;
        let Sequence { tokens, prompt_tokens, .. } = &self.running[index].sequence;
        (tokens[..*prompt_tokens] == sequence.tokens).then_some(index)
    }

    /// Blocks for the queue's front, and how many of its tokens they hold already.
    fn open(&mut self) -> Option<(BlockTable, usize)> {
        let sequence = self.waiting.front()?;
        // A block for each running sequence stays, or their next tokens would preempt what is admitted here.
        let table = match sequence.scores_prompt() {
            true => self.kv.open_uncached(sequence.tokens.len(), self.running.len()),
            false => self.kv.open(&sequence.tokens, self.running.len()),
        }?;
        let cached_tokens = table.published_blocks() * self.geometry.block_tokens as usize;
        if !sequence.was_scheduled() {
            self.prefix_hit_tokens += cached_tokens as u64;
            self.prefix_query_tokens += if self.kv.caches_prefixes() { sequence.prompt_tokens as u64 } else { 0 };
        }
        Some((table, cached_tokens))
    }

    /// The same for a sequence whose prompt is that of the one at `leader`, once a step computes it.
    fn fork(&mut self, leader: usize, step: &mut StepBuilder) -> Option<(BlockTable, usize)> {
        let leader = self.running.get(leader).filter(|leader| leader.has_prompt())?;
        // The last token of the prompt is computed again: its logits are drawn from once for each sequence.
        let shared_tokens = leader.sequence.prompt_tokens - 1;
        let (table, copy) = self.kv.fork(&leader.table, shared_tokens, self.running.len())?;
        copy.into_iter().for_each(|copy| step.copy(leader.stay, copy));
        Some((table, shared_tokens))
    }

    /// Gives the decode at `index` the block that it may need, preempting the latest arrival for it. False where it
    /// has to sit this step out.
    fn make_room(&mut self, index: usize, step: &mut StepBuilder) -> bool {
        loop {
            let run = &mut self.running[index];
            let covered = run.covered_after(1);
            if self.kv.grow(&mut run.table, covered) {
                return true;
            }
            // Blocks on their way back count first: one preemption must not turn into several.
            if self.kv.returning() > step.sitting_out || !self.preempt_latest_after(index) {
                step.sitting_out += 1;
                return false;
            }
        }
    }

    /// Preempts the latest arrival behind `index`, sparing those that only wait for their last token. False where
    /// there is none: earlier arrivals go first, and the one at `index` keeps what it has until they need it.
    fn preempt_latest_after(&mut self, index: usize) -> bool {
        let behind = self.running[index + 1..].iter().rposition(|run| run.uncomputed() > 0);
        let Some(victim) = behind.map(|offset| index + 1 + offset) else { return false };
        let sequence = self.leave(victim);
        self.waiting.push_front(sequence);
        self.preemptions += 1;
        true
    }

    /// What a row's result means for its sequence. Nothing, if that has ended or was preempted since.
    fn complete_row(
        &mut self,
        row: &StepRow,
        result: RowOutput,
        scores: Option<RowScores>,
    ) -> Result<Option<RequestUpdate>, ExecutorError> {
        let Some(index) = self.find(row.stay) else { return Ok(None) };
        if let RowOutput::Failed(error) = result {
            return Ok(Some(self.leave(index).fail(error)));
        }
        let run = &mut self.running[index];
        self.kv.publish(&mut run.table, &run.sequence.tokens[..row.end]);
        let (prompt, sampled) = scores.map_or_else(Default::default, |scores| (scores.prompt, scores.sampled));
        run.sequence.take_scores(row.first, prompt);
        let logprobs = Vec::from_iter(sampled);
        match result {
            RowOutput::Sampled(token) if row.samples => Ok(Some(match run.accept(token) {
                Some(reason) => self.leave(index).end_with(reason, vec![token], logprobs),
                None => run.sequence.update(vec![token], logprobs),
            })),
            RowOutput::Computed if !row.samples => {
                Ok(run.ends_at(row.end).then(|| self.leave(index).end(FinishReason::Length)))
            }
            wrong => Err(ExecutorError(format!("a row that samples: {} gave {wrong:?}", row.samples))),
        }
    }

    fn find(&self, stay: StayId) -> Option<usize> {
        self.running.binary_search_by_key(&stay, |run| run.stay).ok()
    }

    fn free_places(&self) -> usize {
        self.geometry.max_step_rows as usize - self.running.len()
    }

    /// Into the batch, where `table` covers all of the sequence's tokens and holds the first `cached_tokens`.
    fn enter(&mut self, mut sequence: Sequence, table: BlockTable, cached_tokens: usize, now: f64) -> &Running {
        if !sequence.was_scheduled() {
            sequence.first_scheduled(now, cached_tokens);
        }
        self.stays += 1;
        self.running.push(Running::new(StayId(self.stays), sequence, table, cached_tokens));
        &self.running[self.running.len() - 1]
    }

    /// Out of the batch: its blocks return, after the last step in flight that names them.
    fn leave(&mut self, index: usize) -> Sequence {
        let run = self.running.remove(index);
        let last = run.last_ticket.filter(|last| self.in_flight.iter().any(|step| step.ticket == *last));
        self.kv.release(run.table, last);
        run.sequence
    }
}
