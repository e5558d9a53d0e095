//! One step's tokens as the decoder computes them: rows of known tokens, their positions and blocks.

use std::ops::Range;

use windlass_engine_core::plan::BlockId;
use windlass_engine_core::request::TokenId;

/// The tokens of a step, row after row. Reused from step to step, so that a step allocates nothing for it.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    rows: Vec<Row>,
    blocks: Vec<u32>,
    logit_tokens: Vec<usize>,
}

#[derive(Clone, Debug)]
struct Row {
    tokens: usize,
    first_position: u32,
    blocks: Range<usize>,
}

/// One sequence's share of a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct BatchRow<'a> {
    /// Tokens in this step.
    pub tokens: usize,
    /// Position of the first one.
    pub first_position: u32,
    /// Blocks of the whole sequence, in order.
    pub blocks: &'a [u32],
}

/// Which tokens of a row get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logits {
    /// So many of the first: what follows them is scored.
    pub leading: usize,
    /// The last one: a token is to be drawn.
    pub last: bool,
}

impl Logits {
    /// None: a prefill chunk that is not the last.
    pub const NONE: Logits = Logits { leading: 0, last: false };
    /// The last token alone.
    pub const LAST: Logits = Logits { leading: 0, last: true };

    /// The first `count` tokens.
    pub const fn leading(count: usize) -> Logits {
        Logits { leading: count, last: false }
    }
}

impl Batch {
    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.rows.clear();
        self.blocks.clear();
        self.logit_tokens.clear();
    }

    /// Appends a row of tokens at positions `first_position ..` of the sequence that `blocks` hold.
    pub fn push(
        &mut self,
        tokens: impl IntoIterator<Item = TokenId>,
        first_position: u32,
        blocks: &[BlockId],
        logits: Logits,
    ) {
        let (first_token, first_block) = (self.tokens.len(), self.blocks.len());
        self.tokens.extend(tokens);
        let count = self.tokens.len() - first_token;
        self.positions.extend((first_position..).take(count));
        self.blocks.extend(blocks.iter().map(|block| block.0));
        self.rows.push(Row { tokens: count, first_position, blocks: first_block..self.blocks.len() });
        let leading = logits.leading.min(count);
        self.logit_tokens.extend(first_token..first_token + leading);
        if logits.last && leading < count {
            self.logit_tokens.push(self.tokens.len() - 1);
        }
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// All tokens, row after row.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The position of each token.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Indices of the tokens that get logits, ascending.
    pub fn logit_tokens(&self) -> &[usize] {
        &self.logit_tokens
    }

    /// The rows.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = BatchRow<'_>> {
        self.rows.iter().map(|row| BatchRow {
            tokens: row.tokens,
            first_position: row.first_position,
            blocks: &self.blocks[row.blocks.clone()],
        })
    }
}
