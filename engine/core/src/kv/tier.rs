//! A second place for blocks that the pool gives up, slower and larger than it: what is kept there and where.
//!
//! Bookkeeping only: the executor moves the contents, in the order in which moves are decided. What comes back stays
//! here, too, so that giving it up once more moves nothing.

use std::collections::{BTreeMap, HashMap};

use super::prefix_cache::{Entry, Page, PrefixId};
use crate::plan::{BlockId, Move, SlotId};
use crate::request::TokenId;

#[derive(Debug)]
pub(super) struct Tier {
    free: Vec<SlotId>,
    kept: HashMap<Page, Kept>,
    /// Pages by their last use, the longest unused first.
    order: BTreeMap<u64, Page>,
    uses: u64,
    /// Uses from this one on are of what must stay.
    pinned_from: u64,
}

#[derive(Debug)]
struct Kept {
    slot: SlotId,
    entry: Entry,
    used: u64,
    since_seconds: f64,
}

impl Tier {
    pub(super) fn new(slots: u32) -> Tier {
        let free = (0..slots).rev().map(SlotId).collect();
        Tier { free, kept: HashMap::new(), order: BTreeMap::new(), uses: 0, pinned_from: u64::MAX }
    }

    /// Whether it has the block of a page, whose prefix is `before` and `tokens`.
    pub(super) fn holds(&self, page: Page, before: PrefixId, tokens: &[TokenId]) -> bool {
        self.kept.get(&page).is_some_and(|kept| kept.entry.is(before, tokens))
    }

    /// Keeps these until [`unpin`](Self::unpin): they are about to be brought back, while others come in.
    pub(super) fn pin(&mut self, pages: impl Iterator<Item = Page>, now: f64) {
        self.pinned_from = self.uses + 1;
        pages.for_each(|page| self.touch(page, now));
    }

    /// Everything may be given up again.
    pub(super) fn unpin(&mut self) {
        self.pinned_from = u64::MAX;
    }

    /// Takes in a block that the pool is about to overwrite, in place of the longest unused one if need be: the move
    /// that this takes.
    pub(super) fn take_in(&mut self, page: Page, entry: Entry, now: f64) -> Option<Move> {
        let block = entry.block;
        if let Some(known) = self.kept.get(&page) {
            // Of two prefixes with one digest, the first one stays.
            if known.entry.is(entry.before, &entry.tokens) {
                self.touch(page, now);
            }
            return None;
        }
        let slot = self.free.pop().or_else(|| self.drop_oldest())?;
        self.kept.insert(page, Kept { slot, entry, used: 0, since_seconds: now });
        self.touch(page, now);
        Some(Move::Out { block, slot })
    }

    /// Brings a kept block back into `block`: the move that this takes.
    pub(super) fn bring_back(&self, page: Page, block: BlockId) -> Option<Move> {
        self.kept.get(&page).map(|kept| Move::In { slot: kept.slot, block })
    }

    /// What cannot be relied on any more.
    pub(super) fn forget(&mut self, page: Page) {
        if let Some(kept) = self.kept.remove(&page) {
            self.order.remove(&kept.used);
            self.free.push(kept.slot);
        }
    }

    /// Forgets what was last used before this time.
    pub(super) fn expire(&mut self, before_seconds: f64) {
        while let Some((_, &oldest)) = self.order.first_key_value() {
            if self.kept[&oldest].since_seconds >= before_seconds {
                return;
            }
            self.forget(oldest);
        }
    }

    /// Blocks kept.
    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    fn touch(&mut self, page: Page, now: f64) {
        self.uses += 1;
        if let Some(kept) = self.kept.get_mut(&page) {
            self.order.remove(&kept.used);
            (kept.used, kept.since_seconds) = (self.uses, now);
            self.order.insert(self.uses, page);
        }
    }

    fn drop_oldest(&mut self) -> Option<SlotId> {
        let (_, &oldest) = self.order.first_key_value().filter(|(used, _)| **used < self.pinned_from)?;
        self.forget(oldest);
        self.free.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::CacheScope;

    fn page(number: u128) -> Page {
        Page { prefix: PrefixId::root(CacheScope(number)), group: 0 }
    }

    fn take_in(tier: &mut Tier, number: u32) -> Option<Move> {
        let before = PrefixId::root(CacheScope::SHARED);
        tier.take_in(page(number.into()), Entry { block: BlockId(number), before, tokens: [number].into() }, 0.0)
    }

    #[test]
    fn the_longest_unused_makes_room_unless_it_is_about_to_be_brought_back() {
        let mut tier = Tier::new(2);
        let out = |block, slot| Some(Move::Out { block: BlockId(block), slot: SlotId(slot) });
        assert_eq!([1, 2].map(|number| take_in(&mut tier, number)), [out(1, 0), out(2, 1)]);
        tier.pin([page(1)].into_iter(), 0.0);
        assert_eq!(take_in(&mut tier, 3), out(3, 1), "in place of the second");
        assert_eq!(take_in(&mut tier, 4), None, "all that is left came or was asked for since");
        tier.unpin();
        assert_eq!(take_in(&mut tier, 4), out(4, 0));
    }
}
