//! Prefix matching: the longest cached prefix of a sequence, and where its blocks are.
//!
//! Full-attention groups need every block of it. A windowed group needs those that the next token's window reads;
//! earlier blocks may be long evicted, and their tokens are then known by hash alone.

use std::ops::Range;

use super::block_table::GroupTable;
use super::prefix_cache::{BlockKey, PrefixHash};
use super::{BlockTable, KvCache};
use crate::plan::BlockId;
use crate::request::{CacheScope, TokenId};

/// The longest cached prefix that a sequence can continue from.
#[derive(Debug)]
pub(super) struct PrefixMatch {
    root: PrefixHash,
    /// The hash of each prefix that ends with one of its blocks.
    prefixes: Vec<PrefixHash>,
    /// For each group, where the blocks are that it reads: the last ones of the prefix.
    locations: Vec<Vec<BlockLocation>>,
}

/// Where a block of a matched prefix is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockLocation {
    Pool(BlockId),
    SwapSpace,
}

impl PrefixMatch {
    /// Matched blocks of each group, those before its window included.
    pub(super) fn blocks(&self) -> usize {
        self.prefixes.len()
    }

    /// Blocks in the pool, the tail of each group first.
    pub(super) fn in_pool(&self) -> Vec<BlockId> {
        self.locations.iter().flat_map(|locations| locations.iter().rev().filter_map(BlockLocation::in_pool)).collect()
    }

    /// Blocks in the swap space, with their indices in the sequence.
    pub(super) fn in_swap(&self) -> impl Iterator<Item = (usize, BlockKey)> {
        (0..).zip(&self.locations).flat_map(move |(group, locations)| {
            let absent = self.indices(locations).filter(|(_, location)| **location == BlockLocation::SwapSpace);
            absent.map(move |(index, _)| (index, self.key(index, group)))
        })
    }

    /// The locations of a group, with their indices in the sequence.
    fn indices<'a>(&self, locations: &'a [BlockLocation]) -> impl Iterator<Item = (usize, &'a BlockLocation)> {
        (self.blocks() - locations.len()..).zip(locations)
    }

    fn key(&self, index: usize, group: u32) -> BlockKey {
        BlockKey { prefix: self.prefixes[index], group }
    }

    /// Hash of the blocks before the one at `index`.
    fn parent(&self, index: usize) -> PrefixHash {
        index.checked_sub(1).map_or(self.root, |parent| self.prefixes[parent])
    }
}

impl BlockLocation {
    fn in_pool(&self) -> Option<BlockId> {
        match self {
            BlockLocation::Pool(block) => Some(*block),
            BlockLocation::SwapSpace => None,
        }
    }
}

impl KvCache {
    /// Finds the longest cached prefix of `tokens`.
    pub(super) fn match_prefix(&self, tokens: &[TokenId], scope: CacheScope) -> PrefixMatch {
        let locations = vec![Vec::new(); self.groups.count() as usize];
        let mut matched = PrefixMatch { root: PrefixHash::root(scope), prefixes: Vec::new(), locations };
        self.match_full_groups(&mut matched, tokens);
        let end = self.last_resumable_block(&matched, tokens);
        matched.prefixes.truncate(end);
        for group in 0..self.groups.count() {
            let locations = match group < self.groups.full {
                true => matched.locations[group as usize][..end].to_vec(),
                false => self.window(end).filter_map(|index| self.locate(&matched, tokens, index, group)).collect(),
            };
            matched.locations[group as usize] = locations;
        }
        matched
    }

    /// The block table of a match. Blocks in the swap space are swapped into new blocks; the pool must have enough.
    pub(super) fn table_of_match(
        &mut self,
        matched: &PrefixMatch,
        tokens: &[TokenId],
        scope: CacheScope,
    ) -> BlockTable {
        if let Some(swap) = &mut self.swap {
            swap.pin(matched.in_swap().map(|(_, key)| key), self.now);
        }
        let mut groups = Vec::new();
        for (group, locations) in (0..).zip(&matched.locations) {
            let block = |(index, location): (usize, &BlockLocation)| match location {
                BlockLocation::Pool(block) => *block,
                BlockLocation::SwapSpace => self.restore(matched, tokens, index, group),
            };
            let held: Vec<BlockId> = matched.indices(locations).map(block).collect();
            groups.push(GroupTable { skipped: matched.blocks() - held.len(), held });
        }
        if let Some(swap) = &mut self.swap {
            swap.unpin();
        }
        let mut table = BlockTable::of(groups, scope);
        (table.published, table.prefix) = (matched.blocks(), Some(matched.parent(matched.blocks())));
        table
    }

    /// Matches blocks as long as every full-attention group has them.
    fn match_full_groups(&self, matched: &mut PrefixMatch, tokens: &[TokenId]) {
        let Some(prefixes) = &self.prefixes else { return };
        for (index, chunk) in tokens.chunks_exact(self.block_tokens).enumerate() {
            matched.prefixes.push(prefixes.extend(matched.parent(index), chunk));
            for group in 0..self.groups.full {
                let Some(location) = self.locate(matched, tokens, index, group) else {
                    matched.prefixes.truncate(index);
                    return;
                };
                matched.locations[group as usize].push(location);
            }
        }
    }

    /// Most leading blocks after which the windowed groups have every block that they read.
    fn last_resumable_block(&self, matched: &PrefixMatch, tokens: &[TokenId]) -> usize {
        let (mut end, windowed) = (matched.blocks(), self.groups.full..self.groups.count());
        let mut index = if windowed.is_empty() { 0 } else { end };
        // All blocks from `index` to `end` are there.
        while index > self.window(end).start {
            index -= 1;
            if !windowed.clone().all(|group| self.locate(matched, tokens, index, group).is_some()) {
                end = index;
            }
        }
        end
    }

    /// Blocks that a windowed group reads for the token after `end` blocks.
    fn window(&self, end: usize) -> Range<usize> {
        self.out_of_window_blocks(end * self.block_tokens)..end
    }

    /// Where the block of a group is.
    fn locate(&self, matched: &PrefixMatch, tokens: &[TokenId], index: usize, group: u32) -> Option<BlockLocation> {
        let tokens = self.chunk(tokens, index);
        let (key, parent) = (matched.key(index, group), matched.parent(index));
        match self.prefixes.as_ref()?.find(key, parent, tokens) {
            Some(block) => Some(BlockLocation::Pool(block)),
            None => self.swap.as_ref()?.holds(key, parent, tokens).then_some(BlockLocation::SwapSpace),
        }
    }

    fn restore(&mut self, matched: &PrefixMatch, tokens: &[TokenId], index: usize, group: u32) -> BlockId {
        let (block, key, chunk) = (self.take_block(), matched.key(index, group), self.chunk(tokens, index));
        if let (Some(swap), Some(prefixes)) = (&self.swap, &mut self.prefixes) {
            self.moves.extend(swap.swap_in(key, block));
            prefixes.insert(key, matched.parent(index), chunk, block);
        }
        block
    }

    fn chunk<'a>(&self, tokens: &'a [TokenId], index: usize) -> &'a [TokenId] {
        &tokens[index * self.block_tokens..][..self.block_tokens]
    }
}
