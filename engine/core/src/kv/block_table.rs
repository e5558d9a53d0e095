//! The blocks of one sequence: a table for each group of layers.

use std::cell::OnceCell;
use std::sync::Arc;

use super::prefix_cache::PrefixHash;
use crate::plan::BlockId;
use crate::request::CacheScope;

/// A sequence's blocks. Each held one is one reference on it.
///
/// Not `Clone`: a second holder of the same blocks has to take its own references.
#[derive(Debug)]
pub(crate) struct BlockTable {
    groups: Vec<GroupTable>,
    /// What rows name, made when the first row after a change asks for it.
    row_blocks: OnceCell<Arc<[BlockId]>>,
    /// Leading blocks that came from the prefix cache or were offered to it.
    pub(super) published: usize,
    /// What the published blocks spell; absent where it cannot be told apart from another prefix.
    pub(super) prefix: Option<PrefixHash>,
}

/// The blocks of one group of layers, in order: block `i` holds the tokens at `i * block_tokens ..`.
#[derive(Debug, Default)]
pub(super) struct GroupTable {
    /// Leading blocks that nothing reads again: they were given up, or never taken.
    pub(super) skipped: usize,
    /// Those behind them.
    pub(super) held: Vec<BlockId>,
}

impl BlockTable {
    /// No blocks yet.
    pub(super) fn new(groups: u32, scope: CacheScope) -> BlockTable {
        BlockTable::of((0..groups).map(|_| GroupTable::default()).collect(), scope)
    }

    /// These blocks, of which the prefix cache knows none yet.
    pub(super) fn of(groups: Vec<GroupTable>, scope: CacheScope) -> BlockTable {
        BlockTable { groups, row_blocks: OnceCell::new(), published: 0, prefix: Some(PrefixHash::root(scope)) }
    }

    /// The blocks of each group of layers.
    pub(super) fn groups(&self) -> &[GroupTable] {
        &self.groups
    }

    /// Appends a block of a group.
    pub(super) fn push(&mut self, group: u32, block: BlockId) {
        self.groups[group as usize].held.push(block);
        self.row_blocks.take();
    }

    /// Gives up, in the groups from `first_group` on, the leading blocks up to `skipped`, but for the last of all. From the
    /// tail.
    pub(super) fn skip(&mut self, first_group: u32, skipped: usize) -> Vec<BlockId> {
        let windowed = &mut self.groups[first_group as usize..];
        if windowed.iter().all(|group| group.skipped >= skipped) {
            return Vec::new(); // as after most steps
        }
        self.row_blocks.take();
        windowed.iter_mut().flat_map(|group| group.skip(skipped)).rev().collect()
    }

    /// The blocks that it has references on.
    pub(super) fn held(&self) -> impl Iterator<Item = BlockId> {
        self.groups.iter().flat_map(|group| &group.held).copied()
    }

    /// The same from the tail: what was held longest comes last.
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

    /// The leading blocks that every group has, one group's after another's. In the place of a passed one is the first
    /// that is held.
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

    /// Leading blocks whose contents are known to the prefix cache.
    pub(crate) fn published_blocks(&self) -> usize {
        self.published
    }
}

impl GroupTable {
    /// Blocks, passed ones included.
    pub(super) fn len(&self) -> usize {
        self.skipped + self.held.len()
    }

    /// The block at `index`, if it is held.
    pub(super) fn block(&self, index: usize) -> Option<BlockId> {
        self.held.get(index.checked_sub(self.skipped)?).copied()
    }

    /// The table of the first `count` blocks, of which it has passed no more.
    pub(super) fn first(&self, count: usize) -> GroupTable {
        GroupTable { skipped: self.skipped, held: self.held[..count - self.skipped].to_vec() }
    }

    /// Gives the leading blocks up to `skipped` up, but for the last of all.
    fn skip(&mut self, skipped: usize) -> Vec<BlockId> {
        let count = skipped.min(self.len().saturating_sub(1)).saturating_sub(self.skipped);
        self.skipped += count;
        self.held.drain(..count).collect()
    }
}
