//! One step as data: the plan that the scheduler made, and the output that the executor returned.

use std::slice::ChunksExact;
use std::sync::Arc;
use std::time::Duration;

use windlass_engine_contract::kv_groups::KvGroups;

use crate::constraint::{Constraint, MaskUnavailable};
use crate::draft::DraftTree;
use crate::request::{RequestId, Sampling, TokenId};
use crate::sampling::TokenLogprobs;

/// Index of a KV block in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Identifies a submitted step until it is collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A token to compute: a known id, or one that a step in flight is still sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputToken {
    /// The id.
    Known(TokenId),
    /// The token that step `ticket` samples in row `row` of its [`StepPlan`]; an executor with one stage feeds it
    /// back on its own. If that row is [`RowOutput::Failed`] or [`RowOutput::Deferred`], so is the row that has this
    /// token.
    SampledBy {
        /// The step in flight.
        ticket: Ticket,
        /// Index into the `rows` of that plan.
        row: u32,
    },
}

/// Index of a swap slot: a place for a block outside the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SwapSlotId(pub u32);

/// Moves the K and V of a whole block, in all layers of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockMove {
    /// Copies one block to another.
    Copy {
        /// What is copied.
        from: BlockId,
        /// What is overwritten.
        to: BlockId,
    },
    /// Copies a block out of the pool into a swap slot.
    SwapOut {
        /// What is kept.
        block: BlockId,
        /// What is overwritten.
        slot: SwapSlotId,
    },
    /// Copies a swap slot into a block; the slot keeps its contents. If that fails, the rows that name the block are
    /// [`SequenceFailure::LostKv`].
    SwapIn {
        /// What is read.
        slot: SwapSlotId,
        /// What is overwritten.
        block: BlockId,
    },
}

/// Everything the executor needs for one step. It has no decisions left to make.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Moves to make before anything is computed, in this order.
    pub moves: Vec<BlockMove>,
    /// One row for each sequence, decodes and prefill chunks mixed.
    pub rows: Vec<PlanRow>,
    /// How long the step waits for token masks, counted from its start. Rows whose mask is not ready by then are
    /// deferred.
    pub mask_timeout: Duration,
}

/// One sequence in a step.
#[derive(Clone, Debug)]
pub struct PlanRow {
    /// The request: for messages only, never as a seed.
    pub request: RequestId,
    /// Tokens to compute, at positions `first_position ..`. Never empty; `SampledBy` occurs only as a single token.
    pub tokens: Vec<InputToken>,
    /// Leading tokens of the sequence whose K and V are already in its blocks.
    pub first_position: u32,
    /// Block tables of the whole sequence, one for each group of layers, one after another, all of the same length.
    /// Each covers at least `first_position + tokens.len()` tokens and the draft tokens after them. An entry that its
    /// group no longer reads names an arbitrary block. Most rows share this slice with the row of the sequence's
    /// previous step.
    pub blocks: Arc<[BlockId]>,
    /// Sample a token from the logits of the last token. `None` for a prefill chunk that does not end the prompt.
    pub sample: Option<SampleRow>,
    /// Report the logprobs of the tokens that follow the first ones of the row.
    pub score: Option<PromptLogprobsRow>,
}

/// How to sample the next token of a row.
#[derive(Clone, Debug)]
pub struct SampleRow {
    /// Sampling parameters.
    pub sampling: Arc<Sampling>,
    /// Tokens that must not be sampled (stop tokens before `min_tokens`).
    pub banned: Vec<TokenId>,
    /// The sequence so far, if sampling depends on it.
    pub history: Option<History>,
    /// The constraint on the tokens after the history, if any.
    pub constraint: Option<Arc<dyn Constraint>>,
    /// Report the logprob of the sampled token, and of this many most likely ones.
    pub logprobs: Option<u32>,
    /// Draft tokens: they are computed after the last token of the row, and a token is sampled after each of them.
    /// With draft tokens the last token of the row is known, and `score` is `None`. The K and V of accepted draft
    /// tokens end up right after those of the row's tokens, in order.
    pub draft: DraftTree,
}

/// The tokens of a sequence that are known when a step is planned. If the last token of the row is
/// [`InputToken::SampledBy`], it follows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    /// The prompt, then the generated tokens.
    pub tokens: Vec<TokenId>,
    /// Length of the prompt.
    pub prompt_tokens: usize,
}

/// Which known tokens to report logprobs of: target `i` follows token `i` of the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptLogprobsRow {
    /// The targets, at most as many as the row has tokens.
    pub targets: Vec<TokenId>,
    /// How many of the most likely tokens to report beside each target.
    pub top: u32,
}

