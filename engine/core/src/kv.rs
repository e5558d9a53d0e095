//! Bookkeeping of the KV cache: which sequence holds which block, which blocks can be reused, which must wait for a
//! step in flight.
//!
//! Only ids and counts; the tensors are the executor's. Every block is in exactly one state:
//! - *held*: a block table names it, or a step in flight names it that a released table had;
//! - *cached*: no table names it and it holds a known prefix, kept until the pool needs the room;
//! - *free*.
//!
//! Layers are divided into groups ([`KvGroups`]) and a sequence has a block table for each. Groups with a sliding
//! window take blocks as their tokens are computed, and give up the blocks before the window.

mod audit;
mod block_counts;
mod block_pool;
mod block_table;
mod prefix_cache;
mod prefix_match;
mod swap_space;

use std::collections::HashMap;

use windlass_engine_contract::kv_groups::KvGroups;

use crate::plan::{BlockId, BlockMove, Ticket};
use crate::request::{CacheScope, TokenId};
use block_counts::BlockCounts;
use block_pool::BlockPool;
pub(crate) use block_table::BlockTable;
use prefix_cache::{BlockKey, PrefixCache};
use prefix_match::PrefixMatch;
use swap_space::SwapSpace;

/// Blocks, their reference counts, and the prefix cache over them.
#[derive(Debug)]
pub(crate) struct KvCache {
    block_tokens: usize,
    groups: KvGroups,
    pool: BlockPool,
    /// `None` if the prefix cache is disabled.
    prefixes: Option<PrefixCache>,
    /// Where evicted blocks go; `None` without swap slots.
    swap: Option<SwapSpace>,
    /// Moves that the next step will make, in order.
    moves: Vec<BlockMove>,
    /// Released blocks that a step in flight still names, with the last such step.
    pending_release: Vec<(Ticket, Vec<BlockId>)>,
    /// Seconds after which an unused prefix is dropped.
    ttl_seconds: Option<f64>,
    swap_stats: SwapStats,
    /// Latest time that a caller gave.
    now: f64,
}

/// Lookups in the swap space: of tokens that sequences needed and the pool did not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapStats {
    /// Tokens looked up.
    pub query_tokens: u64,
    /// Tokens found.
    pub hit_tokens: u64,
}

/// Blocks by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvUsage {
    /// Blocks in the pool.
    pub total: u32,
    /// Blocks without contents.
    pub free: u32,
    /// Blocks that only the prefix cache keeps: available, and evicted when taken.
    pub cached: u32,
    /// Blocks that live sequences or steps in flight name.
    pub held: u32,
    /// Blocks in the swap space.
    pub swapped: u32,
    /// References that no sequence and no step in flight accounts for. Always 0; anything else is a bug.
    pub leaked: u32,
}

impl KvUsage {
    /// Share of blocks held, 0 to 1.
    pub fn usage(&self) -> f64 {
        f64::from(self.held) / f64::from(self.total.max(1))
    }
}

impl KvCache {
    /// `prefix_key` is the secret key of the prefix hashes; `None` disables the prefix cache.
    pub(crate) fn new(blocks: u32, block_tokens: u32, prefix_key: Option<u128>) -> KvCache {
        assert!(blocks > 0 && block_tokens > 0, "a KV cache of {blocks} blocks of {block_tokens} tokens");
        KvCache {
            block_tokens: block_tokens as usize,
            groups: KvGroups::ONE,
            pool: BlockPool::new(blocks),
            prefixes: prefix_key.map(|key| PrefixCache::new(blocks, key)),
            swap: None,
            moves: Vec::new(),
            pending_release: Vec::new(),
            ttl_seconds: None,
            swap_stats: SwapStats::default(),
            now: 0.0,
        }
    }

    /// Drops prefixes that were unused for this long.
    pub(crate) fn with_ttl(mut self, ttl_seconds: Option<f64>) -> KvCache {
        self.ttl_seconds = ttl_seconds;
        self
    }

