//! Swap space: a larger, slower place for blocks that the pool evicts.
//!
//! Bookkeeping only: the executor moves the contents, in the order of the moves. A block that is swapped in stays
//! here, too, so that evicting it again moves nothing.

use std::collections::{BTreeMap, HashMap};

use super::prefix_cache::{BlockKey, CachedBlock, PrefixHash};
use crate::plan::{BlockId, BlockMove, SwapSlotId};
use crate::request::TokenId;

#[derive(Debug)]
pub(super) struct SwapSpace {
    free: Vec<SwapSlotId>,
    kept: HashMap<BlockKey, SwappedBlock>,
    /// Keys in order of last use.
    order: BTreeMap<u64, BlockKey>,
    uses: u64,
    /// Blocks used at or after this count are pinned.
    pinned_from: u64,
}

#[derive(Debug)]
struct SwappedBlock {
    slot: SwapSlotId,
    cached: CachedBlock,
    used: u64,
    since_seconds: f64,
}

impl SwapSpace {
    pub(super) fn new(slots: u32) -> SwapSpace {
        let free = (0..slots).rev().map(SwapSlotId).collect();
        SwapSpace { free, kept: HashMap::new(), order: BTreeMap::new(), uses: 0, pinned_from: u64::MAX }
    }

    /// Whether it has the block of `key`, the prefix of which is `parent` followed by `tokens`.
    pub(super) fn holds(&self, key: BlockKey, parent: PrefixHash, tokens: &[TokenId]) -> bool {
        self.kept.get(&key).is_some_and(|swapped| swapped.cached.matches(parent, tokens))
    }

    /// Pins these blocks until [`unpin`](Self::unpin): they are about to be swapped in, while others are swapped out.
    pub(super) fn pin(&mut self, pages: impl Iterator<Item = BlockKey>, now: f64) {
        self.pinned_from = self.uses + 1;
        pages.for_each(|key| self.touch(key, now));
    }

    /// Unpins all blocks.
    pub(super) fn unpin(&mut self) {
        self.pinned_from = u64::MAX;
    }

    /// Swaps out a block that the pool is about to overwrite, evicting the least recently used one if there is no
    /// free slot. Returns the move, if one is needed.
    pub(super) fn swap_out(&mut self, key: BlockKey, cached: CachedBlock, now: f64) -> Option<BlockMove> {
        let block = cached.block;
        if let Some(matched) = self.kept.get(&key) {
            // Of two prefixes with one hash, the first one stays.
            if matched.cached.matches(cached.parent, &cached.tokens) {
                self.touch(key, now);
            }
            return None;
        }
        let slot = self.free.pop().or_else(|| self.evict_oldest())?;
        self.kept.insert(key, SwappedBlock { slot, cached, used: 0, since_seconds: now });
        self.touch(key, now);
        Some(BlockMove::SwapOut { block, slot })
    }

    /// Swaps a block in; returns the move.
    pub(super) fn swap_in(&self, key: BlockKey, block: BlockId) -> Option<BlockMove> {
        self.kept.get(&key).map(|swapped| BlockMove::SwapIn { slot: swapped.slot, block })
    }

    /// Drops a block that cannot be relied on.
    pub(super) fn forget(&mut self, key: BlockKey) {
        if let Some(swapped) = self.kept.remove(&key) {
            self.order.remove(&swapped.used);
            self.free.push(swapped.slot);
        }
    }

    /// Drops blocks that were last used before this time.
    pub(super) fn expire(&mut self, before_seconds: f64) {
        while let Some((_, &oldest)) = self.order.first_key_value() {
            if self.kept[&oldest].since_seconds >= before_seconds {
                return;
            }
            self.forget(oldest);
        }
    }

    /// Blocks in the swap space.
    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    fn touch(&mut self, key: BlockKey, now: f64) {
        self.uses += 1;
        if let Some(swapped) = self.kept.get_mut(&key) {
            self.order.remove(&swapped.used);
            (swapped.used, swapped.since_seconds) = (self.uses, now);
            self.order.insert(self.uses, key);
        }
    }

    fn evict_oldest(&mut self) -> Option<SwapSlotId> {
        let (_, &oldest) = self.order.first_key_value().filter(|(used, _)| **used < self.pinned_from)?;
        self.forget(oldest);
        self.free.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::CacheScope;

    fn key(number: u128) -> BlockKey {
        BlockKey { prefix: PrefixHash::root(CacheScope(number)), group: 0 }
    }

    fn swap_out(swap: &mut SwapSpace, number: u32) -> Option<BlockMove> {
        let parent = PrefixHash::root(CacheScope::SHARED);
        swap.swap_out(key(number.into()), CachedBlock { block: BlockId(number), parent, tokens: [number].into() }, 0.0)
    }

    #[test]
    fn the_longest_unused_makes_room_unless_it_is_about_to_be_brought_back() {
        let mut swap = SwapSpace::new(2);
        let out = |block, slot| Some(BlockMove::SwapOut { block: BlockId(block), slot: SwapSlotId(slot) });
        assert_eq!([1, 2].map(|number| swap_out(&mut swap, number)), [out(1, 0), out(2, 1)]);
        swap.pin([key(1)].into_iter(), 0.0);
        assert_eq!(swap_out(&mut swap, 3), out(3, 1), "in place of the second");
        assert_eq!(swap_out(&mut swap, 4), None, "all that is left came or was asked for since");
        swap.unpin();
        assert_eq!(swap_out(&mut swap, 4), out(4, 0));
    }
}
