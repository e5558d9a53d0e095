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

use std::collections::HashMap;

use crate::plan::{BlockCopy, BlockId, Ticket};
use crate::request::{CacheScope, TokenId};
use block_pool::BlockPool;
pub(crate) use block_table::BlockTable;
use prefix_cache::{PrefixCache, PrefixId};

/// Blocks, their references and the prefix cache over them.
#[derive(Debug)]
pub(crate) struct KvCache {
    block_tokens: usize,
    pool: BlockPool,
    /// `None` where the prefix cache is switched off.
    prefixes: Option<PrefixCache>,
    /// Released tables that a step in flight still names, each with the last such step.
    retiring: Vec<(Ticket, BlockTable)>,
    /// How long a prefix is kept that nobody uses.
    ttl_seconds: Option<f64>,
    /// The time of the last call that told it.
    now: f64,
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
    pub(crate) fn new(blocks: u32, block_tokens: u32, enable_prefix_cache: bool) -> KvCache {
        assert!(blocks > 0 && block_tokens > 0, "a KV cache of {blocks} blocks of {block_tokens} tokens");
        KvCache {
            block_tokens: block_tokens as usize,
            pool: BlockPool::new(blocks),
            prefixes: enable_prefix_cache.then(|| PrefixCache::new(blocks)),
            retiring: Vec::new(),
            ttl_seconds: None,
            now: 0.0,
        }
    }

    /// Forgets prefixes that nobody used for so long.
    pub(crate) fn with_ttl(mut self, ttl_seconds: Option<f64>) -> KvCache {
        self.ttl_seconds = ttl_seconds;
        self
    }

    /// Time has passed: what nobody used for too long is forgotten.
    pub(crate) fn pass(&mut self, now: f64) {
        self.now = now;
        let (Some(ttl), Some(prefixes)) = (self.ttl_seconds, &mut self.prefixes) else { return };
        while let Some(block) = self.pool.expire(now - ttl) {
            prefixes.remove(block);
        }
    }

    /// Leading tokens of `tokens` that are cached.
    pub(crate) fn cached_tokens(&mut self, tokens: &[TokenId], scope: CacheScope) -> usize {
        let Some(prefixes) = &mut self.prefixes else { return 0 };
        let mut prefix = PrefixId::root(scope);
        let chunks = tokens[..tokens.len() - 1].chunks_exact(self.block_tokens);
        let known = chunks.take_while(|chunk| match prefixes.find(prefix, chunk) {
            Some((longer, _)) => {
                prefix = longer;
                true
            }
            None => false,
        });
        known.count() * self.block_tokens
    }

    /// Whether `tokens` tokens, of which `cached` are cached, would find blocks now or once the steps in flight are
    /// collected, with `headroom` left.
    pub(crate) fn will_fit(&self, tokens: usize, cached: usize, headroom: usize) -> bool {
        let missing = tokens.div_ceil(self.block_tokens) - cached / self.block_tokens;
        missing + headroom <= self.pool.available() + self.returning()
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
        let mut table = self.cached_prefix(&tokens[..tokens.len() - 1], scope);
        let missing = self.missing(&table, tokens.len());
        if missing + headroom > self.pool.available() {
            self.drop_references(&table);
            return None;
        }
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
    /// blocks are shared, the one that both would write into is to be copied. `None` where blocks are short.
    pub(crate) fn fork(
        &mut self,
        table: &BlockTable,
        tokens: usize,
        scope: CacheScope,
        headroom: usize,
    ) -> Option<(BlockTable, Option<BlockCopy>)> {
        if 1 + headroom > self.pool.available() {
            return None;
        }
        let shared = tokens / self.block_tokens;
        let mut fork = BlockTable { blocks: table.blocks[..shared].to_vec(), ..BlockTable::new(scope) };
        fork.blocks.iter().for_each(|&block| self.pool.retain(block));
        self.append(&mut fork, 1);
        let begun = !tokens.is_multiple_of(self.block_tokens);
        let copy = begun.then(|| BlockCopy { from: table.blocks[shared], to: fork.blocks[shared] });
        Some((fork, copy))
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

    /// Makes the full blocks of `computed` findable as prefixes. All of `computed` has its K and V in the table.
    pub(crate) fn publish(&mut self, table: &mut BlockTable, computed: &[TokenId]) {
        let Some(prefixes) = &mut self.prefixes else { return };
        for tokens in computed.chunks_exact(self.block_tokens).skip(table.published) {
            table.prefix = prefixes.insert(table.prefix, tokens, table.blocks[table.published]);
            table.published += 1;
        }
    }

    /// Gives a table's blocks up, at once or when the step `in_flight` that last names them is collected.
    pub(crate) fn release(&mut self, table: BlockTable, in_flight: Option<Ticket>) {
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
        for block in self.retiring.iter().flat_map(|(_, table)| &table.blocks) {
            *named.entry(*block).or_default() += 1;
        }
        named.iter().filter(|(block, count)| self.pool.references(**block) == **count).count()
    }

    /// Blocks by state; `tables` are those of all live sequences.
    pub(crate) fn usage<'a>(&'a self, tables: impl Iterator<Item = &'a BlockTable>) -> KvUsage {
        let retiring = self.retiring.iter().map(|(_, table)| table);
        let accounted: usize = tables.chain(retiring).map(|table| table.blocks.len()).sum();
        let [total, free, cached] = [self.pool.total(), self.pool.free(), self.pool.cached()].map(|n| n as u32);
        let leaked = self.pool.total_references().abs_diff(accounted as u64) as u32;
        KvUsage { total, free, cached, held: total - free - cached, leaked }
    }

    fn missing(&self, table: &BlockTable, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens).saturating_sub(table.blocks.len())
    }

