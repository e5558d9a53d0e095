//! One step as data: what the scheduler decided and what the executor gave back.

use std::sync::Arc;

use crate::constraint::Constraint;
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
    /// The token that `ticket` samples in row `row` of its [`StepPlan`]; the executor feeds it back. If that row
    /// fails, the row that has this token is [`RowOutput::Failed`], too.
    SampledBy {
        /// The step in flight.
        ticket: Ticket,
        /// Index into that plan's `rows`.
        row: u32,
    },
}

/// Everything the executor needs for one step. It has no choices left to make.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Blocks to copy before anything is computed, in this order.
    pub copies: Vec<BlockCopy>,
    /// One row per sequence, decodes and prefill chunks mixed.
    pub rows: Vec<PlanRow>,
}

/// K and V of a whole block, in all layers, from one block to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// What is copied.
    pub from: BlockId,
    /// What is overwritten.
    pub to: BlockId,
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
    /// Blocks of the whole sequence in order, covering `first_position + tokens.len()` tokens.
    pub blocks: Vec<BlockId>,
    /// Draw a token from the logits of the row's last token. Absent for a prefill chunk that is not the last.
    pub sample: Option<SampleRow>,
    /// Report what the model thought of the tokens that follow the row's first ones.
    pub score: Option<ScoreRow>,
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
pub struct ScoreRow {
    /// The tokens, at most as many as the row has.
    pub targets: Vec<TokenId>,
    /// How many most likely tokens to report beside each.
    pub top: u32,
}

impl PlanRow {
    /// Rows of logits that this row needs.
    pub fn logit_count(&self) -> usize {
        self.score.as_ref().map_or(0, |score| score.targets.len()) + usize::from(self.sample.is_some())
    }
}

impl StepPlan {
    /// Tokens computed in this step.
    pub fn token_count(&self) -> usize {
        self.rows.iter().map(|row| row.tokens.len()).sum()
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
    pub scores: Vec<RowScores>,
    /// Seconds the executor was busy with this step.
    pub busy_seconds: f64,
}

/// What one row produced.
#[derive(Clone, Debug, PartialEq)]
pub enum RowOutput {
    /// Nothing was to be sampled.
    Computed,
    /// The token drawn.
    Sampled(TokenId),
    /// This sequence failed (a logit was not finite, say); the others are fine.
    Failed(String),
}

/// The log probabilities that one row asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct RowScores {
    /// Index of the row.
    pub row: u32,
    /// Of the targets of its [`ScoreRow`], in their order.
    pub prompt: Vec<TokenLogprobs>,
    /// Of the token drawn.
    pub sampled: Option<TokenLogprobs>,
}
