//! Numbers of blocks that a sequence takes in each group of layers, and that its windows no longer read.

use super::{BlockTable, KvCache};

/// Blocks in each full-attention group and in each windowed group of a table, passed ones included.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockCounts {
    full: usize,
    windowed: usize,
}

impl BlockCounts {
    /// The same number in every group.
    pub(super) fn all(blocks: usize) -> BlockCounts {
        BlockCounts { full: blocks, windowed: blocks }
    }
}

impl KvCache {
    /// Blocks that a sequence of `tokens` tokens gets at first, `matched` of which are a matched prefix. Windowed
    /// groups get one block beyond these, and more as the sequence grows.
    pub(super) fn initial_blocks(&self, tokens: usize, matched: usize) -> BlockCounts {
        BlockCounts { full: tokens.div_ceil(self.block_tokens), windowed: matched + 1 }
    }

    /// One block in every group for each of this many sequences.
    pub(super) fn one_block_each(&self, sequences: usize) -> usize {
        sequences * self.groups.count() as usize
    }

    /// Leading blocks that a windowed group does not read for tokens after the first `tokens`.
    pub(super) fn out_of_window_blocks(&self, tokens: usize) -> usize {
        (tokens + 1).saturating_sub(self.groups.read_back_tokens.max(1) as usize) / self.block_tokens
    }

    /// Blocks that a table lacks if it has `blocks` in every group.
    pub(super) fn blocks_beyond(&self, counts: BlockCounts, blocks: usize) -> usize {
        let of = |groups: u32, count: usize| groups as usize * count.saturating_sub(blocks);
        of(self.groups.full, counts.full) + of(self.groups.windowed, counts.windowed)
    }

    /// Blocks that `table` lacks.
    pub(super) fn missing(&self, table: &BlockTable, counts: BlockCounts) -> usize {
        let groups = (0..).zip(table.groups());
        groups.map(|(group, of)| self.count(counts, group).saturating_sub(of.len())).sum()
    }

    /// Adds the blocks that `table` lacks; the pool must have enough.
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