    /// Takes references on the longest chain of cached blocks that begins `tokens`.
    fn cached_prefix(&mut self, tokens: &[TokenId], scope: CacheScope) -> BlockTable {
        let mut table = BlockTable::new(scope);
        let Some(prefixes) = &mut self.prefixes else { return table };
        for chunk in tokens.chunks_exact(self.block_tokens) {
            let Some((prefix, block)) = prefixes.find(table.prefix, chunk) else { break };
            self.pool.retain(block);
            table.prefix = prefix;
            table.blocks.push(block);
        }
        table.published = table.blocks.len();
        table
    }

    /// Adds `count` blocks, of which the pool has enough.
    fn append(&mut self, table: &mut BlockTable, count: usize) {
        for _ in 0..count {
            let (block, evicted) = self.pool.take().expect("availability was checked");
            if let (true, Some(prefixes)) = (evicted, &mut self.prefixes) {
                prefixes.remove(block);
            }
            table.blocks.push(block);
        }
    }

    /// From the tail, so that a prefix outlives what continues it.
    fn drop_references(&mut self, table: &BlockTable) {
        for &block in table.blocks.iter().rev() {
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
        let mut kv = KvCache::new(4, 2, false);
        let table = kv.open(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
        kv.release(table, Some(Ticket(7)));
        kv.collected(Ticket(6));
        assert_eq!((kv.pool.free(), kv.returning()), (2, 2));
        kv.collected(Ticket(7));
        assert_eq!((kv.pool.free(), kv.returning()), (4, 0));
    }

    #[test]
    fn a_block_that_a_live_table_shares_is_not_on_its_way_back() {
        let mut kv = KvCache::new(4, 2, true);
        let mut first = kv.open(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
        kv.publish(&mut first, &[1, 2, 3]);
        let second = kv.open(&[1, 2, 4], CacheScope::SHARED, 0).expect("two blocks are free");
        kv.release(first, Some(Ticket(0)));
        assert_eq!(kv.returning(), 1);
        kv.audit([&second].into_iter()).expect("three blocks are held");
    }

    #[test]
    fn scopes_share_nothing_and_what_nobody_uses_expires() {
        let mut kv = KvCache::new(8, 2, true).with_ttl(Some(10.0));
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
        let mut kv = KvCache::new(4, 2, false);
        let table = kv.open(&[1, 2, 3], CacheScope::SHARED, 0).expect("four blocks are free");
        assert_eq!(kv.audit([&table].into_iter()), Ok(()));
        assert!(kv.audit([].into_iter()).is_err());
        assert_eq!(kv.usage([].into_iter()).leaked, 2);
    }
}
