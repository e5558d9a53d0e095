//! The scheduler: which sequences run in the next step, with how many tokens, in which blocks; and what the step's
//! output means.
//!
//! Each step has a token budget. Decodes come first, then prefill chunks of running sequences, then admission from the
//! queue, all in the order of the [`Policy`]. If a sequence finds no block for its next token, the running sequence
//! that is last in that order is preempted: its blocks are released and its tokens recomputed later. The scheduler
//! knows no executor and no clock; steps may be in flight while it decides.
//!
//! `running` is sorted by run id. Under first come, first served it is also sorted by arrival, and everything in it
//! arrived before everything in `waiting`. Exceptions are sequences that only wait for their last token, which are
//! never preempted, or that did so until that token was deferred; and sequences that lost their blocks and returned to
//! the queue.

mod admission;
mod answer_lengths;
mod beams;
mod fairness;
mod forecast;
mod forecast_state;
mod mask_timeout;
mod order;
mod queue;
mod retry_after;
mod speculation;
mod stages;
mod step;
mod step_time;

use std::collections::{HashMap, VecDeque};

use crate::engine::{EngineConfig, InterTokenLimit};
use crate::executor::{ExecutorError, Geometry};
use crate::kv::{BlockTable, KvCache};
use crate::plan::{RowLogprobs, RowOutput, SequenceFailure, StepOutput, Ticket};
use crate::policy::Policy;
use crate::request::{FinishReason, RejectReason, Request, RequestDemand, RequestId, TokenId};
use crate::sampling::TokenLogprobs;
use crate::sequence::{RunId, Running, Sequence};
use crate::update::{EngineStats, RequestUpdate, StepStats};
use answer_lengths::AnswerLengths;
use beams::BeamGroup;
use fairness::Fairness;
use queue::Queue;
pub use queue::QueueLimits;
use retry_after::RetryTimes;
pub(crate) use speculation::DraftState;
use speculation::Speculation;
pub(crate) use step::ScheduledStep;
use step::{ScheduledRow, StepBuilder};
use step_time::StepTimeModel;

/// All live sequences and the KV cache.
#[derive(Debug)]
pub(crate) struct Scheduler {
    geometry: Geometry,
    policy: Policy,
    inter_token_limit: InterTokenLimit,
    /// Pipeline stages of the executor.
    stages: usize,
    kv: KvCache,
    step_time: StepTimeModel,
    answers: AnswerLengths,
    retry_times: RetryTimes,
    /// `None` unless the policy is [`Policy::Fair`].
    fairness: Option<Fairness>,
    /// `None` without a proposer.
    speculation: Option<Speculation>,
    /// Beam searches, by leader.
    beam_groups: HashMap<RequestId, BeamGroup>,
    /// Final updates that are not the output of a step.
    final_updates: Vec<RequestUpdate>,
    /// Runs from whose blocks the next step copies.
    copy_sources: Vec<RunId>,
    now: f64,
    running: Vec<Running>,
    waiting: Queue,
    in_flight: VecDeque<InFlight>,
    runs: u64,
    preemptions: u64,
    lost_sequences: u64,
    /// Why the last of them lost its blocks, until reported.
    lost: Option<String>,
    prefix_query_tokens: u64,
    prefix_hit_tokens: u64,
    recomputed_tokens: u64,
}

/// A step in flight, with what is needed to interpret its output.
#[derive(Debug)]
struct InFlight {
    ticket: Ticket,
    rows: Vec<ScheduledRow>,
    stats: StepStats,
}

