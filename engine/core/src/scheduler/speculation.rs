//! Whether speculative decoding pays, and how many draft tokens: the acceptance rate against the cost of
//! verification.
//!
//! Draft token number `n` of a sequence is useful with the probability that it and all before it are accepted,
//! `rate^n`. It pays if tokens per second are higher with it than without: if that probability is above the fraction
//! of a token that the step would generate in the time that verifying the draft token takes. Free proposals are made
//! and compared all the time, so that a rising acceptance rate is noticed without computing anything; costly ones are
//! retried now and then.
//!
//! Draft tokens follow known tokens. So a step with draft tokens does not overlap the step before it if it depends on
//! that step's samples; while no sequence has draft tokens, all steps overlap. Steps of different pipeline stages
//! have different sequences, and do not depend on each other.

use super::Scheduler;
use crate::draft::{DraftRequest, DraftTree, MAX_DRAFT_TOKENS, Proposer};
use crate::request::{RequestId, TokenId};
use crate::sequence::Running;
use crate::update::DraftStats;

/// Weight of the newest outcome in the acceptance rate of a sequence, and of all sequences.
const SEQUENCE_WEIGHT: f64 = 0.1;
const ENGINE_WEIGHT: f64 = 0.02;
/// Acceptance rate before any observation.
const INITIAL_ACCEPTANCE: f64 = 0.5;
/// Cost of a draft token before any was measured: this fraction of the duration of a step per row.
const INITIAL_COST: f64 = 0.35;
/// Lower bound of the cost, whatever was measured.
const MIN_COST: f64 = 0.05;
/// How much better than its cost a draft token has to look.
const MARGIN: f64 = 1.15;
/// Tokens after which a sequence without a proposal is tried again: doubled each time, up to the longest pause.
const FIRST_PAUSE_TOKENS: usize = 1;
const LONGEST_PAUSE_TOKENS: usize = 16;
/// Tokens after which a costly proposal that did not pay is tried again.
const TRIAL_TOKENS: usize = 128;

/// Draft tokens of one sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct DraftState {
    /// Draft tokens after the known tokens.
    tree: DraftTree,
    /// Acceptance rate; `None` before any observation.
    acceptance_rate: Option<f64>,
    /// Length of the sequence from which on the proposer is asked again.
    resume_at: usize,
    pause_tokens: usize,
}

/// Speculative decoding of all sequences.
#[derive(Debug)]
pub(super) struct Speculation {
    proposer: Box<dyn Proposer>,
    max_tokens: usize,
    /// Acceptance rate of all sequences.
    acceptance_rate: f64,
    stats: DraftStats,
}

impl Scheduler {
    /// Sets the proposer.
    pub(crate) fn set_proposer(&mut self, proposer: Box<dyn Proposer>, max_tokens: u32) {
        let max_tokens = (max_tokens as usize).min(MAX_DRAFT_TOKENS);
        self.speculation = Some(Speculation {
            proposer,
            max_tokens,
            acceptance_rate: INITIAL_ACCEPTANCE,
            stats: DraftStats::default(),
        });
    }

    pub(super) fn draft_stats(&self) -> DraftStats {
        self.speculation.as_ref().map_or_else(DraftStats::default, |speculation| speculation.stats)
    }

    /// Whether the next step has to wait for those in flight: because its draft tokens follow what they sample, or
    /// because theirs are not verified yet.
    pub(super) fn waits_for_results(&self) -> bool {
        let waits = !self.in_flight.is_empty() && !self.is_pipelined();
        let Some(speculation) = self.speculation.as_ref().filter(|_| waits) else { return false };
        let min_acceptance = self.min_acceptance();
        self.in_flight.iter().any(|step| step.stats.draft_tokens > 0)
            || self.running.iter().any(|run| speculation.wants_draft(run, min_acceptance))
    }

    /// Requests costly proposals, which are made only to be verified.
    pub(super) fn propose_costly_drafts(&mut self) {
        let min_acceptance = self.min_acceptance();
        let Some(speculation) = self.speculation.as_mut().filter(|speculation| !speculation.proposer.is_free()) else {
            return;
        };
        let wanted = |run: &&mut Running| {
            run.is_decoding() && run.draft.tree.is_empty() && speculation.wants_draft(run, min_acceptance)
        };
        let asked: Vec<&mut Running> = self.running.iter_mut().filter(wanted).collect();
        speculation.propose(asked);
    }

    /// Requests free proposals, which are also made to measure the acceptance rate.
    pub(super) fn propose_free_drafts(&mut self) {
        let Some(speculation) = self.speculation.as_mut().filter(|speculation| speculation.proposer.is_free()) else {
            return;
        };
        speculation.propose(self.running.iter_mut().filter(|run| run.draft.is_due(run)).collect());
    }

    /// Tokens of a step that draft tokens must leave free: half, if prompts are being computed or wait. They would
    /// starve as long as draft tokens are accepted.
    pub(super) fn reserved_for_prompts(&self) -> usize {
        let some = !self.waiting.is_empty() || self.has_prefills();
        if some { self.geometry.max_step_tokens as usize / 2 } else { 0 }
    }

    /// The draft tokens that the next step verifies for the sequence at `index`, with blocks for them: those with an
    /// acceptance probability above `min_acceptance`, at most `room`.
    pub(super) fn draft(&mut self, index: usize, room: usize, min_acceptance: f64) -> DraftTree {
        let headroom = self.running.len();
        let (run, Some(speculation)) = (&mut self.running[index], &self.speculation) else {
            return DraftTree::default();
        };
        // A deferred token is sampled first: each draft token would need one more mask in time.
        if !run.is_decoding() || run.is_deferred() || run.draft.tree.is_empty() {
            return DraftTree::default();
        }
        let max_tokens = room.min(speculation.max_tokens).min(run.sequence.draft_limit());
        let count = speculation.count(&run.draft, min_acceptance).min(max_tokens);
        let known = run.covered_after(1);
        let covered = self.kv.grow_if_spare(&mut run.table, known + count, headroom);
        run.draft.tree.first(count.min(covered - known))
    }