    /// Sets the groups of layers; each has a block table of its own.
    pub(crate) fn with_groups(mut self, groups: KvGroups) -> KvCache {
        assert!(groups.count() > 0, "a KV cache of no layers");
        self.groups = groups;
        self
    }

    /// Adds a swap space of `slots` slots; 0 for none.
    pub(crate) fn with_swap_space(mut self, slots: u32) -> KvCache {
        self.swap = (slots > 0).then(|| SwapSpace::new(slots));
        self
    }

    /// Advances the time, and drops expired blocks of the prefix cache and the swap space.
    pub(crate) fn advance_time(&mut self, now: f64) {
        self.now = now;
        let (Some(ttl), Some(prefixes)) = (self.ttl_seconds, &mut self.prefixes) else { return };
        while let Some(block) = self.pool.expire(now - ttl) {
            prefixes.remove(block);
        }
        if let Some(swap) = &mut self.swap {
            swap.expire(now - ttl);
        }
    }

    /// Moves that the next step has to make before it computes.
    pub(crate) fn take_moves(&mut self) -> Vec<BlockMove> {
        std::mem::take(&mut self.moves)
    }

    /// A sequence failed: drops its blocks from the prefix cache and the swap space. Blocks that its windows have
    /// passed are kept: they served steps that succeeded.
    pub(crate) fn invalidate(&mut self, table: &BlockTable) {
        let Some(prefixes) = &mut self.prefixes else { return };
        for (key, _) in table.held().filter_map(|block| prefixes.remove(block)) {
            if let Some(swap) = &mut self.swap {
                swap.forget(key);
            }
        }
    }

    /// Leading tokens of `tokens` that are cached.
    pub(crate) fn cached_tokens(&self, tokens: &[TokenId], scope: CacheScope) -> usize {
        self.match_prefix(&tokens[..tokens.len() - 1], scope).blocks() * self.block_tokens
    }

    /// Whether a sequence of `tokens` tokens could be allocated, now or once the steps in flight are collected, with
    /// a block to spare for each of `headroom` sequences. `prefix` is the part that may be cached.
    pub(crate) fn would_fit(&self, tokens: usize, prefix: &[TokenId], scope: CacheScope, headroom: usize) -> bool {
        let matched = self.match_prefix(prefix, scope);
        // Cached blocks that nobody holds count as available until they are taken.
        let unnamed = matched.in_pool().iter().filter(|block| self.pool.references(**block) == 0).count();
        let needed = self.new_blocks(tokens, &matched) + unnamed + self.one_block_each(headroom);
        needed <= self.pool.available() + self.pending_free()
    }

    /// Blocks that can be taken now.
    pub(crate) fn available(&self) -> usize {
        self.pool.available()
    }

    /// Lookups in the swap space.
    pub(crate) fn swap_stats(&self) -> SwapStats {
        self.swap_stats
    }

    /// Whether the prefix cache is enabled.
    pub(crate) fn caches_prefixes(&self) -> bool {
        self.prefixes.is_some()
    }

    /// Allocates a block table for `tokens` that starts with the cached blocks of their longest known prefix.
    /// Full-attention groups get all blocks, windowed groups one block for the first tokens to compute.
    ///
    /// At least the last token is left to compute: the caller wants its logits. Returns `None`, with nothing changed,
    /// unless each of `headroom` sequences can still grow by one block.
    pub(crate) fn allocate(&mut self, tokens: &[TokenId], scope: CacheScope, headroom: usize) -> Option<BlockTable> {
        if self.pool.available() <= self.one_block_each(headroom) {
            return None; // without walking the prefix first: a full pool is asked in every step
        }
        let matched = self.match_prefix(&tokens[..tokens.len() - 1], scope);
        let cached = matched.in_pool();
        cached.iter().for_each(|&block| self.pool.retain(block));
        if self.new_blocks(tokens.len(), &matched) + self.one_block_each(headroom) > self.pool.available() {
            self.drop_references(&cached);
            return None;
        }
        self.count_swap_lookups(tokens.len(), &matched);
        let mut table = self.table_of_match(&matched, tokens, scope);
        self.extend(&mut table, self.initial_blocks(tokens.len(), matched.blocks()));
        Some(table)
    }

