//! A sequence: the tokens of one request. [`Sequence`] is a waiting one, [`Running`] one in the running batch.
//!
//! A request finishes by giving up its [`Sequence`] by value ([`Sequence::finish`]), so it finishes once. Scheduling
//! wraps a sequence in [`Running`] and preemption unwraps it, so a waiting sequence cannot hold blocks.

use std::sync::Arc;

use crate::constraint::Constraint;
use crate::draft::DraftTree;
use crate::kv::BlockTable;
use crate::plan::{History, InputToken, PlanRow, PromptLogprobsRow, SampleRow, SequenceFailure, Ticket};
use crate::request::{
    BeamSearch, CacheScope, FinishReason, Request, RequestDemand, RequestId, Sampling, Tenant, TokenId,
};
use crate::sampling::TokenLogprobs;
use crate::scheduler::DraftState;
use crate::update::RequestUpdate;

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    pub(crate) tenant: Tenant,
    pub(crate) cache_scope: CacheScope,
    pub(crate) priority: i32,
    /// The prompt, then the generated tokens.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prompt_tokens: usize,
    /// Prompt tokens that count against the queue limits, as far as they are known before it is scheduled.
    pub(crate) backlog_tokens: usize,
    /// Prompt tokens that were computed or cached when the sequence last left the running batch.
    pub(crate) computed_prompt_tokens: usize,
    /// Its blocks were lost, and it returned to the queue to be recomputed, out of arrival order.
    pub(crate) recomputes_lost: bool,
    /// A live request with the same prompt, whose blocks it shares.
    pub(crate) fork_of: Option<RequestId>,
    /// The beam search that it is part of.
    pub(crate) beams: Option<BeamSearch>,
    max_tokens: usize,
    min_tokens: usize,
    stop_tokens: Vec<TokenId>,
    sampling: Arc<Sampling>,
    constraint: Option<Arc<dyn Constraint>>,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    /// Prompt logprobs that no update has reported yet.
    untold_prompt_logprobs: Vec<TokenLogprobs>,
    /// Prompt tokens whose logprobs are known or were reported.
    scored_prompt_tokens: usize,
    pub(crate) arrival_seconds: f64,
    first_scheduled_seconds: Option<f64>,
    cached_tokens: u32,
}

impl Sequence {
    pub(crate) fn new(request: Request, now: f64) -> Sequence {
        let Request {
            id,
            tenant,
            cache_scope,
            priority,
            prompt,
            max_tokens,
            min_tokens,
            stop_tokens,
            sampling,
            constraint,
            logprobs,
            prompt_logprobs,
            fork_of,
            beams,
        } = request;
        Sequence {
            id,
            tenant,
            cache_scope,
            priority,
            prompt_tokens: prompt.len(),
            backlog_tokens: if fork_of.is_some() { 1 } else { prompt.len() },
            tokens: prompt,
            computed_prompt_tokens: 0,
            recomputes_lost: false,
            fork_of: fork_of.filter(|_| prompt_logprobs.is_none() && beams.is_none()),
            beams,
            max_tokens: max_tokens as usize,
            min_tokens: min_tokens as usize,
            stop_tokens,
            sampling: Arc::new(sampling),
            constraint,
            logprobs,
            prompt_logprobs,
            untold_prompt_logprobs: Vec::new(),
            scored_prompt_tokens: 0,
            arrival_seconds: now,
            first_scheduled_seconds: None,
            cached_tokens: 0,
        }
    }

    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    /// Most tokens that it may still generate.
    pub(crate) fn remaining_tokens(&self) -> usize {
        self.max_tokens - self.generated()
    }

    /// Whether it generates tokens at all.
    fn generates(&self) -> bool {
        self.max_tokens > 0
    }

