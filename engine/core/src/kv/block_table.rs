//! The blocks of one sequence, in order.

use super::prefix_cache::PrefixId;
use crate::plan::BlockId;
use crate::request::CacheScope;

/// Block `i` holds the tokens at `i * block_tokens ..`. Each entry but the passed ones is one reference on its block.
///
/// Not `Clone`: a second holder of the same blocks has to take its own references.
#[derive(Debug)]
pub(crate) struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    /// Leading blocks that were given up, as nothing reads them again: these entries repeat the first one that is held,
    /// and are no references.
    pub(super) passed: usize,
    /// Leading blocks that came from the prefix cache or were offered to it.
    pub(super) published: usize,
    /// What the published blocks spell; absent where it cannot be told apart from another prefix.
    pub(super) prefix: Option<PrefixId>,
}

impl BlockTable {
    /// No blocks yet.
    pub(super) fn new(scope: CacheScope) -> BlockTable {
        BlockTable { blocks: Vec::new(), passed: 0, published: 0, prefix: Some(PrefixId::root(scope)) }
    }

    /// The blocks that it has references on.
    pub(super) fn held(&self) -> &[BlockId] {
        &self.blocks[self.passed..]
    }

    /// Takes the leading blocks up to `passed`, of which there are more, out of the table.
    pub(super) fn pass(&mut self, passed: usize) -> Vec<BlockId> {
        let given_up = self.blocks[self.passed..passed].to_vec();
        let first_held = self.blocks[passed];
        self.blocks[..passed].fill(first_held);
        self.passed = passed;
        given_up
    }

    /// Leading blocks whose contents are known to the prefix cache.
    pub(crate) fn published_blocks(&self) -> usize {
        self.published
    }
}