    /// Blocks that a sequence of `tokens` tokens takes from the pool at first, beside the matched ones that are
    /// there.
    fn new_blocks(&self, tokens: usize, matched: &PrefixMatch) -> usize {
        self.blocks_beyond(self.initial_blocks(tokens, matched.blocks()), matched.blocks()) + matched.in_swap().count()
    }

    /// A block table of new blocks, whatever is cached.
    pub(crate) fn allocate_uncached(
        &mut self,
        tokens: usize,
        scope: CacheScope,
        headroom: usize,
    ) -> Option<BlockTable> {
        let mut table = BlockTable::new(self.groups.count(), scope);
        let counts = self.initial_blocks(tokens, 0);
        let fits = self.missing(&table, counts) + self.one_block_each(headroom) <= self.pool.available();
        fits.then(|| self.extend(&mut table, counts))?;
        Some(table)
    }

    /// A block table for a sequence that shares its first `tokens` tokens with `table`, with room for one more: full
    /// blocks are shared, and the partial block that both would write is copied. `None` if blocks are short. `table`
    /// must still hold the windows after these tokens ([`still_holds_window`](Self::still_holds_window)).
    pub(crate) fn fork(
        &mut self,
        table: &BlockTable,
        tokens: usize,
        scope: CacheScope,
        headroom: usize,
    ) -> Option<BlockTable> {
        if self.one_block_each(1 + headroom) > self.pool.available() {
            return None;
        }
        let (shared, begun) = (tokens / self.block_tokens, !tokens.is_multiple_of(self.block_tokens));
        let groups = table.groups().iter().map(|group| group.first(shared)).collect();
        let mut fork = BlockTable::of(groups, scope);
        fork.held().for_each(|block| self.pool.retain(block));
        self.extend(&mut fork, BlockCounts::all(shared + 1));
        if begun {
            let written = table.groups().iter().zip(fork.groups());
            let pairs = written.filter_map(|(from, to)| Some((from.block(shared)?, to.block(shared)?)));
            self.moves.extend(pairs.map(|(from, to)| BlockMove::Copy { from, to }));
        }
        Some(fork)
    }