impl Scheduler {
    pub(crate) fn new(geometry: Geometry, config: EngineConfig) -> Scheduler {
        assert!(geometry.max_step_rows > 0 && geometry.max_step_tokens > 0, "no step fits {geometry:?}");
        Scheduler {
            geometry,
            policy: config.policy,
            inter_token_limit: config.inter_token_limit,
            stages: 1,
            kv: KvCache::new(
                geometry.blocks,
                geometry.block_tokens,
                config.enable_prefix_cache.then_some(config.prefix_cache_key),
            )
            .with_ttl(config.prefix_cache_ttl_seconds)
            .with_swap_space(geometry.swap_slots)
            .with_groups(geometry.groups),
            step_time: StepTimeModel::new(),
            answers: AnswerLengths::default(),
            retry_times: RetryTimes::default(),
            fairness: (config.policy == Policy::Fair).then(Fairness::default),
            speculation: None,
            beam_groups: HashMap::new(),
            final_updates: Vec::new(),
            copy_sources: Vec::new(),
            now: 0.0,
            running: Vec::new(),
            waiting: Queue::new(config.queue),
            in_flight: VecDeque::new(),
            runs: 0,
            preemptions: 0,
            lost_sequences: 0,
            lost: None,
            prefix_query_tokens: 0,
            prefix_hit_tokens: 0,
            recomputed_tokens: 0,
        }
    }

    /// Queues a request, or says why it is rejected.
    pub(crate) fn add(&mut self, request: Request, now: f64) -> Result<(), RejectReason> {
        let known = self.waiting.iter().chain(self.running.iter().map(|run| &run.sequence)).chain(self.parked());
        assert!(known.map(|sequence| sequence.id).all(|id| id != request.id), "{:?} is already live", request.id);
        admission::fits_engine(&request, &self.geometry)?;
        if self.is_idle() {
            self.fairness.iter_mut().for_each(Fairness::forget);
        }
        let sequence = Sequence::new(request, now);
        self.waiting.admits(&sequence, self.free_rows())?;
        if self.would_wait() && self.waiting.bounds_ttft() {
            self.waiting.is_in_time(self.predicted_ttft_seconds(sequence.demand()))?;
        }
        let next = match sequence.beams {
            Some(beams) => self.join_group(sequence, beams),
            None => Some(sequence),
        };
        next.into_iter().for_each(|sequence| self.waiting.push_back(sequence));
        Ok(())
    }

    /// Finishes a live request with `reason`; `None` if there is none with this id. The output of its rows in flight
    /// is discarded, and its blocks are released after those steps.
    pub(crate) fn finish(&mut self, id: RequestId, reason: FinishReason) -> Option<RequestUpdate> {
        let sequence = match self.running.iter().position(|run| run.sequence.id == id) {
            Some(index) => self.remove_running(index),
            None => self.waiting.take(id).or_else(|| self.take_parked(id))?,
        };
        self.forget_drafts(id);
        if sequence.was_scheduled() {
            self.answers.observe(sequence.generated(), reason == FinishReason::Stop);
        }
        if let Some(beams) = sequence.beams {
            self.finish_group(beams.leader, reason, None);
        }
        Some(sequence.finish(reason))
    }

    /// Schedules the next step. `None` if there is nothing to compute, or nothing yet.
    pub(crate) fn schedule(&mut self, now: f64) -> Option<ScheduledStep> {
        self.kv.advance_time(now);
        self.now = now;
        if self.waits_for_results() {
            return None;
        }
        self.propose_costly_drafts();
        self.preempt_for_urgent();
        let mut step = StepBuilder::new(&self.geometry, self.running.len());
        self.copy_sources.drain(..).for_each(|run_id| step.add_copy_source(run_id));
        self.schedule_decodes(&mut step);
        step.limit(self.prefill_budget(step.decode_rows()) as usize);
        self.schedule_prefills(&mut step);
        self.schedule_waiting(&mut step, now);
        let mut step = step.build(&mut self.kv)?;
        step.plan.mask_timeout = self.mask_timeout(&step.stats);
        Some(step)
    }

