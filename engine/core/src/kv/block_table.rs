//! The blocks of one sequence, in order.

use super::prefix_cache::PrefixId;
use crate::plan::BlockId;
use crate::request::CacheScope;

/// Block `i` holds the tokens at `i * block_tokens ..`. Each entry is one reference on its block.
///
/// Not `Clone`: a second holder of the same blocks has to take its own references.
#[derive(Debug)]
pub(crate) struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    /// Leading blocks that came from the prefix cache or were offered to it.
    pub(super) published: usize,
    /// What the published blocks spell; absent where it cannot be told apart from another prefix.
    pub(super) prefix: Option<PrefixId>,
}

impl BlockTable {
    /// No blocks yet.
    pub(super) fn new(scope: CacheScope) -> BlockTable {
        BlockTable { blocks: Vec::new(), published: 0, prefix: Some(PrefixId::root(scope)) }
    }

    /// Leading blocks whose contents are known to the prefix cache.
    pub(crate) fn published_blocks(&self) -> usize {
        self.published
    }
}
