//! The KV cache as bookkeeping: which block belongs to whom, which may be reused, which must still wait.
//!
//! Ids and counts only; the tensors are the executor's. Every block is in exactly one state:
//! - *held*: a block table names it (a sequence's, or a released one that a step in flight still names);
//! - *cached*: nobody names it and its contents are a known prefix, kept until the room is needed;
//! - *free*.

mod audit;
mod block_pool;
mod block_table;
mod prefix_cache;
mod tier;

use std::collections::HashMap;

use crate::plan::{BlockId, Move, Ticket};
use crate::request::{CacheScope, TokenId};
use block_pool::BlockPool;
pub(crate) use block_table::BlockTable;
use prefix_cache::{PrefixCache, PrefixId};
use tier::Tier;

/// Blocks, their references and the prefix cache over them.
#[derive(Debug)]
pub(crate) struct KvCache {
    block_tokens: usize,
    pool: BlockPool,
    /// `None` where the prefix cache is switched off.
    prefixes: Option<PrefixCache>,
    /// Where blocks go that the pool gives up; `None` where they are lost.
    tier: Option<Tier>,
    /// Moves that no step makes yet, in order.
    moves: Vec<Move>,
    /// Released tables that a step in flight still names, each with the last such step.
    retiring: Vec<(Ticket, BlockTable)>,
    /// How long a prefix is kept that nobody uses.
    ttl_seconds: Option<f64>,
    /// Tokens at the end of a sequence before which nothing is read again; absent where all are.
    read_back_tokens: Option<usize>,
    tier_use: TierUse,
    /// The time of the last call that told it.
    now: f64,
}

/// What was looked up in the tier so far: what sequences needed and the pool had not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUse {
    /// Tokens looked up.
    pub query_tokens: u64,
    /// Tokens found.
    pub hit_tokens: u64,
}

/// A block of a known prefix.
#[derive(Clone, Copy, Debug)]
struct Cached {
    prefix: PrefixId,
    /// Absent where it is in the tier.
    block: Option<BlockId>,
}

/// Blocks by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvUsage {
    /// Blocks in the pool.
    pub total: u32,
    /// Blocks without contents.
    pub free: u32,
    /// Blocks that only the prefix cache keeps: available, and forgotten when taken.
    pub cached: u32,
    /// Blocks that live sequences or steps in flight name.
    pub held: u32,
    /// Blocks outside the pool.
    pub swapped: u32,
    /// References that no sequence and no step in flight accounts for. Always 0; anything else is a defect.
    pub leaked: u32,
}

impl KvUsage {
    /// Share of blocks held, 0 to 1.
    pub fn usage(&self) -> f64 {
        f64::from(self.held) / f64::from(self.total.max(1))
    }
}

impl KvCache {
    /// `prefix_key` is that of the digests by which prefixes are found; absent to keep none.
    pub(crate) fn new(blocks: u32, block_tokens: u32, prefix_key: Option<u128>) -> KvCache {
        assert!(blocks > 0 && block_tokens > 0, "a KV cache of {blocks} blocks of {block_tokens} tokens");
        KvCache {
            block_tokens: block_tokens as usize,
            pool: BlockPool::new(blocks),
            prefixes: prefix_key.map(|key| PrefixCache::new(blocks, key)),
            tier: None,
            moves: Vec::new(),
            retiring: Vec::new(),
            ttl_seconds: None,
            read_back_tokens: None,
            tier_use: TierUse::default(),
            now: 0.0,
        }
    }

    /// Forgets prefixes that nobody used for so long.
    pub(crate) fn with_ttl(mut self, ttl_seconds: Option<f64>) -> KvCache {
        self.ttl_seconds = ttl_seconds;
        self
    }

    /// Lets sequences give up what lies before their last so many tokens.
    pub(crate) fn with_read_back(mut self, tokens: Option<u32>) -> KvCache {
        self.read_back_tokens = tokens.map(|tokens| tokens.max(1) as usize);
        self
    }

    /// Keeps blocks that the pool gives up in `slots` other places; none for 0.
    pub(crate) fn with_tier(mut self, slots: u32) -> KvCache {
        self.tier = (slots > 0).then(|| Tier::new(slots));
        self
    }

    /// Time has passed: what nobody used for too long is forgotten.
    pub(crate) fn pass(&mut self, now: f64) {
        self.now = now;
        let (Some(ttl), Some(prefixes)) = (self.ttl_seconds, &mut self.prefixes) else { return };
        while let Some(block) = self.pool.expire(now - ttl) {
            prefixes.remove(block);
        }
        if let Some(tier) = &mut self.tier {
            tier.expire(now - ttl);
        }
    }

    /// Moves that the next step has to make first.
    pub(crate) fn take_moves(&mut self) -> Vec<Move> {
        std::mem::take(&mut self.moves)
    }