    /// Whether prompt logprobs were requested: then the whole prompt is computed, as logits are not cached.
    pub(crate) fn wants_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs.is_some()
    }

    /// The tokens that need not be computed if they are cached: all but the last one, whose logits are needed.
    pub(crate) fn cacheable(&self) -> &[TokenId] {
        let count = if self.wants_prompt_logprobs() { 0 } else { self.tokens.len() - 1 };
        &self.tokens[..count]
    }

    /// What it demands while it waits. A preempted sequence has all of its tokens to compute.
    pub(crate) fn demand(&self) -> RequestDemand {
        let prompt_tokens = if self.was_scheduled() { self.tokens.len() } else { self.backlog_tokens } as u32;
        let (tenant, priority, max_tokens) = (self.tenant, self.priority, self.remaining_tokens() as u32);
        RequestDemand { tenant, priority, prompt_tokens, max_tokens }
    }

    pub(crate) fn was_scheduled(&self) -> bool {
        self.first_scheduled_seconds.is_some()
    }

    /// Records the first scheduling. Later ones, after a preemption, are not reported.
    pub(crate) fn first_scheduled(&mut self, now: f64, cached_tokens: usize) {
        self.first_scheduled_seconds = Some(now);
        self.cached_tokens = cached_tokens as u32;
    }

    /// Appends a sampled token. Returns the reason if the sequence finishes with it.
    pub(crate) fn accept(&mut self, token: TokenId) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (self.remaining_tokens() == 0).then_some(FinishReason::Length)
    }

    /// Adds the prompt logprobs of a row that began at token `first`. Some are known already if the row was
    /// recomputed after a preemption.
    pub(crate) fn add_prompt_logprobs(&mut self, first: usize, logprobs: Vec<TokenLogprobs>) {
        let known = self.scored_prompt_tokens.saturating_sub(first);
        self.scored_prompt_tokens = self.scored_prompt_tokens.max(first + logprobs.len());
        self.untold_prompt_logprobs.extend(logprobs.into_iter().skip(known));
    }

    /// An update that does not finish the request.
    pub(crate) fn update(&mut self, tokens: Vec<TokenId>, logprobs: Vec<TokenLogprobs>) -> RequestUpdate {
        RequestUpdate {
            request: self.id,
            tokens,
            logprobs,
            prompt_logprobs: std::mem::take(&mut self.untold_prompt_logprobs),
            finish: None,
            failure: None,
            cached_tokens: self.cached_tokens,
            arrival_seconds: self.arrival_seconds,
            first_scheduled_seconds: self.first_scheduled_seconds,
        }
    }

    /// The final update. No other function makes one.
    pub(crate) fn finish(self, reason: FinishReason) -> RequestUpdate {
        self.finish_with(reason, Vec::new(), Vec::new())
    }

    /// The final update, with the last tokens.
    pub(crate) fn finish_with(
        mut self,
        reason: FinishReason,
        tokens: Vec<TokenId>,
        logprobs: Vec<TokenLogprobs>,
    ) -> RequestUpdate {
        RequestUpdate { finish: Some(reason), ..self.update(tokens, logprobs) }
    }

    /// The final update of a sequence that failed.
    pub(crate) fn fail(self, failure: SequenceFailure) -> RequestUpdate {
        RequestUpdate { failure: Some(failure), ..self.finish(FinishReason::Error) }
    }

    /// The sampling part of a row that generates token number `index`, and samples after draft tokens.
    fn sample_row(&self, index: usize, draft: DraftTree) -> SampleRow {
        let banned = if index < self.min_tokens { self.stop_tokens.clone() } else { Vec::new() };
        let (sampling, constraint) = (self.sampling.clone(), self.constraint.clone());
        let history = (constraint.is_some() || sampling.reads_history()).then(|| self.history());
        // Beam search continues with the most likely tokens, whatever is sampled.
        let told = self.beams.map(|beams| beams.width.saturating_mul(2).max(self.logprobs.unwrap_or(0)));
        SampleRow { sampling, banned, history, constraint, logprobs: told.or(self.logprobs), draft }
    }

    fn history(&self) -> History {
        History { tokens: self.tokens.clone(), prompt_tokens: self.prompt_tokens }
    }

    /// Its stop tokens, and the most tokens that it may have, prompt included.
    pub(crate) fn stop_conditions(&self) -> (Vec<TokenId>, usize) {
        (self.stop_tokens.clone(), self.prompt_tokens + self.max_tokens)
    }

    /// Logprobs that were requested.
    pub(crate) fn logprobs(&self) -> Option<u32> {
        self.logprobs
    }

    /// Most draft tokens that are useful: none after the last token, and none beyond `min_tokens`, as all positions
    /// of a row ban the same tokens.
    pub(crate) fn draft_limit(&self) -> usize {
        let generated = self.generated();
        let banned = self.min_tokens.checked_sub(generated + 1).unwrap_or(usize::MAX);
        if self.beams.is_some() { 0 } else { self.remaining_tokens().saturating_sub(1).min(banned) }
    }

    /// The prompt logprobs of a row over tokens `first..end`: those of the prompt tokens that follow its own.
    fn prompt_logprobs_row(&self, first: usize, end: usize) -> Option<PromptLogprobsRow> {
        let top = self.prompt_logprobs?;
        let targets = self.tokens.get(first + 1..self.prompt_tokens.min(end + 1))?;
        (!targets.is_empty()).then(|| PromptLogprobsRow { targets: targets.to_vec(), top })
    }
}