impl PlanRow {
    /// The block table of each group of layers.
    pub fn tables(&self, groups: &KvGroups) -> ChunksExact<'_, BlockId> {
        self.blocks.chunks_exact((self.blocks.len() / groups.count() as usize).max(1))
    }

    /// Rows of logits that this row needs.
    pub fn logit_count(&self) -> usize {
        let scored = self.score.as_ref().map_or(0, |score| score.targets.len());
        scored + self.sample.as_ref().map_or(0, |sample| 1 + sample.draft.len())
    }

    /// Tokens that this row computes, including draft tokens.
    pub fn token_count(&self) -> usize {
        self.tokens.len() + self.draft().map_or(0, DraftTree::len)
    }

    /// The draft tokens, if there are any.
    pub fn draft(&self) -> Option<&DraftTree> {
        self.sample.as_ref().map(|sample| &sample.draft).filter(|draft| !draft.is_empty())
    }
}

impl StepPlan {
    /// Tokens computed in this step.
    pub fn token_count(&self) -> usize {
        self.rows.iter().map(PlanRow::token_count).sum()
    }

    /// Rows of logits computed in this step.
    pub fn logit_count(&self) -> usize {
        self.rows.iter().map(PlanRow::logit_count).sum()
    }
}

/// What a step produced.
#[derive(Clone, Debug)]
pub struct StepOutput {
    /// One entry per row of the plan, in its order.
    pub rows: Vec<RowOutput>,
    /// Logprobs of the rows that asked for them, in order of rows. Failed rows have none.
    pub scores: Vec<RowLogprobs>,
    /// Seconds that the executor was busy with the step. With several pipeline stages, those of the slowest stage.
    pub busy_seconds: f64,
}

/// Output of one row.
#[derive(Clone, Debug, PartialEq)]
pub enum RowOutput {
    /// The row was computed, and had nothing to sample.
    Computed,
    /// The sampled token.
    Sampled(TokenId),
    /// The tokens sampled in a row with draft tokens: the accepted ones, then one more.
    Verified(Vec<TokenId>),
    /// The row was computed, but no token was sampled: its token mask was not ready in time.
    Deferred,
    /// The sequence failed; the others are not affected.
    Failed(SequenceFailure),
}

impl From<MaskUnavailable> for RowOutput {
    fn from(withheld: MaskUnavailable) -> RowOutput {
        match withheld {
            MaskUnavailable::NotReady => RowOutput::Deferred,
            MaskUnavailable::Failed(failure) => RowOutput::Failed(failure),
        }
    }
}

/// Why one sequence failed while the others went on. The text is for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SequenceFailure {
    /// The constraint leaves no token to sample, and would again: the client has to change the request.
    #[error("{0}")]
    Unsatisfiable(String),
    /// The constraint takes more time than a sequence has, and would again: the client has to change the request.
    #[error("{0}")]
    TooSlow(String),
    /// The logits are not finite.
    #[error("{0}")]
    Corrupted(String),
    /// The row could not be computed.
    #[error("{0}")]
    Uncomputable(String),
    /// The blocks of the row could not be swapped in. The sequence is recomputed, and its client does not notice.
    #[error("{0}")]
    LostKv(String),
}

/// The logprobs that one row asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct RowLogprobs {
    /// Index of the row.
    pub row: u32,
    /// Logprobs of the targets of its [`PromptLogprobsRow`], in order.
    pub prompt: Vec<TokenLogprobs>,
    /// Logprobs of the sampled tokens, in order.
    pub sampled: Vec<TokenLogprobs>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_wants_logits_to_score_to_sample_and_behind_each_draft() {
        let mut draft = DraftTree::default();
        (0..2).for_each(|token| _ = draft.push(token, None));
        let sample = SampleRow {
            sampling: Arc::new(Sampling::GREEDY),
            banned: Vec::new(),
            history: None,
            constraint: None,
            logprobs: None,
            draft,
        };
        let score = PromptLogprobsRow { targets: vec![1, 2, 3], top: 0 };
        let row = |sample, score| PlanRow {
            request: RequestId(0),
            tokens: vec![InputToken::Known(0); 4],
            first_position: 0,
            blocks: Arc::default(),
            sample,
            score,
        };
        assert_eq!(row(None, None).logit_count(), 0);
        assert_eq!(row(None, Some(score.clone())).logit_count(), 3);
        let both = row(Some(sample), Some(score));
        assert_eq!((both.logit_count(), both.token_count()), (3 + 1 + 2, 4 + 2));
        let plan = StepPlan { rows: vec![both.clone(), both], ..StepPlan::default() };
        assert_eq!((plan.logit_count(), plan.token_count()), (12, 12));
    }
}