    /// A sequence failed: what it computed or found is not to be found by others. What it passed served steps that did
    /// not fail.
    pub(crate) fn distrust(&mut self, table: &BlockTable) {
        let Some(prefixes) = &mut self.prefixes else { return };
        for (prefix, _) in table.held().iter().filter_map(|block| prefixes.remove(*block)) {
            if let Some(tier) = &mut self.tier {
                tier.forget(prefix);
            }
        }
    }

    /// Leading tokens of `tokens` that are cached.
    pub(crate) fn cached_tokens(&self, tokens: &[TokenId], scope: CacheScope) -> usize {
        self.cached_blocks(&tokens[..tokens.len() - 1], scope).len() * self.block_tokens
    }

    /// Whether `tokens` tokens, of which `cached` are cached, would find blocks now or once the steps in flight are
    /// collected, with `headroom` left.
    pub(crate) fn will_fit(&self, tokens: usize, cached: usize, headroom: usize) -> bool {
        let missing = tokens.div_ceil(self.block_tokens) - cached / self.block_tokens;
        missing + headroom <= self.pool.available() + self.returning()
    }

    /// What was looked up in the tier so far.
    pub(crate) fn tier_use(&self) -> TierUse {
        self.tier_use
    }

    /// Whether tables begin with blocks of earlier ones.
    pub(crate) fn caches_prefixes(&self) -> bool {
        self.prefixes.is_some()
    }

    /// A table that covers `tokens`, beginning with the cached blocks of their longest known prefix.
    ///
    /// At least the last token stays to be computed: its logits are what the caller wants. `None`, with nothing
    /// changed, unless `headroom` blocks remain available beside it.
    pub(crate) fn open(&mut self, tokens: &[TokenId], scope: CacheScope, headroom: usize) -> Option<BlockTable> {
        if self.pool.available() <= headroom {
            return None; // without walking the prefix first: a full pool is asked in every step
        }
        let cached = self.cached_blocks(&tokens[..tokens.len() - 1], scope);
        let mut table = self.retained(&cached, scope);
        let new = tokens.len().div_ceil(self.block_tokens) - table.blocks.len();
        if new + headroom > self.pool.available() {
            self.drop_references(&table);
            return None;
        }
        self.count_tier_use(tokens.len(), &cached);
        self.bring_back(&mut table, tokens, &cached);
        let missing = self.missing(&table, tokens.len());
        self.append(&mut table, missing);
        Some(table)
    }

    /// A table of new blocks that covers `tokens` tokens, whatever is cached of them.
    pub(crate) fn open_uncached(&mut self, tokens: usize, scope: CacheScope, headroom: usize) -> Option<BlockTable> {
        let mut table = BlockTable::new(scope);
        let missing = self.missing(&table, tokens);
        (missing + headroom <= self.pool.available()).then(|| self.append(&mut table, missing))?;
        Some(table)
    }

    /// A table for a sequence whose first `tokens` tokens are those of `table`, with room for one more: their full
    /// blocks are shared, the one that both would write into is copied. `None` where blocks are short, or were passed
    /// that it would read.
    pub(crate) fn fork(
        &mut self,
        table: &BlockTable,
        tokens: usize,
        scope: CacheScope,
        headroom: usize,
    ) -> Option<BlockTable> {
        if 1 + headroom > self.pool.available() || !self.serves(table, tokens) {
            return None;
        }
        let (shared, passed) = (tokens / self.block_tokens, table.passed);
        let mut fork = BlockTable { blocks: table.blocks[..shared].to_vec(), passed, ..BlockTable::new(scope) };
        fork.held().iter().for_each(|&block| self.pool.retain(block));
        self.append(&mut fork, 1);
        fork.pass(passed);
        let begun = !tokens.is_multiple_of(self.block_tokens);
        self.moves.extend(begun.then(|| Move::Copy { from: table.blocks[shared], to: fork.blocks[shared] }));
        Some(fork)
    }