    /// The sequence at `index` got `tokens`, in a row with `drafted` draft tokens.
    pub(super) fn record_verification(&mut self, index: usize, tokens: &[TokenId], drafted: usize) {
        let Some(speculation) = &mut self.speculation else { return };
        let run = &mut self.running[index];
        for &token in tokens {
            speculation.observe(&mut run.draft, token);
        }
        if drafted > 0 {
            speculation.stats.count(drafted, tokens.len() - 1);
        }
    }

    /// The request has finished.
    pub(super) fn forget_drafts(&mut self, request: RequestId) {
        if let Some(speculation) = &mut self.speculation {
            speculation.proposer.forget(request);
        }
    }

    /// The acceptance probability above which a draft token pays.
    pub(super) fn min_acceptance(&self) -> f64 {
        if self.speculation.is_none() {
            return f64::INFINITY;
        }
        let rows = self.decode_rows_per_step().max(1);
        let cost = match (self.step_time.predict(0, rows), self.step_time.draft_seconds()) {
            (Some(step), Some(draft)) if step > 0.0 => draft * f64::from(rows) / step,
            _ => INITIAL_COST,
        };
        cost.max(MIN_COST) * MARGIN
    }
}

impl Speculation {
    /// Whether a step should wait in order to verify draft tokens of this sequence.
    fn wants_draft(&self, run: &Running, min_acceptance: f64) -> bool {
        let decodes = run.has_prompt() && run.uncomputed() <= 1 && run.sequence.draft_limit() > 0;
        let (pays, made) = (self.share(&run.draft) > min_acceptance, !run.draft.tree.is_empty());
        let due = run.sequence.tokens.len() >= run.draft.resume_at;
        decodes && if self.proposer.is_free() { pays && made } else { pays || made || due }
    }

    fn share(&self, draft: &DraftState) -> f64 {
        draft.acceptance_rate.unwrap_or(self.acceptance_rate)
    }

    /// Number of leading draft tokens that pay. At least one after a costly proposal, to try it.
    fn count(&self, draft: &DraftState, min_acceptance: f64) -> usize {
        let share = self.share(draft);
        let pays = |node: &usize| share.powi(draft.tree.path(*node as u32).len() as i32) > min_acceptance;
        let count = (0..draft.tree.len()).take_while(pays).count();
        if self.proposer.is_free() { count } else { count.max(1) }
    }

    fn propose(&mut self, mut runs: Vec<&mut Running>) {
        let request = |run: &&mut Running| {
            let max_tokens = self.max_tokens.min(run.sequence.draft_limit());
            (run.sequence.id, max_tokens)
        };
        let asked: Vec<(RequestId, usize)> = runs.iter().map(request).collect();
        let tokens = runs.iter().map(|run| run.sequence.tokens.as_slice());
        let requests: Vec<DraftRequest<'_>> = asked
            .iter()
            .zip(tokens)
            .map(|(&(request, max_tokens), tokens)| DraftRequest { request, tokens, max_tokens })
            .collect();
        let trees = if requests.is_empty() { Vec::new() } else { self.proposer.propose(&requests) };
        for (run, tree) in runs.iter_mut().zip(trees) {
            match self.proposer.is_free() {
                true => run.draft.set_free(tree, run.sequence.tokens.len()),
                false => run.draft.set_costly(tree, run.sequence.tokens.len()),
            }
        }
    }

    fn observe(&mut self, draft: &mut DraftState, token: TokenId) {
        if draft.tree.is_empty() {
            return;
        }
        let rest = draft.tree.subtree_after(token);
        let acceptance_rate = f64::from(u8::from(rest.is_some()));
        draft.tree = rest.unwrap_or_default();
        let share = self.share(draft);
        draft.acceptance_rate = Some(share + SEQUENCE_WEIGHT * (acceptance_rate - share));
        self.acceptance_rate += ENGINE_WEIGHT * (acceptance_rate - self.acceptance_rate);
    }
}

impl DraftState {
    fn is_due(&self, run: &Running) -> bool {
        let useful = run.has_prompt() && run.sequence.draft_limit() > 0;
        useful && self.tree.is_empty() && run.sequence.tokens.len() >= self.resume_at
    }

    /// Stores a free proposal for a sequence of `tokens` tokens. The next one is due when it has failed, or after a
    /// pause if it is empty.
    fn set_free(&mut self, tree: DraftTree, tokens: usize) {
        let pause = if tree.is_empty() { 2 * self.pause_tokens } else { FIRST_PAUSE_TOKENS };
        self.pause_tokens = pause.clamp(FIRST_PAUSE_TOKENS, LONGEST_PAUSE_TOKENS);
        self.resume_at = tokens + self.pause_tokens;
        self.tree = tree;
    }

    /// Stores a costly proposal. If it does not pay, the next one is due after a while.
    fn set_costly(&mut self, tree: DraftTree, tokens: usize) {
        self.resume_at = tokens + TRIAL_TOKENS;
        self.tree = tree;
    }
}

impl DraftStats {
    fn count(&mut self, drafted: usize, accepted: usize) {
        self.drafts += 1;
        self.tokens += drafted as u64;
        self.accepted += accepted as u64;
        self.accepted_by_position[..accepted].iter_mut().for_each(|count| *count += 1);
    }
}

#[cfg(test)]
mod tests;
