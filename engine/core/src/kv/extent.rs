//! How many blocks a sequence takes in each group of layers, and what it no longer reads of them.

use super::{BlockTable, KvCache};

/// Blocks of a table in each group of a kind, those that it has passed included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    full: usize,
    windowed: usize,
}

impl Extent {
    /// So many in every group.
    pub(super) fn all(blocks: usize) -> Extent {
        Extent { full: blocks, windowed: blocks }
    }
}

impl KvCache {
    /// What a sequence of `tokens` tokens begins with, of which `known` blocks are known. One block more is enough for
    /// windowed groups, which take others when the sequence gets there.
    pub(super) fn first_extent(&self, tokens: usize, known: usize) -> Extent {
        Extent { full: tokens.div_ceil(self.block_tokens), windowed: known + 1 }
    }

    /// A block in every group for each of so many sequences.
    pub(super) fn block_each(&self, sequences: usize) -> usize {
        sequences * self.groups.count() as usize
    }

    /// Leading blocks that a windowed group does not read for the tokens behind the first `tokens`.
    pub(super) fn unread(&self, tokens: usize) -> usize {
        (tokens + 1).saturating_sub(self.groups.read_back_tokens.max(1) as usize) / self.block_tokens
    }

    /// Blocks that a table lacks which has `blocks` in every group.
    pub(super) fn beyond(&self, extent: Extent, blocks: usize) -> usize {
        let of = |groups: u32, count: usize| groups as usize * count.saturating_sub(blocks);
        of(self.groups.full, extent.full) + of(self.groups.windowed, extent.windowed)
    }

    /// Blocks that `table` lacks.
    pub(super) fn missing(&self, table: &BlockTable, extent: Extent) -> usize {
        let groups = (0..).zip(table.groups());
        groups.map(|(group, of)| self.count(extent, group).saturating_sub(of.len())).sum()
    }

    /// Adds what `table` lacks, of which the pool has enough.
    pub(super) fn extend(&mut self, table: &mut BlockTable, extent: Extent) {
        for group in 0..self.groups.count() {
            for _ in table.groups()[group as usize].len()..self.count(extent, group) {
                table.push(group, self.take());
            }
        }
    }

    fn count(&self, extent: Extent, group: u32) -> usize {
        if group < self.groups.full { extent.full } else { extent.windowed }
    }
}
