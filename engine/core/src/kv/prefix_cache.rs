//! Which block holds the K and V of which prefix.
//!
//! K and V of a block depend on its tokens and on all before them, so a block is found by (prefix, tokens): a trie
//! whose edges are the tokens of one block. The map compares those tokens themselves, so a hash collision costs
//! time and never serves another prompt's cache; its hash is keyed at random in each process by the standard
//! library, so collisions cannot be aimed for. A prefix's id is never reused: what followed an evicted block can no
//! longer be found, and ages out. Each [`CacheScope`] has a trie of its own.

use std::collections::HashMap;
use std::sync::Arc;

use crate::plan::BlockId;
use crate::request::{CacheScope, TokenId};

/// A sequence of whole blocks that is, or was, in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefixId(u128);

impl PrefixId {
    /// The empty prefix of a scope. No other prefix has the highest bit.
    pub(super) fn root(scope: CacheScope) -> PrefixId {
        PrefixId(scope.0 | 1 << 127)
    }
}

/// The id of the prefix in four words, then the tokens that continue it: one slice, so that it can be looked up
/// without owning it.
type Edge = Arc<[u32]>;

#[derive(Debug)]
pub(super) struct PrefixCache {
    found: HashMap<Edge, (PrefixId, BlockId)>,
    /// By block: the edge that leads to it.
    edges: Vec<Option<Edge>>,
    prefixes: u128,
    scratch: Vec<u32>,
}

impl PrefixCache {
    pub(super) fn new(blocks: u32) -> PrefixCache {
        PrefixCache { found: HashMap::new(), edges: vec![None; blocks as usize], prefixes: 0, scratch: Vec::new() }
    }

    /// The block that continues `prefix` with `tokens`, and the prefix that they make together.
    pub(super) fn find(&mut self, prefix: PrefixId, tokens: &[TokenId]) -> Option<(PrefixId, BlockId)> {
        self.spell(prefix, tokens);
        self.found.get(self.scratch.as_slice()).copied()
    }

    /// Makes `block` the one that continues `prefix` with `tokens`, unless another already is.
    pub(super) fn insert(&mut self, prefix: PrefixId, tokens: &[TokenId], block: BlockId) -> PrefixId {
        if let Some((known, _)) = self.find(prefix, tokens) {
            return known;
        }
        let edge = Edge::from(self.scratch.as_slice());
        self.prefixes += 1;
        let longer = PrefixId(self.prefixes);
        self.found.insert(edge.clone(), (longer, block));
        self.edges[block.0 as usize] = Some(edge);
        longer
    }

    /// The block's contents are about to be overwritten.
    pub(super) fn remove(&mut self, block: BlockId) {
        if let Some(edge) = self.edges[block.0 as usize].take() {
            self.found.remove(&edge);
        }
    }

    pub(super) fn holds(&self, block: BlockId) -> bool {
        self.edges[block.0 as usize].is_some()
    }

    /// Writes the edge into `scratch`.
    fn spell(&mut self, prefix: PrefixId, tokens: &[TokenId]) {
        self.scratch.clear();
        self.scratch.extend([0, 32, 64, 96].map(|bits| (prefix.0 >> bits) as u32));
        self.scratch.extend_from_slice(tokens);
    }
}