    /// Extends `table` to cover `tokens` tokens. False, with nothing changed, if blocks are short.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> bool {
        let blocks = tokens.div_ceil(self.block_tokens);
        if table.covered_blocks() >= blocks {
            return true; // as parent most steps
        }
        let counts = BlockCounts::all(blocks);
        let fits = self.missing(table, counts) <= self.pool.available();
        if fits {
            self.extend(table, counts);
        }
        fits
    }

    /// Extends `table` towards `tokens` tokens, as far as each of `headroom` sequences can still grow by one block.
    /// Returns the number of tokens that it covers then.
    pub(crate) fn grow_if_spare(&mut self, table: &mut BlockTable, tokens: usize, headroom: usize) -> usize {
        for blocks in table.covered_blocks() + 1..=tokens.div_ceil(self.block_tokens) {
            let counts = BlockCounts::all(blocks);
            if self.missing(table, counts) + self.one_block_each(headroom) > self.pool.available() {
                break;
            }
            self.extend(table, counts);
        }
        table.covered_blocks() * self.block_tokens
    }

    /// Adds the full blocks of `computed` to the prefix cache. The K and V of all of `computed` are in the table,
    /// except for blocks that its windows have passed.
    pub(crate) fn publish(&mut self, table: &mut BlockTable, computed: &[TokenId]) {
        let Some(prefixes) = &mut self.prefixes else { return };
        for tokens in computed.chunks_exact(self.block_tokens).skip(table.published) {
            let Some(parent) = table.prefix else { return };
            let prefix = prefixes.extend(parent, tokens);
            let mut blocks =
                (0..).zip(table.groups()).filter_map(|(group, of)| Some((group, of.block(table.published)?)));
            let insert = |(group, block)| prefixes.insert(BlockKey { prefix, group }, parent, tokens, block);
            let is_kept = blocks.all(insert);
            table.prefix = is_kept.then_some(prefix);
            table.published += usize::from(is_kept);
        }
    }

    /// Whether `table` still has every block that the tokens after its first `tokens` read.
    pub(crate) fn still_holds_window(&self, table: &BlockTable, tokens: usize) -> bool {
        table.groups().iter().all(|group| group.skipped <= self.out_of_window_blocks(tokens))
    }

    /// Releases the leading blocks of `table` that nothing reads once `computed` tokens are computed; at once, or
    /// when `in_flight`, the last step that names them, is collected.
    pub(crate) fn release_out_of_window(&mut self, table: &mut BlockTable, computed: usize, in_flight: Option<Ticket>) {
        let out_of_window_blocks = self.out_of_window_blocks(computed);
        let released = table.skip(self.groups.full, out_of_window_blocks);
        if !released.is_empty() {
            self.release_blocks(released, in_flight);
        }
    }

    /// Releases a block table; at once, or when `in_flight`, the last step that names its blocks, is collected.
    /// Releases the tail first, so that a prefix stays cached for longer than what continues it.
    pub(crate) fn release(&mut self, table: BlockTable, in_flight: Option<Ticket>) {
        self.release_blocks(table.tail_first(), in_flight);
    }

    /// A step was collected: releases the blocks that only it still named.
    pub(crate) fn collected(&mut self, ticket: Ticket) {
        let (over, waiting) = self.pending_release.drain(..).partition(|(last, _)| *last == ticket);
        self.pending_release = waiting;
        for (_, blocks) in over {
            self.drop_references(&blocks);
        }
    }

    /// Blocks that become available once the steps in flight are collected, if nothing else is released.
    pub(crate) fn pending_free(&self) -> usize {
        let mut named: HashMap<BlockId, u32> = HashMap::new();
        for block in self.pending_release.iter().flat_map(|(_, blocks)| blocks) {
            *named.entry(*block).or_default() += 1;
        }
        named.iter().filter(|(block, count)| self.pool.references(**block) == **count).count()
    }

    /// Blocks by state; `tables` are those of all live sequences.
    pub(crate) fn usage<'a>(&'a self, tables: impl Iterator<Item = &'a BlockTable>) -> KvUsage {
        let pending_release: usize = self.pending_release.iter().map(|(_, blocks)| blocks.len()).sum();
        let accounted =
            pending_release + tables.flat_map(BlockTable::groups).map(|group| group.held.len()).sum::<usize>();
        let [total, free, cached] = [self.pool.total(), self.pool.free(), self.pool.cached()].map(|n| n as u32);
        let leaked = self.pool.total_references().abs_diff(accounted as u64) as u32;
        let swapped = self.swap.as_ref().map_or(0, SwapSpace::len) as u32;
        KvUsage { total, free, cached, held: total - free - cached, swapped, leaked }
    }

    fn count_swap_lookups(&mut self, tokens: usize, matched: &PrefixMatch) {
        if self.swap.is_some() {
            let mut found: Vec<usize> = matched.in_swap().map(|(index, _)| index).collect();
            found.sort_unstable();
            found.dedup();
            self.swap_stats.query_tokens += (tokens - (matched.blocks() - found.len()) * self.block_tokens) as u64;
            self.swap_stats.hit_tokens += (found.len() * self.block_tokens) as u64;
        }
    }

    /// Takes a block; the pool must have one.
    fn take_block(&mut self) -> BlockId {
        let (block, evicted) = self.pool.take().expect("availability was checked");
        if evicted {
            self.evict(block);
        }
        block
    }

    /// The contents of a cached block are about to be overwritten: moves them to the swap space, if there is one.
    fn evict(&mut self, block: BlockId) {
        let evicted = self.prefixes.as_mut().and_then(|prefixes| prefixes.remove(block));
        if let (Some((key, evicted)), Some(swap)) = (evicted, &mut self.swap) {
            self.moves.extend(swap.swap_out(key, evicted, self.now));
        }
    }

    /// Releases blocks in this order; at once, or when `in_flight`, the last step that names them, is collected.
    fn release_blocks(&mut self, blocks: Vec<BlockId>, in_flight: Option<Ticket>) {
        // Pending copies into these blocks are not needed any more.
        self.moves.retain(|moved| !matches!(moved, BlockMove::Copy { to, .. } if blocks.contains(to)));
        match in_flight {
            Some(ticket) => self.pending_release.push((ticket, blocks)),
            None => self.drop_references(&blocks),
        }
    }

    fn drop_references(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
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
        let table = kv.allocate(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
        kv.release(table, Some(Ticket(7)));
        kv.collected(Ticket(6));
        assert_eq!((kv.pool.free(), kv.pending_free()), (2, 2));
        kv.collected(Ticket(7));
        assert_eq!((kv.pool.free(), kv.pending_free()), (4, 0));
    }

    #[test]
    fn a_block_that_a_live_table_shares_is_not_pending_free() {
        let mut kv = KvCache::new(4, 2, Some(1));
        let mut first = kv.allocate(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
        kv.publish(&mut first, &[1, 2, 3]);
        let second = kv.allocate(&[1, 2, 4], CacheScope::SHARED, 0).expect("two blocks are free");
        kv.release(first, Some(Ticket(0)));
        assert_eq!(kv.pending_free(), 1);
        kv.audit([&second].into_iter()).expect("three blocks are held");
    }

    #[test]
    fn scopes_share_nothing_and_what_nobody_uses_expires() {
        let mut kv = KvCache::new(8, 2, Some(1)).with_ttl(Some(10.0));
        let (one, other) = (CacheScope::SHARED, CacheScope(7));
        let mut table = kv.allocate(&[1, 2, 3], one, 0).expect("eight blocks are free");
        kv.publish(&mut table, &[1, 2, 3]);
        assert_eq!((kv.cached_tokens(&[1, 2, 3], one), kv.cached_tokens(&[1, 2, 3], other)), (2, 0));
        assert_eq!(kv.cached_tokens(&[1, 2], one), 0, "the last token is computed");
        kv.advance_time(100.0);
        kv.release(table, None);
        kv.advance_time(110.0);
        assert_eq!(kv.cached_tokens(&[1, 2, 3], one), 2);
        kv.advance_time(111.0);
        assert_eq!((kv.cached_tokens(&[1, 2, 3], one), kv.pool.free()), (0, 8));
    }

    #[test]
    fn who_comes_leaves_a_block_for_each_that_runs() {
        for (blocks, headroom, fits) in [(4, 2, true), (4, 3, false), (5, 3, true)] {
            let mut kv = KvCache::new(blocks, 2, None);
            assert_eq!(kv.allocate_uncached(3, CacheScope::SHARED, headroom).is_some(), fits, "{blocks} {headroom}");
        }
        for (blocks, headroom, fits) in [(5, 2, true), (5, 3, false), (4, 1, true), (4, 2, false)] {
            let mut kv = KvCache::new(blocks, 2, None);
            let table = kv.allocate(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
            assert_eq!(kv.fork(&table, 2, CacheScope::SHARED, headroom).is_some(), fits, "{blocks} {headroom}");
        }
    }

    #[test]
    fn spare_growth_leaves_a_block_for_each_that_runs() {
        for (headroom, covered) in [(0, 8), (2, 8), (3, 6), (4, 4), (5, 2), (9, 2)] {
            let mut kv = KvCache::new(6, 2, None);
            let mut table = kv.allocate(&[1, 2], CacheScope::SHARED, 0).expect("six blocks are free");
            assert_eq!(kv.grow_if_spare(&mut table, 8, headroom), covered, "{headroom}");
        }
    }

    #[test]
    fn an_audit_sees_a_reference_too_many() {
        let mut kv = KvCache::new(4, 2, None);
        let table = kv.allocate(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
        assert_eq!(kv.audit([&table].into_iter()), Ok(()));
        assert!(kv.audit([].into_iter()).is_err());
        assert_eq!(kv.usage([].into_iter()).leaked, 2);
    }
}