    /// Records that the step was submitted as `ticket`.
    pub(crate) fn submitted(
        &mut self,
        ticket: Ticket,
        rows: Vec<ScheduledRow>,
        copy_sources: &[RunId],
        stats: StepStats,
    ) {
        for run in copy_sources.iter().filter_map(|run_id| self.find(*run_id)).collect::<Vec<_>>() {
            self.running[run].last_ticket = Some(ticket);
        }
        for (index, row) in rows.iter().enumerate() {
            let run = self.find_hinted(index, row.run_id).expect("nothing ends between scheduling and submitting");
            self.running[run].submit(row.end, row.samples, ticket, index as u32);
        }
        self.in_flight.push_back(InFlight { ticket, rows, stats });
    }

    /// The oldest step in flight.
    pub(crate) fn oldest_in_flight(&self) -> Option<Ticket> {
        self.in_flight.front().map(|step| step.ticket)
    }

    /// Processes the output of the oldest step in flight.
    pub(crate) fn complete(&mut self, output: StepOutput) -> Result<(Vec<RequestUpdate>, StepStats), ExecutorError> {
        let InFlight { ticket, rows, stats } = self.in_flight.pop_front().expect("a step in flight was collected");
        if output.rows.len() != rows.len() {
            return Err(ExecutorError(format!("a step of {} rows gave {} results", rows.len(), output.rows.len())));
        }
        self.kv.collected(ticket);
        self.step_time.observe(stats.prefill_tokens, stats.decode_tokens, stats.draft_tokens, output.busy_seconds);
        let mut updates = Vec::with_capacity(rows.len());
        let mut scores = output.scores.into_iter().peekable();
        for (index, (row, result)) in rows.iter().zip(output.rows).enumerate() {
            let scores = scores.next_if(|scores| scores.row as usize == index);
            updates.extend(self.complete_row(index, row, result, scores)?);
        }
        self.propose_free_drafts();
        Ok((updates, StepStats { busy_seconds: output.busy_seconds, ..stats }))
    }

    pub(crate) fn is_idle(&self) -> bool {
        let rests = self.running.is_empty() && self.waiting.is_empty() && self.in_flight.is_empty();
        rests && self.beam_groups.is_empty() && self.final_updates.is_empty()
    }

    /// Final updates that are not the output of a step.
    pub(crate) fn take_final_updates(&mut self) -> Vec<RequestUpdate> {
        std::mem::take(&mut self.final_updates)
    }

