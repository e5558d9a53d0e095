//! The tokens of a step as the decoder computes them: rows of known tokens, with positions and blocks.

pub(crate) mod bounds;

use std::ops::Range;

use windlass_engine_core::draft::DraftTree;
use windlass_engine_core::plan::BlockId;
use windlass_engine_core::request::TokenId;

/// The tokens of a step, row after row. It is reused, so that a step allocates no memory for it.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    rows: Vec<Row>,
    blocks: Vec<u32>,
    logit_tokens: Vec<usize>,
    /// For each draft token of a tree that branches: which draft tokens of its row it sees, as bits, itself included.
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

/// One sequence in a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct BatchRow<'a> {
    /// Tokens in this step.
    pub tokens: usize,
    /// How many of them are draft tokens; these are the last ones.
    pub draft_tokens: usize,
    /// Position of the first token.
    pub first_position: u32,
    /// Blocks of the whole sequence, in order: one table after the other, of equal lengths, one for each group of
    /// layers.
    pub blocks: &'a [u32],
    /// For each draft token, if they branch: which of them it sees, as bits. Draft tokens occupy consecutive slots,
    /// whatever their positions in the text. Empty if they do not branch.
    pub seen: &'a [u64],
}

impl<'a> BatchRow<'a> {
    /// The block table of one of `groups` groups of layers.
    pub fn table(&self, group: usize, groups: usize) -> &'a [u32] {
        let length = self.blocks.len() / groups;
        &self.blocks[group * length..][..length]
    }

    /// Its tokens as rows of one token each, which see the tokens before them in the same blocks.
    pub fn token_rows(self) -> impl Iterator<Item = BatchRow<'a>> {
        let positions = (self.first_position..).take(self.tokens);
        positions.map(move |first_position| BatchRow { tokens: 1, draft_tokens: 0, first_position, ..self })
    }
}

/// Which tokens of a row get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logits {
    /// How many of the first tokens get logits: the tokens after them are scored.
    pub leading: usize,
    /// How many of the last tokens get logits: a token is sampled after each.
    pub trailing: usize,
}

impl Logits {
    /// No logits: a prefill chunk that is not the last.
    pub const NONE: Logits = Logits { leading: 0, trailing: 0 };
    /// Logits of the last token.
    pub const LAST: Logits = Logits { leading: 0, trailing: 1 };

    /// Logits of the first `count` tokens.
    pub const fn leading(count: usize) -> Logits {
        Logits { leading: count, trailing: 0 }
    }
}

impl Batch {
    /// Removes all rows.
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

    /// As [`push`](Batch::push), with draft tokens after the tokens. If the last token gets logits, so does each draft
    /// token.
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

    /// Appends draft tokens, each at the position that it would have in the text. A chain is computed like any text;
    /// for a tree that branches it is recorded what each draft token sees.
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