/// Identifies one run of a sequence: its time in the running batch, from scheduling to finish or preemption. Later
/// runs have higher ids and no id is reused, so the result of a step finds its sequence only while the run that
/// requested it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RunId(pub(crate) u64);

/// A sequence in the running batch.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) id: RunId,
    pub(crate) sequence: Sequence,
    pub(crate) table: BlockTable,
    /// Leading tokens whose K and V are computed, or will be by a step in flight.
    submitted: usize,
    /// Whether the last of those is computed again, because a step deferred sampling after it.
    recompute_last: bool,
    /// Whether a step ever deferred it in this run.
    pub(crate) was_deferred: bool,
    /// Tokens that steps in flight are sampling; they follow `sequence.tokens`.
    pending_samples: usize,
    /// Source of the last of those.
    last_sample: Option<InputToken>,
    /// The last submitted step that has a row of this sequence.
    pub(crate) last_ticket: Option<Ticket>,
    /// Its draft tokens.
    pub(crate) draft: DraftState,
}

impl Running {
    /// Starts a run with `cached_tokens` tokens of the table already computed.
    pub(crate) fn new(id: RunId, sequence: Sequence, table: BlockTable, cached_tokens: usize) -> Running {
        let draft = DraftState::default();
        let (submitted, pending_samples, last_sample, last_ticket) = (cached_tokens, 0, None, None);
        Running {
            id,
            sequence,
            table,
            submitted,
            recompute_last: false,
            was_deferred: false,
            pending_samples,
            last_sample,
            last_ticket,
            draft,
        }
    }

    /// Tokens that the next steps have to compute; 0 once the last token that may be generated is being sampled.
    pub(crate) fn uncomputed(&self) -> usize {
        match self.sequence.remaining_tokens() - self.pending_samples {
            0 if self.sequence.generates() => 0,
            // A deferred sequence: the token being sampled follows one that does not come.
            _ if self.recompute_last && self.pending_samples > 0 => 0,
            // Beams are extended only after all beams of the round were computed.
            _ if self.sequence.beams.is_some() => self.sequence.tokens.len() - self.submitted,
            _ => self.sequence.tokens.len() + self.pending_samples - self.next_index(),
        }
    }

    /// Index of the next token to compute.
    pub(crate) fn next_index(&self) -> usize {
        self.submitted - usize::from(self.recompute_last)
    }

    /// Prompt tokens that are computed, or will be by a step in flight.
    pub(crate) fn computed_prompt_tokens(&self) -> usize {
        self.submitted.min(self.sequence.prompt_tokens)
    }