    /// Why a sequence lost its blocks, if one did since the last call.
    pub(crate) fn take_lost(&mut self) -> Option<String> {
        self.lost.take()
    }

    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            oldest_waiting_arrival_seconds: self.oldest_arrival_seconds(),
            queued_prompt_tokens: self.waiting.prompt_tokens(),
            predicted_ttft_seconds: self.predicted_ttft_seconds(RequestDemand::MINIMAL),
            remaining_tokens: self.running.iter().map(|run| run.sequence.remaining_tokens() as u64).sum(),
            kv: self.kv.usage(self.running.iter().map(|run| &run.table)),
            preemptions: self.preemptions,
            lost_sequences: self.lost_sequences,
            prefix_query_tokens: self.prefix_query_tokens,
            prefix_hit_tokens: self.prefix_hit_tokens,
            recomputed_tokens: self.recomputed_tokens,
            swap: self.kv.swap_stats(),
            drafts: self.draft_stats(),
        }
    }

    /// Checks the invariants that hold between any two calls; the error names a broken one.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let queued: usize = self.waiting.iter().map(|sequence| sequence.backlog_tokens).sum();
        if queued as u64 != self.waiting.prompt_tokens() {
            return Err(format!("{queued} prompt tokens wait and {} are counted", self.waiting.prompt_tokens()));
        }
        let going_on = self.running.iter().filter(|run| run.uncomputed() > 0 && !run.was_deferred);
        let arrivals = going_on.map(|run| &run.sequence).chain(self.waiting.iter());
        let arrivals = arrivals.filter(|sequence| !sequence.recomputes_lost).map(|sequence| sequence.arrival_seconds);
        if self.policy == Policy::Fcfs && self.beam_groups.is_empty() && !arrivals.is_sorted() {
            return Err("a later arrival runs or waits before an earlier one".into());
        }
        if !self.running.is_sorted_by_key(|run| run.id) {
            return Err("the running batch is out of order".into());
        }
        self.kv.audit(self.running.iter().map(|run| &run.table))
    }

    /// Adds the sequences that have one token to compute.
    fn schedule_decodes(&mut self, step: &mut StepBuilder) {
        let (min_acceptance, prompts, share) =
            (self.min_acceptance(), self.reserved_for_prompts(), self.decode_row_limit());
        let mut others = self.running.iter().filter(|run| self.decodes_next(run)).count().min(share);
        for (place, run_id) in self.service_order().into_iter().enumerate() {
            if !step.has_room() || step.decode_rows() as usize == share {
                break;
            }
            let decodes = self.find_hinted(place, run_id).is_some_and(|index| self.decodes_next(&self.running[index]));
            others = others.saturating_sub(usize::from(decodes));
            if let Some(index) = decodes.then(|| self.reserve_block(place, run_id, step)).flatten() {
                let draft = self.draft(index, step.draft_room(others + prompts), min_acceptance);
                step.push_drafted(&self.running[index], draft);
            }
        }
    }

    /// Adds the sequences that have several. They have blocks for all their tokens, except in windowed groups.
    fn schedule_prefills(&mut self, step: &mut StepBuilder) {
        if !self.has_prefills() {
            return; // as in most steps
        }
        for (place, run_id) in self.service_order().into_iter().enumerate() {
            if !step.has_room() {
                break;
            }
            let prefills = self.find_hinted(place, run_id).is_some_and(|index| self.running[index].uncomputed() > 1);
            if let Some(index) = prefills.then(|| self.reserve_block(place, run_id, step)).flatten() {
                self.prefill(index, step);
            }
        }
    }

    fn has_prefills(&self) -> bool {
        self.running.iter().any(|run| run.uncomputed() > 1)
    }

    /// Adds the next tokens of the sequence at `index`, as many as the step and the blocks of its windows have room
    /// for.
    fn prefill(&mut self, index: usize, step: &mut StepBuilder) {
        let headroom = self.running.len();
        let run = &mut self.running[index];
        let covered = run.covered_after(step.room_for(run));
        self.kv.grow_if_spare(&mut run.table, covered, headroom);
        step.push(run);
    }

    /// Admits from the queue while there is room in the step, in the batch and in the pool.
    fn schedule_waiting(&mut self, step: &mut StepBuilder, now: f64) {
        while step.has_room() {
            let Some(next) = self.next_waiting(now) else { break };
            if self.free_rows() == 0 && !self.park_idle_beam() {
                break;
            }
            let leader = self.waiting.get(next).and_then(|sequence| self.fork_source(sequence));
            let opened = match leader {
                Some(leader) => self.fork(next, leader, step),
                None => self.allocate(next),
            };
            let Some((table, cached_tokens)) = opened else {
                if self.park_idle_beam() {
                    continue;
                }
                break;
            };
            let sequence = self.waiting.remove(next).expect("the next one is in the queue");
            self.add_running(sequence, table, cached_tokens, now);
            self.prefill(self.running.len() - 1, step);
        }
    }

    /// Index of the running sequence whose blocks `sequence` can share.
    fn fork_source(&self, sequence: &Sequence) -> Option<usize> {
        let leader = sequence.fork_of.filter(|_| sequence.generated() == 0)?;
        let index = self.running.iter().position(|run| run.sequence.id == leader)?;
        let Running { sequence: leader, table, .. } = &self.running[index];
        let same = leader.cache_scope == sequence.cache_scope
            && leader.tokens[..leader.prompt_tokens] == sequence.tokens[..sequence.prompt_tokens];
        (same && self.kv.still_holds_window(table, leader.prompt_tokens - 1)).then_some(index)
    }

    /// Allocates blocks for the waiting sequence at `next`. Returns its block table and the number of its tokens that
    /// are cached there.
    fn allocate(&mut self, next: usize) -> Option<(BlockTable, usize)> {
        let sequence = self.waiting.get(next)?;
        // Leave a block for each running sequence, or their next tokens would preempt the one that is admitted here.
        let table = match sequence.wants_prompt_logprobs() {
            true => self.kv.allocate_uncached(sequence.tokens.len(), sequence.cache_scope, self.running.len()),
            false => self.kv.allocate(&sequence.tokens, sequence.cache_scope, self.running.len()),
        }?;
        let cached_tokens = table.published_blocks() * self.geometry.block_tokens as usize;
        if !sequence.was_scheduled() {
            self.prefix_hit_tokens += cached_tokens as u64;
            self.prefix_query_tokens += if self.kv.caches_prefixes() { sequence.prompt_tokens as u64 } else { 0 };
        }
        Some((table, cached_tokens))
    }

    /// The same for a sequence that shares the prompt of the running one at `leader`, once a step computes that
    /// prompt.
    fn fork(&mut self, next: usize, leader: usize, step: &mut StepBuilder) -> Option<(BlockTable, usize)> {
        let scope = self.waiting.get(next)?.cache_scope;
        let leader = self.running.get(leader).filter(|leader| leader.has_prompt())?;
        // The last prompt token is recomputed: its logits are sampled from once for each sequence.
        let shared_tokens = leader.sequence.prompt_tokens - 1;
        let table = self.kv.fork(&leader.table, shared_tokens, scope, self.running.len())?;
        step.add_copy_source(leader.id);
        self.recomputed_tokens += 1;
        Some((table, shared_tokens))
    }

    /// Reserves the blocks for a sequence's next token, preempting others if necessary. Returns its index after that;
    /// `None` if it has to skip this step.
    fn reserve_block(&mut self, place: usize, run_id: RunId, step: &mut StepBuilder) -> Option<usize> {
        loop {
            let index = self.find_hinted(place, run_id)?;
            let run = &mut self.running[index];
            let covered = run.covered_after(1);
            if self.kv.grow(&mut run.table, covered) {
                return Some(index);
            }
            // Wait for blocks that steps in flight will release, so that one preemption does not become several.
            if self.kv.pending_free() > step.without_block
                || !(self.park_idle_beam() || self.preempt_behind(index, step))
            {
                step.without_block += 1;
                return None;
            }
        }
    }

    /// Preempts the last sequence in the order of service, if it is after the one at `index`. Spares sequences that
    /// only wait for their last token, and those in the step. False if there is none: then the one at `index` keeps
    /// its blocks until earlier ones need them.
    fn preempt_behind(&mut self, index: usize, step: &StepBuilder) -> bool {
        let own = self.service_rank(&self.running[index]);
        let running = self.running.iter().enumerate().filter(|(_, run)| run.uncomputed() > 0);
        let behind = running.filter(|(_, run)| self.service_rank(run) > own && !step.has(run.id));
        let Some((victim, _)) = behind.max_by_key(|(_, run)| self.service_rank(run)) else { return false };
        self.preempt(victim);
        true
    }

    fn preempt(&mut self, index: usize) {
        let sequence = self.remove_running(index);
        self.waiting.put_back(sequence);
        self.preemptions += 1;
    }

    /// Returns a sequence that lost its blocks to the queue, with what it has generated; its K and V are recomputed.
    fn requeue_lost(&mut self, index: usize, why: String) {
        let mut sequence = self.remove_running(index);
        sequence.recomputes_lost = true;
        self.waiting.put_back(sequence);
        self.lost_sequences += 1;
        self.lost = Some(why);
    }

    /// Processes the output of one row. There is nothing to do if the run has ended since.
    fn complete_row(
        &mut self,
        place: usize,
        row: &ScheduledRow,
        result: RowOutput,
        scores: Option<RowLogprobs>,
    ) -> Result<Option<RequestUpdate>, ExecutorError> {
        let Some(index) = self.find_hinted(place, row.run_id) else { return Ok(None) };
        if let RowOutput::Failed(failure) = result {
            self.kv.invalidate(&self.running[index].table);
            if let SequenceFailure::LostKv(why) = failure {
                self.requeue_lost(index, why);
                return Ok(None);
            }
            let sequence = self.end_run(index);
            if let Some(beams) = sequence.beams {
                self.finish_group(beams.leader, FinishReason::Error, Some(&failure));
            }
            return Ok(Some(sequence.fail(failure)));
        }
        let defer = result == RowOutput::Deferred && row.samples;
        if defer {
            self.running[index].defer(row.end);
        }
        let computed = if defer { self.running[index].next_index() } else { row.end };
        self.publish_computed(index, computed);
        let run = &mut self.running[index];
        let (prompt, sampled) = scores.map_or_else(Default::default, |scores| (scores.prompt, scores.sampled));
        run.sequence.add_prompt_logprobs(row.first, prompt);
        match result {
            RowOutput::Deferred if row.samples => Ok(None),
            RowOutput::Sampled(_) if row.samples && run.sequence.beams.is_some() => {
                run.note_beam_sample();
                let (id, beams) = (run.sequence.id, run.sequence.beams);
                beams.into_iter().for_each(|beams| self.add_candidates(beams.leader, id, sampled.first().cloned()));
                Ok(None)
            }
            RowOutput::Sampled(token) if row.samples && row.drafted == 0 => {
                Ok(Some(self.accept_tokens(index, row, vec![token], sampled)))
            }
            RowOutput::Verified(tokens) if row.drafted > 0 && (1..=row.drafted + 1).contains(&tokens.len()) => {
                Ok(Some(self.accept_tokens(index, row, tokens, sampled)))
            }
            RowOutput::Computed if !row.samples => {
                Ok(run.is_complete_at(row.end).then(|| self.end_run(index).finish(FinishReason::Length)))
            }
            wrong => Err(ExecutorError(format!("{row:?} gave {wrong:?}"))),
        }
    }

    /// Adds the sampled tokens of a row to its sequence.
    fn accept_tokens(
        &mut self,
        index: usize,
        row: &ScheduledRow,
        mut tokens: Vec<TokenId>,
        mut logprobs: Vec<TokenLogprobs>,
    ) -> RequestUpdate {
        self.record_verification(index, &tokens, row.drafted);
        let run = &mut self.running[index];
        let (taken, finish) = run.accept(&tokens);
        tokens.truncate(taken);
        logprobs.truncate(taken);
        if let Some(fairness) = &mut self.fairness {
            fairness.spend(run.sequence.tenant, taken);
        }
        // All but the last are accepted draft tokens, which are computed.
        if taken > 1 {
            self.publish_computed(index, row.end + taken - 1);
        }
        match finish {
            Some(reason) => self.finish_run(index, reason).finish_with(reason, tokens, logprobs),
            None => self.running[index].sequence.update(tokens, logprobs),
        }
    }

    /// The first `computed` tokens of a sequence are computed: adds their blocks to the prefix cache, and releases
    /// those that its windows have passed.
    fn publish_computed(&mut self, index: usize, computed: usize) {
        let in_flight = self.last_in_flight(&self.running[index]);
        let run = &mut self.running[index];
        self.kv.publish(&mut run.table, &run.sequence.tokens[..computed]);
        self.kv.release_out_of_window(&mut run.table, computed, in_flight);
    }

    /// Takes a sequence with a complete answer out of the batch.
    fn finish_run(&mut self, index: usize, reason: FinishReason) -> Sequence {
        let sequence = self.end_run(index);
        self.answers.observe(sequence.generated(), reason == FinishReason::Stop);
        sequence
    }

    /// Takes a sequence out of the batch for good.
    fn end_run(&mut self, index: usize) -> Sequence {
        let sequence = self.remove_running(index);
        self.forget_drafts(sequence.id);
        sequence
    }

    fn find(&self, run_id: RunId) -> Option<usize> {
        self.running.binary_search_by_key(&run_id, |run| run.id).ok()
    }

    /// Finds a run, at `place` first: it is there unless earlier ones have left.
    fn find_hinted(&self, place: usize, run_id: RunId) -> Option<usize> {
        let is_there = self.running.get(place).is_some_and(|run| run.id == run_id);
        if is_there { Some(place) } else { self.find(run_id) }
    }

    fn free_rows(&self) -> usize {
        self.geometry.max_step_rows as usize - self.running.len()
    }

    /// Adds a sequence to the end of the batch; `table` holds its first `cached_tokens` tokens.
    fn add_running(&mut self, mut sequence: Sequence, table: BlockTable, cached_tokens: usize, now: f64) {
        if !sequence.was_scheduled() {
            sequence.first_scheduled(now, cached_tokens);
            if let Some(fairness) = &mut self.fairness {
                fairness.spend(sequence.tenant, sequence.prompt_tokens.saturating_sub(cached_tokens));
            }
        }
        self.recomputed_tokens += sequence.computed_prompt_tokens.saturating_sub(cached_tokens) as u64;
        self.runs += 1;
        self.running.push(Running::new(RunId(self.runs), sequence, table, cached_tokens));
    }

    /// Takes a sequence out of the batch. Its blocks are released after the last step in flight that names them.
    fn remove_running(&mut self, index: usize) -> Sequence {
        let mut run = self.running.remove(index);
        run.sequence.computed_prompt_tokens = run.computed_prompt_tokens();
        let last = self.last_in_flight(&run);
        self.kv.release(run.table, last);
        run.sequence
    }

    /// The last step in flight that names the blocks of a sequence.
    fn last_in_flight(&self, run: &Running) -> Option<Ticket> {
        run.last_ticket.filter(|last| self.in_flight.iter().any(|step| step.ticket == *last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::KvGroups;

    /// A small device.
    pub(super) const GEOMETRY: Geometry = Geometry {
        block_tokens: 4,
        blocks: 64,
        swap_slots: 0,
        max_sequence_tokens: 64,
        max_step_rows: 8,
        max_step_tokens: 16,
        max_step_logits: 16,
        vocabulary: 10,
        groups: KvGroups::ONE,
    };

    type Damage = fn(&mut Scheduler);

    /// Two running sequences and two waiting ones.
    fn busy(policy: Policy) -> Scheduler {
        let geometry =
            Geometry { blocks: 8, max_sequence_tokens: 16, max_step_rows: 2, max_step_logits: 2, ..GEOMETRY };
        let mut scheduler = Scheduler::new(geometry, EngineConfig { policy, ..EngineConfig::PLAIN });
        for id in 0..4 {
            scheduler.add(Request::greedy(RequestId(id), vec![1, 2, 3], 4), id as f64).expect("a request that fits");
        }
        scheduler.schedule(4.0).expect("a step");
        scheduler
    }

    #[test]
    fn an_audit_sees_what_is_out_of_order_or_lost() {
        let damages: [(&str, Damage); 4] = [
            ("", |_| {}),
            ("a later arrival", |scheduler| scheduler.running[0].sequence.arrival_seconds = 9.0),
            ("the running batch", |scheduler| scheduler.running[0].id = RunId(9)),
            ("block", |scheduler| drop(scheduler.running.remove(1))),
        ];
        for (expected, damage) in damages {
            let mut scheduler = busy(Policy::Fcfs);
            damage(&mut scheduler);
            let said = scheduler.audit().err().unwrap_or_default();
            assert!(said.starts_with(expected) && said.is_empty() == expected.is_empty(), "{expected}: {said}");
        }
        let mut unordered = busy(Policy::Fair);
        unordered.running[0].sequence.arrival_seconds = 9.0;
        assert_eq!(unordered.audit(), Ok(()), "only who is served as it comes arrives in order");
    }
}