    /// Extends `table` to cover `tokens` tokens. False, with nothing changed, where blocks are short.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> bool {
        let missing = self.missing(table, tokens);
        let fits = missing <= self.pool.available();
        if fits {
            self.append(table, missing);
        }
        fits
    }

    /// Extends `table` towards covering `tokens` tokens by blocks that nobody misses while `headroom` others are left.
    /// How many tokens it covers then.
    pub(crate) fn grow_spare(&mut self, table: &mut BlockTable, tokens: usize, headroom: usize) -> usize {
        let spare = self.pool.available().saturating_sub(headroom);
        let missing = self.missing(table, tokens).min(spare);
        self.append(table, missing);
        table.blocks.len() * self.block_tokens
    }

    /// Makes the full blocks of `computed` findable as prefixes. All of `computed` has its K and V in the table.
    pub(crate) fn publish(&mut self, table: &mut BlockTable, computed: &[TokenId]) {
        let Some(prefixes) = &mut self.prefixes else { return };
        if table.published < table.passed {
            return; // a fork, of which nobody has the beginning any more
        }
        for tokens in computed.chunks_exact(self.block_tokens).skip(table.published) {
            let Some(before) = table.prefix else { return };
            table.prefix = prefixes.insert(before, tokens, table.blocks[table.published]);
            table.published += usize::from(table.prefix.is_some());
        }
    }

    /// Whether `table` still has what is read for the tokens behind its first `tokens`.
    pub(crate) fn serves(&self, table: &BlockTable, tokens: usize) -> bool {
        table.passed <= self.unread(tokens)
    }

    /// Gives up the leading blocks of `table` that nothing reads once `computed` tokens are computed, at once or when the
    /// step `in_flight` that last names them is collected.
    pub(crate) fn pass_by(&mut self, table: &mut BlockTable, computed: usize, in_flight: Option<Ticket>) {
        let passed = self.unread(computed).min(table.blocks.len() - 1);
        if passed > table.passed {
            let given_up = BlockTable { blocks: table.pass(passed), ..BlockTable::new(CacheScope::SHARED) };
            self.release(given_up, in_flight);
        }
    }

    /// Gives a table's blocks up, at once or when the step `in_flight` that last names them is collected.
    pub(crate) fn release(&mut self, table: BlockTable, in_flight: Option<Ticket>) {
        // Nobody reads what was to be copied for it.
        self.moves.retain(|moved| !matches!(moved, Move::Copy { to, .. } if table.blocks.contains(to)));
        match in_flight {
            Some(ticket) => self.retiring.push((ticket, table)),
            None => self.drop_references(&table),
        }
    }

    /// The step is over: blocks that only it still named return.
    pub(crate) fn collected(&mut self, ticket: Ticket) {
        let (over, waiting) = self.retiring.drain(..).partition(|(last, _)| *last == ticket);
        self.retiring = waiting;
        for (_, table) in over {
            self.drop_references(&table);
        }
    }

    /// Blocks that become available once the steps in flight are collected, with nothing else released.
    pub(crate) fn returning(&self) -> usize {
        let mut named: HashMap<BlockId, u32> = HashMap::new();
        for block in self.retiring.iter().flat_map(|(_, table)| table.held()) {
            *named.entry(*block).or_default() += 1;
        }
        named.iter().filter(|(block, count)| self.pool.references(**block) == **count).count()
    }

    /// Blocks by state; `tables` are those of all live sequences.
    pub(crate) fn usage<'a>(&'a self, tables: impl Iterator<Item = &'a BlockTable>) -> KvUsage {
        let retiring = self.retiring.iter().map(|(_, table)| table);
        let accounted: usize = tables.chain(retiring).map(|table| table.held().len()).sum();
        let [total, free, cached] = [self.pool.total(), self.pool.free(), self.pool.cached()].map(|n| n as u32);
        let leaked = self.pool.total_references().abs_diff(accounted as u64) as u32;
        let swapped = self.tier.as_ref().map_or(0, Tier::len) as u32;
        KvUsage { total, free, cached, held: total - free - cached, swapped, leaked }
    }

    /// Leading blocks that are not read for the tokens behind the first `tokens`.
    fn unread(&self, tokens: usize) -> usize {
        self.read_back_tokens.map_or(0, |read| (tokens + 1).saturating_sub(read) / self.block_tokens)
    }

    fn count_tier_use(&mut self, tokens: usize, cached: &[Cached]) {
        if self.tier.is_some() {
            let found = cached.iter().filter(|cached| cached.block.is_none()).count();
            self.tier_use.query_tokens += (tokens - (cached.len() - found) * self.block_tokens) as u64;
            self.tier_use.hit_tokens += (found * self.block_tokens) as u64;
        }
    }

    fn missing(&self, table: &BlockTable, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens).saturating_sub(table.blocks.len())
    }

    /// Where the longest chain of blocks is that begins `tokens`.
    fn cached_blocks(&self, tokens: &[TokenId], scope: CacheScope) -> Vec<Cached> {
        let (Some(prefixes), mut before) = (&self.prefixes, PrefixId::root(scope)) else { return Vec::new() };
        let mut cached = Vec::new();
        for chunk in tokens.chunks_exact(self.block_tokens) {
            let prefix = prefixes.longer(before, chunk);
            let block = prefixes.find(prefix, before, chunk);
            if block.is_none() && !self.tier.as_ref().is_some_and(|tier| tier.holds(prefix, before, chunk)) {
                break;
            }
            cached.push(Cached { prefix, block });
            before = prefix;
        }
        cached
    }

    /// Takes references on those of the cached blocks that are in the pool, so that nothing evicts them.
    fn retained(&mut self, cached: &[Cached], scope: CacheScope) -> BlockTable {
        let mut table = BlockTable::new(scope);
        for block in cached.iter().filter_map(|cached| cached.block) {
            self.pool.retain(block);
            table.blocks.push(block);
        }
        table
    }

    /// Makes the table that of all cached blocks: those in the tier come back into new blocks, for which there is room.
    fn bring_back(&mut self, table: &mut BlockTable, tokens: &[TokenId], cached: &[Cached]) {
        let absent = cached.iter().filter(|cached| cached.block.is_none()).map(|cached| cached.prefix);
        if let Some(tier) = &mut self.tier {
            tier.pin(absent, self.now);
        }
        table.blocks.clear();
        for (Cached { prefix, block }, chunk) in cached.iter().zip(tokens.chunks_exact(self.block_tokens)) {
            match block {
                Some(block) => table.blocks.push(*block),
                None => self.restore(table, *prefix, chunk),
            }
            table.prefix = Some(*prefix);
        }
        table.published = table.blocks.len();
        if let Some(tier) = &mut self.tier {
            tier.unpin();
        }
    }

    fn restore(&mut self, table: &mut BlockTable, prefix: PrefixId, tokens: &[TokenId]) {
        self.append(table, 1);
        let block = table.blocks[table.blocks.len() - 1];
        if let (Some(tier), Some(prefixes), Some(before)) = (&mut self.tier, &mut self.prefixes, table.prefix) {
            self.moves.extend(tier.bring_back(prefix, block));
            prefixes.insert(before, tokens, block);
        }
    }

    /// Adds `count` blocks, of which the pool has enough.
    fn append(&mut self, table: &mut BlockTable, count: usize) {
        for _ in 0..count {
            let (block, evicted) = self.pool.take().expect("availability was checked");
            if evicted {
                self.evict(block);
            }
            table.blocks.push(block);
        }
    }

    /// The block's contents are given up for others.
    fn evict(&mut self, block: BlockId) {
        let entry = self.prefixes.as_mut().and_then(|prefixes| prefixes.remove(block));
        if let (Some((prefix, entry)), Some(tier)) = (entry, &mut self.tier) {
            self.moves.extend(tier.take_in(prefix, entry, self.now));
        }
    }

    /// From the tail, so that a prefix outlives what continues it.
    fn drop_references(&mut self, table: &BlockTable) {
        for &block in table.held().iter().rev() {
            let keep = self.prefixes.as_ref().is_some_and(|prefixes| prefixes.holds(block));
            self.pool.release(block, keep, self.now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_table_waits_for_the_step_that_names_it_last() {
        let mut kv = KvCache::new(4, 2, None);
        let table = kv.open(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
        kv.release(table, Some(Ticket(7)));
        kv.collected(Ticket(6));
        assert_eq!((kv.pool.free(), kv.returning()), (2, 2));
        kv.collected(Ticket(7));
        assert_eq!((kv.pool.free(), kv.returning()), (4, 0));
    }

    #[test]
    fn a_block_that_a_live_table_shares_is_not_on_its_way_back() {
        let mut kv = KvCache::new(4, 2, Some(1));
        let mut first = kv.open(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
        kv.publish(&mut first, &[1, 2, 3]);
        let second = kv.open(&[1, 2, 4], CacheScope::SHARED, 0).expect("two blocks are free");
        kv.release(first, Some(Ticket(0)));
        assert_eq!(kv.returning(), 1);
        kv.audit([&second].into_iter()).expect("three blocks are held");
    }

    #[test]
    fn scopes_share_nothing_and_what_nobody_uses_expires() {
        let mut kv = KvCache::new(8, 2, Some(1)).with_ttl(Some(10.0));
        let (one, other) = (CacheScope::SHARED, CacheScope(7));
        let mut table = kv.open(&[1, 2, 3], one, 0).expect("eight blocks are free");
        kv.publish(&mut table, &[1, 2, 3]);
        assert_eq!((kv.cached_tokens(&[1, 2, 3], one), kv.cached_tokens(&[1, 2, 3], other)), (2, 0));
        kv.pass(100.0);
        kv.release(table, None);
        kv.pass(109.0);
        assert_eq!(kv.cached_tokens(&[1, 2, 3], one), 2);
        kv.pass(111.0);
        assert_eq!((kv.cached_tokens(&[1, 2, 3], one), kv.pool.free()), (0, 8));
    }

    #[test]
    fn an_audit_sees_a_reference_too_many() {
        let mut kv = KvCache::new(4, 2, None);
        let table = kv.open(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
        assert_eq!(kv.audit([&table].into_iter()), Ok(()));
        assert!(kv.audit([].into_iter()).is_err());
        assert_eq!(kv.usage([].into_iter()).leaked, 2);
    }
}
