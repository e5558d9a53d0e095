//! Which beginning of a sequence is known, and where its blocks are.
//!
//! Groups that read everything have to have every block of it. One that reads a window needs those in which the next
//! token's window lies: what is before them may have been given up long ago, and its tokens are then known by their
//! digest alone.

use std::ops::Range;

use super::block_table::GroupTable;
use super::prefix_cache::{Page, PrefixId};
use super::{BlockTable, KvCache};
use crate::plan::BlockId;
use crate::request::{CacheScope, TokenId};

/// The longest known beginning of a sequence that it can go on from.
#[derive(Debug)]
pub(super) struct Known {
    root: PrefixId,
    /// What its blocks spell, one after the other.
    prefixes: Vec<PrefixId>,
    /// By group: where the last of these blocks are, those that the group reads.
    places: Vec<Vec<Place>>,
}

/// Where a block of a known prefix is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Pool(BlockId),
    Tier,
}

impl Known {
    /// Blocks of each group, those before its window included.
    pub(super) fn blocks(&self) -> usize {
        self.prefixes.len()
    }

    /// What is in the pool, each group's blocks from the tail.
    pub(super) fn in_pool(&self) -> Vec<BlockId> {
        self.places.iter().flat_map(|places| places.iter().rev().filter_map(Place::in_pool)).collect()
    }

    /// What is in the tier, each with its place in the sequence.
    pub(super) fn in_tier(&self) -> impl Iterator<Item = (usize, Page)> {
        (0..).zip(&self.places).flat_map(move |(group, places)| {
            let absent = self.indices(places).filter(|(_, place)| **place == Place::Tier);
            absent.map(move |(index, _)| (index, self.page(index, group)))
        })
    }

    /// A group's places with their indices in the sequence.
    fn indices<'a>(&self, places: &'a [Place]) -> impl Iterator<Item = (usize, &'a Place)> {
        (self.blocks() - places.len()..).zip(places)
    }

    fn page(&self, index: usize, group: u32) -> Page {
        Page { prefix: self.prefixes[index], group }
    }

    /// What the blocks before the one at `index` spell.
    fn before(&self, index: usize) -> PrefixId {
        index.checked_sub(1).map_or(self.root, |before| self.prefixes[before])
    }
}

impl Place {
    fn in_pool(&self) -> Option<BlockId> {
        match self {
            Place::Pool(block) => Some(*block),
            Place::Tier => None,
        }
    }
}

impl KvCache {
    /// What is known of `tokens`.
    pub(super) fn known(&self, tokens: &[TokenId], scope: CacheScope) -> Known {
        let places = vec![Vec::new(); self.groups.count() as usize];
        let mut known = Known { root: PrefixId::root(scope), prefixes: Vec::new(), places };
        self.follow(&mut known, tokens);
        let end = self.windows_end(&known, tokens);
        known.prefixes.truncate(end);
        for group in 0..self.groups.count() {
            let places = match group < self.groups.full {
                true => known.places[group as usize][..end].to_vec(),
                false => self.window(end).filter_map(|index| self.place(&known, tokens, index, group)).collect(),
            };
            known.places[group as usize] = places;
        }
        known
    }

    /// The table of all that is known; what is in the tier comes back into new blocks, for which there is room.
    pub(super) fn table_of(&mut self, known: &Known, tokens: &[TokenId], scope: CacheScope) -> BlockTable {
        if let Some(tier) = &mut self.tier {
            tier.pin(known.in_tier().map(|(_, page)| page), self.now);
        }
        let mut groups = Vec::new();
        for (group, places) in (0..).zip(&known.places) {
            let block = |(index, place): (usize, &Place)| match place {
                Place::Pool(block) => *block,
                Place::Tier => self.restore(known, tokens, index, group),
            };
            let held: Vec<BlockId> = known.indices(places).map(block).collect();
            groups.push(GroupTable { passed: known.blocks() - held.len(), held });
        }
        if let Some(tier) = &mut self.tier {
            tier.unpin();
        }
        let mut table = BlockTable::of(groups, scope);
        (table.published, table.prefix) = (known.blocks(), Some(known.before(known.blocks())));
        table
    }

    /// Goes along the blocks that every group has which reads everything.
    fn follow(&self, known: &mut Known, tokens: &[TokenId]) {
        let Some(prefixes) = &self.prefixes else { return };
        for (index, chunk) in tokens.chunks_exact(self.block_tokens).enumerate() {
            known.prefixes.push(prefixes.longer(known.before(index), chunk));
            for group in 0..self.groups.full {
                let Some(place) = self.place(known, tokens, index, group) else {
                    known.prefixes.truncate(index);
                    return;
                };
                known.places[group as usize].push(place);
            }
        }
    }

    /// The most leading blocks behind which windowed groups have all that they read.
    fn windows_end(&self, known: &Known, tokens: &[TokenId]) -> usize {
        let (mut end, windowed) = (known.blocks(), self.groups.full..self.groups.count());
        let mut index = if windowed.is_empty() { 0 } else { end };
        // Everything from `index` to `end` is there.
        while index > self.window(end).start {
            index -= 1;
            if !windowed.clone().all(|group| self.place(known, tokens, index, group).is_some()) {
                end = index;
            }
        }
        end
    }

    /// The blocks that a windowed group reads for the token behind `end` blocks.
    fn window(&self, end: usize) -> Range<usize> {
        self.unread(end * self.block_tokens)..end
    }

    /// Where a group's block is.
    fn place(&self, known: &Known, tokens: &[TokenId], index: usize, group: u32) -> Option<Place> {
        let tokens = self.chunk(tokens, index);
        let (page, before) = (known.page(index, group), known.before(index));
        match self.prefixes.as_ref()?.find(page, before, tokens) {
            Some(block) => Some(Place::Pool(block)),
            None => self.tier.as_ref()?.holds(page, before, tokens).then_some(Place::Tier),
        }
    }

    fn restore(&mut self, known: &Known, tokens: &[TokenId], index: usize, group: u32) -> BlockId {
        let (block, page, chunk) = (self.take(), known.page(index, group), self.chunk(tokens, index));
        if let (Some(tier), Some(prefixes)) = (&self.tier, &mut self.prefixes) {
            self.moves.extend(tier.bring_back(page, block));
            prefixes.insert(page, known.before(index), chunk, block);
        }
        block
    }

    fn chunk<'a>(&self, tokens: &'a [TokenId], index: usize) -> &'a [TokenId] {
        &tokens[index * self.block_tokens..][..self.block_tokens]
    }
}
