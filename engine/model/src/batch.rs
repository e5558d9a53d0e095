//! One step's tokens as the decoder computes them: rows of known tokens, their positions and blocks.

pub(crate) mod bounds;

use std::ops::Range;

use windlass_engine_core::draft::DraftTree;
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
    /// Of each draft token in a tree: the draft tokens of its row that it sees, itself one of them, as bits.
    seen: Vec<u64>,
}

#[derive(Clone, Debug)]
struct Row {
    tokens: usize,
    draft_tokens: usize,
    first_position: u32,
    blocks: Range<usize>,
    seen: Range<usize>,
}

/// One sequence's share of a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct BatchRow<'a> {
    /// Tokens in this step.
    pub tokens: usize,
    /// How many of them, the last ones, are draft tokens.
    pub draft_tokens: usize,
    /// Position of the first one.
    pub first_position: u32,
    /// Blocks of the whole sequence, in order: as many for each group of layers, one group's after another's.
    pub blocks: &'a [u32],
    /// Of the row's last tokens, if they are draft tokens that branch: which of them each sees, as bits. Each draft token lies in
    /// the blocks behind the one before, whatever its position in the text.
    pub seen: &'a [u64],
}

impl<'a> BatchRow<'a> {
    /// The blocks of one of so many groups of layers.
    pub fn table(&self, group: usize, groups: usize) -> &'a [u32] {
        let length = self.blocks.len() / groups;
        &self.blocks[group * length..][..length]
    }

    /// Its tokens as rows of their own: each sees those before it, which lie in the same blocks.
    pub fn token_rows(self) -> impl Iterator<Item = BatchRow<'a>> {
        let positions = (self.first_position..).take(self.tokens);
        positions.map(move |first_position| BatchRow { tokens: 1, draft_tokens: 0, first_position, ..self })
    }
}

/// Which tokens of a row get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logits {
    /// So many of the first: what follows them is scored.
    pub leading: usize,
    /// So many of the last: a token is to be drawn after each.
    pub trailing: usize,
}

impl Logits {
    /// None: a prefill chunk that is not the last.
    pub const NONE: Logits = Logits { leading: 0, trailing: 0 };
    /// The last token alone.
    pub const LAST: Logits = Logits { leading: 0, trailing: 1 };

    /// The first `count` tokens.
    pub const fn leading(count: usize) -> Logits {
        Logits { leading: count, trailing: 0 }
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
        self.seen.clear();
    }

    /// Appends a row of tokens at positions `first_position ..` of the sequence that `blocks` hold.
    pub fn push(
        &mut self,
        tokens: impl IntoIterator<Item = TokenId>,
        first_position: u32,
        blocks: &[BlockId],
        logits: Logits,
    ) {
        self.push_drafted(tokens, &DraftTree::default(), first_position, blocks, logits);
    }

    /// The same with draft tokens behind the tokens; where the last token gets logits each of them does, too.
    pub fn push_drafted(
        &mut self,
        tokens: impl IntoIterator<Item = TokenId>,
        draft: &DraftTree,
        first_position: u32,
        blocks: &[BlockId],
        logits: Logits,
    ) {
        let (first_token, first_block, first_seen) = (self.tokens.len(), self.blocks.len(), self.seen.len());
        self.tokens.extend(tokens);
        let known = self.tokens.len() - first_token;
        self.positions.extend((first_position..).take(known));
        self.push_draft_tokens(draft, first_position + known as u32);
        let count = known + draft.len();
        self.blocks.extend(blocks.iter().map(|block| block.0));
        let (blocks, seen) = (first_block..self.blocks.len(), first_seen..self.seen.len());
        self.rows.push(Row { tokens: count, draft_tokens: draft.len(), first_position, blocks, seen });
        let leading = logits.leading.min(known);
        self.logit_tokens.extend(first_token..first_token + leading);
        let draft_tokens = if logits.trailing > 0 { draft.len() } else { 0 };
        let trailing = (logits.trailing + draft_tokens).min(count - leading);
        self.logit_tokens.extend(self.tokens.len() - trailing..self.tokens.len());
    }

    /// A draft token is at the position that it would have in the text. Draft tokens one after the other are a text like any
    /// other; what branches has to be told what it sees.
    fn push_draft_tokens(&mut self, draft: &DraftTree, first_position: u32) {
        if draft.is_chain() {
            self.tokens.extend(draft.nodes().iter().map(|node| node.token));
            self.positions.extend((first_position..).take(draft.len()));
            return;
        }
        let paths = (0..draft.len() as u32).map(|node| draft.path(node));
        for (node, path) in draft.nodes().iter().zip(paths) {
            self.tokens.push(node.token);
            self.positions.push(first_position + path.len() as u32 - 1);
            self.seen.push(path.into_iter().fold(0, |seen, node| seen | 1 << node));
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
            draft_tokens: row.draft_tokens,
            first_position: row.first_position,
            blocks: &self.blocks[row.blocks.clone()],
            seen: &self.seen[row.seen.clone()],
        })
    }
}
