//! Reference counts of all blocks, the free blocks, and the cached ones in order of last use.
//!
//! Knows nothing of tokens or sequences: the caller says whether a block is worth keeping.

use std::collections::BTreeMap;

use crate::plan::BlockId;

#[derive(Debug)]
pub(super) struct BlockPool {
    states: Vec<BlockState>,
    /// Free blocks, last in, first out.
    free: Vec<BlockId>,
    /// Cached blocks by order of release: the first is evicted first.
    cached: BTreeMap<u64, IdleBlock>,
    releases: u64,
    total_references: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct BlockState {
    references: u32,
    /// Key in `cached` while the block is there.
    cached_at: Option<u64>,
}

/// A cached block, and when its last reference was dropped, in seconds.
#[derive(Clone, Copy, Debug)]
struct IdleBlock {
    block: BlockId,
    since_seconds: f64,
}

impl BlockPool {
    pub(super) fn new(blocks: u32) -> BlockPool {
        BlockPool {
            states: vec![BlockState::default(); blocks as usize],
            free: (0..blocks).rev().map(BlockId).collect(),
            cached: BTreeMap::new(),
            releases: 0,
            total_references: 0,
        }
    }

    pub(super) fn total(&self) -> usize {
        self.states.len()
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn cached(&self) -> usize {
        self.cached.len()
    }

    /// Blocks that [`take`](Self::take) can return.
    pub(super) fn available(&self) -> usize {
        self.free() + self.cached()
    }

    pub(super) fn references(&self, block: BlockId) -> u32 {
        self.states[block.0 as usize].references
    }

    /// Free blocks, each once.
    pub(super) fn free_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.free.iter().copied()
    }

    /// Cached blocks, each once, the least recently used first.
    pub(super) fn cached_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.cached.values().map(|cached| cached.block)
    }

    pub(super) fn total_references(&self) -> u64 {
        self.total_references
    }

    /// A block with one reference, and whether it was a cached one that is evicted: the least recently used.
    pub(super) fn take(&mut self) -> Option<(BlockId, bool)> {
        let free = self.free.pop().map(|block| (block, false));
        let (block, evicted) = free.or_else(|| self.cached.pop_first().map(|(_, cached)| (cached.block, true)))?;
        self.states[block.0 as usize] = BlockState { references: 1, cached_at: None };
        self.total_references += 1;
        Some((block, evicted))
    }

    /// Frees the least recently used cached block, if its last reference was dropped before this time.
    pub(super) fn expire(&mut self, before_seconds: f64) -> Option<BlockId> {
        let oldest = self.cached.first_entry().filter(|oldest| oldest.get().since_seconds < before_seconds)?;
        let IdleBlock { block, .. } = oldest.remove();
        self.states[block.0 as usize].cached_at = None;
        self.free.push(block);
        Some(block)
    }

    /// Adds a reference to a held or cached block.
    pub(super) fn retain(&mut self, block: BlockId) {
        let state = &mut self.states[block.0 as usize];
        match state.cached_at.take() {
            Some(time) => _ = self.cached.remove(&time),
            None => assert!(state.references > 0, "block {} is free and cannot be shared", block.0),
        }
        state.references += 1;
        self.total_references += 1;
    }

    /// Drops a reference. With the last one the block becomes cached if `keep` is set, else free.
    pub(super) fn release(&mut self, block: BlockId, keep: bool, now: f64) {
        let state = &mut self.states[block.0 as usize];
        assert!(state.references > 0, "block {} was released more often than it was taken", block.0);
        state.references -= 1;
        self.total_references -= 1;
        if state.references > 0 {
            return;
        }
        if keep {
            self.releases += 1;
            state.cached_at = Some(self.releases);
            self.cached.insert(self.releases, IdleBlock { block, since_seconds: now });
        } else {
            self.free.push(block);
        }
    }
}
