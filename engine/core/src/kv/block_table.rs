//! The block tables of one sequence, one for each group of layers.

use std::cell::OnceCell;
use std::sync::Arc;

use super::prefix_cache::PrefixHash;
use crate::plan::BlockId;
use crate::request::CacheScope;

/// The blocks of a sequence. Each held block is one reference on it.
///
/// Not `Clone`: a second holder of the same blocks has to take references of its own.
#[derive(Debug)]
pub(crate) struct BlockTable {
    groups: Vec<GroupTable>,
    /// The tables as rows name them, built when the first row after a change needs them.
    row_blocks: OnceCell<Arc<[BlockId]>>,
    /// Leading blocks that came from the prefix cache or were added to it.
    pub(super) published: usize,
    /// Hash of the published blocks; `None` after a collision with the hash of another prefix.
    pub(super) prefix: Option<PrefixHash>,
}

/// The block table of one group of layers: block `i` holds the tokens from `i * block_tokens` on.
#[derive(Debug, Default)]
pub(super) struct GroupTable {
    /// Leading blocks that the window has passed: released, or never taken.
    pub(super) skipped: usize,
    /// The blocks after them.
    pub(super) held: Vec<BlockId>,
}

impl BlockTable {
    /// Empty tables.
    pub(super) fn new(groups: u32, scope: CacheScope) -> BlockTable {
        BlockTable::of((0..groups).map(|_| GroupTable::default()).collect(), scope)
    }

    /// Tables of these blocks, none of which is published.
    pub(super) fn of(groups: Vec<GroupTable>, scope: CacheScope) -> BlockTable {
        BlockTable { groups, row_blocks: OnceCell::new(), published: 0, prefix: Some(PrefixHash::root(scope)) }
    }

    /// The table of each group of layers.
    pub(super) fn groups(&self) -> &[GroupTable] {
        &self.groups
    }

    /// Appends a block to the table of a group.
    pub(super) fn push(&mut self, group: u32, block: BlockId) {
        self.groups[group as usize].held.push(block);
        self.row_blocks.take();
    }

    /// In the groups from `first_group` on, removes the leading blocks up to `skipped`, but never the last block.
    /// Returns them, the tail first.
    pub(super) fn skip(&mut self, first_group: u32, skipped: usize) -> Vec<BlockId> {
        let windowed = &mut self.groups[first_group as usize..];
        if windowed.iter().all(|group| group.skipped >= skipped) {
            return Vec::new(); // as after most steps
        }
        self.row_blocks.take();
        windowed.iter_mut().flat_map(|group| group.skip(skipped)).rev().collect()
    }

    /// All held blocks.
    pub(super) fn held(&self) -> impl Iterator<Item = BlockId> {
        self.groups.iter().flat_map(|group| &group.held).copied()
    }

    /// All held blocks, the last positions of the sequence first.
    pub(super) fn tail_first(&self) -> Vec<BlockId> {
        let first = self.groups.iter().map(|group| group.skipped).min().unwrap_or(0);
        let end = self.groups.iter().map(GroupTable::len).max().unwrap_or(0);
        let places = (first..end).rev();
        places.flat_map(|index| self.groups.iter().filter_map(move |group| group.block(index))).collect()
    }

    /// Leading blocks that every group has, or has passed.
    pub(crate) fn covered_blocks(&self) -> usize {
        self.groups.iter().map(GroupTable::len).min().unwrap_or(0)
    }

    /// The covered leading blocks of all groups, one group after another. For a passed block it has the first held
    /// one.
    pub(crate) fn row_blocks(&self) -> Arc<[BlockId]> {
        self.row_blocks.get_or_init(|| self.covered()).clone()
    }

    fn covered(&self) -> Arc<[BlockId]> {
        let count = self.covered_blocks();
        let mut covered = Vec::with_capacity(self.groups.len() * count);
        for GroupTable { skipped, held } in &self.groups {
            covered.extend(std::iter::repeat_n(held[0], (*skipped).min(count)));
            covered.extend_from_slice(&held[..count.saturating_sub(*skipped)]);
        }
        covered.into()
    }

    /// Leading blocks that the prefix cache knows.
    pub(crate) fn published_blocks(&self) -> usize {
        self.published
    }
}

impl GroupTable {
    /// Number of blocks, passed ones included.
    pub(super) fn len(&self) -> usize {
        self.skipped + self.held.len()
    }

    /// The block at `index`, if it is held.
    pub(super) fn block(&self, index: usize) -> Option<BlockId> {
        self.held.get(index.checked_sub(self.skipped)?).copied()
    }

    /// The table of the first `count` blocks; no more than these may be passed.
    pub(super) fn first(&self, count: usize) -> GroupTable {
        GroupTable { skipped: self.skipped, held: self.held[..count - self.skipped].to_vec() }
    }

    /// Removes the leading blocks up to `skipped`, but never the last block.
    fn skip(&mut self, skipped: usize) -> Vec<BlockId> {
        let count = skipped.min(self.len().saturating_sub(1)).saturating_sub(self.skipped);
        self.skipped += count;
        self.held.drain(..count).collect()
    }
}
