//! One step as data: what the scheduler decided and what the executor gave back.

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

/// Names a submitted step until it is collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A token to compute: known, or still being sampled by a step in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputToken {
    /// Its id.
    Known(TokenId),
    /// The token that `ticket` samples in row `row` of its [`StepPlan`]; an executor of one stage feeds it back. If that
    /// row fails, the row that has this token is [`RowOutput::Failed`], too, and so with [`RowOutput::Deferred`].
    SampledBy {
        /// The step in flight.
        ticket: Ticket,
        /// Index into that plan's `rows`.
        row: u32,
    },
}

/// Index of a place for a block outside the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SwapSlotId(pub u32);

/// Moves K and V of a whole block, in all layers of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockMove {
    /// From one block to another.
    Copy {
        /// What is copied.
        from: BlockId,
        /// What is overwritten.
        to: BlockId,
    },
    /// Out of the pool, into a slot.
    SwapOut {
        /// What is kept.
        block: BlockId,
        /// What is overwritten.
        slot: SwapSlotId,
    },
    /// Out of a slot, which keeps it. If that fails, the rows that name the block are [`SequenceFailure::LostKv`].
    SwapIn {
        /// What is read.
        slot: SwapSlotId,
        /// What is overwritten.
        block: BlockId,
    },
}

/// Everything the executor needs for one step. It has no choices left to make.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Blocks to move before anything is computed, in this order.
    pub moves: Vec<BlockMove>,
    /// One row per sequence, decodes and prefill chunks mixed.
    pub rows: Vec<PlanRow>,
    /// How long after its beginning the step waits for what constraints allow.
    pub mask_timeout: Duration,
}

/// One sequence's share of a step.
#[derive(Clone, Debug)]
pub struct PlanRow {
    /// Whose it is: for messages, and for seeding nothing.
    pub request: RequestId,
    /// Tokens to compute, at positions `first_position ..`. Never empty; `SampledBy` only as a single token.
    pub tokens: Vec<InputToken>,
    /// Tokens of this sequence whose K and V are already in its blocks.
    pub first_position: u32,
    /// Blocks of the whole sequence in order, covering at least `first_position + tokens.len()` tokens and a place for
    /// each draft token behind them: as many for each group of layers, one group's after another's. In the place of one that
    /// its group no longer reads is any other. Most rows share them with the sequence's row before.
    pub blocks: Arc<[BlockId]>,
    /// Draw a token from the logits of the row's last token. Absent for a prefill chunk that is not the last.
    pub sample: Option<SampleRow>,
    /// Report what the model thought of the tokens that follow the row's first ones.
    pub score: Option<PromptLogprobsRow>,
}

/// How to draw a row's token.
#[derive(Clone, Debug)]
pub struct SampleRow {
    /// The distribution.
    pub sampling: Arc<Sampling>,
    /// Tokens that must not be drawn (stop tokens before `min_tokens`).
    pub banned: Vec<TokenId>,
    /// The sequence so far, where drawing depends on it.
    pub history: Option<History>,
    /// What may be drawn after the history, where something decides it.
    pub constraint: Option<Arc<dyn Constraint>>,
    /// Report the log probability of the token drawn, and of so many most likely ones.
    pub logprobs: Option<u32>,
    /// Draft tokens of what comes next: they are computed behind the row's last token, and each place that they lead to
    /// draws a token of its own. The row's last token is known then, and it scores nothing. K and V of the draft tokens that
    /// held end up behind the row's tokens, in order.
    pub draft: DraftTree,
}

/// The tokens of a sequence that are known when a step is planned. Where the row's last token is
/// [`InputToken::SampledBy`], that one follows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    /// The prompt, then what was generated.
    pub tokens: Vec<TokenId>,
    /// Leading tokens that are the prompt.
    pub prompt_tokens: usize,
}

/// Which known tokens to report log probabilities of: entry `i` follows the row's token `i`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptLogprobsRow {
    /// The tokens, at most as many as the row has.
    pub targets: Vec<TokenId>,
    /// How many most likely tokens to report beside each.
    pub top: u32,
}

impl PlanRow {
    /// The blocks of each group of layers.
    pub fn tables(&self, groups: &KvGroups) -> ChunksExact<'_, BlockId> {
        self.blocks.chunks_exact((self.blocks.len() / groups.count() as usize).max(1))
    }

    /// Rows of logits that this row needs.
    pub fn logit_count(&self) -> usize {
        let scored = self.score.as_ref().map_or(0, |score| score.targets.len());
        scored + self.sample.as_ref().map_or(0, |sample| 1 + sample.draft.len())
    }

    /// Tokens that this row computes, draft tokens included.
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
    /// Log probabilities of the rows that asked for them, in the order of the rows. Failed rows have none.
    pub scores: Vec<RowLogprobs>,
    /// Seconds the executor was busy with this step; of several stages, the one that was longest.
    pub busy_seconds: f64,
}

/// What one row produced.
#[derive(Clone, Debug, PartialEq)]
pub enum RowOutput {
    /// Nothing was to be sampled.
    Computed,
    /// The token drawn.
    Sampled(TokenId),
    /// What was drawn in a row with draft tokens: those that held, then a token that none foresaw.
    Verified(Vec<TokenId>),
    /// The row was computed, and nothing was drawn: what its constraint allows was not known in time.
    Deferred,
    /// This sequence failed; the others are fine.
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

/// Why one sequence failed while the others went on, in words for its client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SequenceFailure {
    /// What was asked for leaves nothing to go on with, and would leave nothing again: the client's to change.
    #[error("{0}")]
    Unsatisfiable(String),
    /// What was asked for takes more time than a sequence has, and would again: the client's to change.
    #[error("{0}")]
    TooSlow(String),
    /// The model gave numbers that are none.
    #[error("{0}")]
    Corrupted(String),
    /// The row could not be computed.
    #[error("{0}")]
    Uncomputable(String),
    /// Blocks in which the row begins could not be brought back. Its sequence is computed again, and its client hears
    /// nothing of it.
    #[error("{0}")]
    LostKv(String),
}

/// The log probabilities that one row asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct RowLogprobs {
    /// Index of the row.
    pub row: u32,
    /// Of the targets of its [`PromptLogprobsRow`], in their order.
    pub prompt: Vec<TokenLogprobs>,
    /// Of the tokens drawn, in their order.
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
