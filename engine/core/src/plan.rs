//! One step as data: what the scheduler decided and what the executor gave back.

use crate::request::{RequestId, Sampling, TokenId};

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
    /// One row per sequence, decodes and prefill chunks mixed.
    pub rows: Vec<PlanRow>,
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
}

/// How to draw a row's token.
#[derive(Clone, Debug)]
pub struct SampleRow {
    /// The distribution.
    pub sampling: Sampling,
    /// Tokens that must not be drawn (stop tokens before `min_tokens`).
    pub banned: Vec<TokenId>,
}

impl StepPlan {
    /// Tokens computed in this step.
    pub fn token_count(&self) -> usize {
        self.rows.iter().map(|row| row.tokens.len()).sum()
    }
}

/// What a step produced.
#[derive(Clone, Debug)]
pub struct StepOutput {
    /// One entry per row of the plan, in its order.
    pub rows: Vec<RowOutput>,
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
