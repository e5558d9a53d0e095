//! How many blocks a sequence takes in each group of layers, and what it no longer reads of them.

use super::{BlockTable, KvCache};

/// Blocks of a table in each group of a kind, those that it has passed included.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockCounts {
    full: usize,
    windowed: usize,
}

impl BlockCounts {
    /// So many in every group.
    pub(super) fn all(blocks: usize) -> BlockCounts {
        BlockCounts { full: blocks, windowed: blocks }
    }
}

impl KvCache {
    /// What a sequence of `tokens` tokens begins with, of which `matched` blocks are known. One block more is enough for
    /// windowed groups, which take others when the sequence gets there.
    pub(super) fn initial_blocks(&self, tokens: usize, matched: usize) -> BlockCounts {
        BlockCounts { full: tokens.div_ceil(self.block_tokens), windowed: matched + 1 }
    }

    /// A block in every group for each of so many sequences.
    pub(super) fn one_block_each(&self, sequences: usize) -> usize {
        sequences * self.groups.count() as usize
    }

    /// Leading blocks that a windowed group does not read for the tokens behind the first `tokens`.
    pub(super) fn out_of_window_blocks(&self, tokens: usize) -> usize {
        (tokens + 1).saturating_sub(self.groups.read_back_tokens.max(1) as usize) / self.block_tokens
    }

    /// Blocks that a table lacks which has `blocks` in every group.
    pub(super) fn blocks_beyond(&self, counts: BlockCounts, blocks: usize) -> usize {
        let of = |groups: u32, count: usize| groups as usize * count.saturating_sub(blocks);
        of(self.groups.full, counts.full) + of(self.groups.windowed, counts.windowed)
    }

    /// Blocks that `table` lacks.
    pub(super) fn missing(&self, table: &BlockTable, counts: BlockCounts) -> usize {
        let groups = (0..).zip(table.groups());
        groups.map(|(group, of)| self.count(counts, group).saturating_sub(of.len())).sum()
    }

    /// Adds what `table` lacks, of which the pool has enough.
    pub(super) fn extend(&mut self, table: &mut BlockTable, counts: BlockCounts) {
        for group in 0..self.groups.count() {
            for _ in table.groups()[group as usize].len()..self.count(counts, group) {
                table.push(group, self.take_block());
            }
        }
    }

    fn count(&self, counts: BlockCounts, group: u32) -> usize {
        if group < self.groups.full { counts.full } else { counts.windowed }
    }
}