    /// Whether the whole prompt is computed, or will be by a step in flight.
    pub(crate) fn has_prompt(&self) -> bool {
        self.submitted >= self.sequence.prompt_tokens
    }

    /// Whether only the last known token is left to compute.
    pub(crate) fn is_decoding(&self) -> bool {
        self.pending_samples == 0 && self.uncomputed() == 1 && self.has_prompt()
    }

    /// Whether the next tokens need a row of logits each, for prompt logprobs.
    pub(crate) fn needs_prompt_logits(&self) -> bool {
        self.sequence.wants_prompt_logprobs() && self.next_index() + 1 < self.sequence.prompt_tokens
    }

    /// Tokens still to be computed that the block table covers.
    pub(crate) fn covered_uncomputed(&self, block_tokens: usize) -> usize {
        self.table.covered_blocks() * block_tokens - self.next_index()
    }

    /// Tokens that the block table has to cover for the next `count` tokens.
    pub(crate) fn covered_after(&self, count: usize) -> usize {
        self.next_index() + count
    }

    /// The row that computes the next `count` tokens, at most [`uncomputed`](Self::uncomputed), and samples after the
    /// last of them and after each draft token.
    pub(crate) fn row(&self, count: usize, draft: DraftTree) -> PlanRow {
        let (first, end) = (self.next_index(), self.next_index() + count);
        let known = self.sequence.tokens.get(first..end);
        let tokens = match (known, self.last_sample) {
            (Some(known), _) => known.iter().copied().map(InputToken::Known).collect(),
            (None, Some(sampled)) => vec![sampled],
            (None, None) => unreachable!("a token blocks_beyond the known ones is being sampled"),
        };
        PlanRow {
            request: self.sequence.id,
            tokens,
            first_position: first as u32,
            blocks: self.table.row_blocks(),
            sample: (count == self.uncomputed() && self.sequence.generates())
                .then(|| self.sequence.sample_row(self.sequence.generated() + self.pending_samples, draft)),
            score: self.sequence.prompt_logprobs_row(first, end),
        }
    }

    /// A row that computes the tokens up to `end` was submitted.
    pub(crate) fn submit(&mut self, end: usize, samples: bool, ticket: Ticket, row: u32) {
        self.submitted = end;
        self.recompute_last = false;
        self.last_ticket = Some(ticket);
        if samples {
            self.pending_samples += 1;
            self.last_sample = Some(InputToken::SampledBy { ticket, row });
        }
    }

    /// Whether a step in flight samples for it.
    pub(crate) fn is_sampling(&self) -> bool {
        self.pending_samples > 0
    }

    /// A step in flight returned the candidates of this beam.
    pub(crate) fn note_beam_sample(&mut self) {
        self.pending_samples -= 1;
    }

    /// A step deferred sampling after the tokens up to `end`. So do the steps in flight that continue from there.
    pub(crate) fn defer(&mut self, end: usize) {
        self.pending_samples -= 1;
        if !self.recompute_last {
            (self.submitted, self.recompute_last, self.was_deferred) = (end, true, true);
        }
    }

    /// Whether the next token was deferred by an earlier step.
    pub(crate) fn is_deferred(&self) -> bool {
        self.recompute_last
    }

    /// A step sampled `tokens`; all but the last are accepted draft tokens, which it also computed. Returns how many
    /// of them the sequence takes, and the reason if it finishes with the last of these.
    pub(crate) fn accept(&mut self, tokens: &[TokenId]) -> (usize, Option<FinishReason>) {
        self.pending_samples -= 1;
        self.submitted += tokens.len() - 1;
        for (count, &token) in (1..).zip(tokens) {
            if let Some(reason) = self.sequence.accept(token) {
                return (count, Some(reason));
            }
        }
        (tokens.len(), None)
    }

    /// Whether the request asked only to compute its tokens, and they end at `end`.
    pub(crate) fn is_complete_at(&self, end: usize) -> bool {
        !self.sequence.generates() && end == self.sequence.tokens.len()
    }
}
