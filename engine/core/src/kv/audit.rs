//! An audit of the KV cache: counts the state of all blocks from scratch.

use super::{BlockTable, KvCache};
use crate::plan::BlockId;

/// How often each part of the cache names a block.
#[derive(Clone, Debug, Default)]
struct BlockUses {
    named: u32,
    free: u32,
    cached: u32,
}

impl KvCache {
    /// Checks that each block is exactly one of free, cached and held, and has one reference for each table that
    /// names it. `tables` are those of all live sequences.
    pub(crate) fn audit<'a>(&'a self, tables: impl Iterator<Item = &'a BlockTable>) -> Result<(), String> {
        let mut uses_by_block = vec![BlockUses::default(); self.pool.total()];
        let mut uses = |block: BlockId, count: fn(&mut BlockUses) -> &mut u32| {
            *count(&mut uses_by_block[block.0 as usize]) += 1;
        };
        let pending_release = self.pending_release.iter().flat_map(|(_, blocks)| blocks).copied();
        for block in tables.flat_map(BlockTable::held).chain(pending_release) {
            uses(block, |uses| &mut uses.named);
        }
        self.pool.free_blocks().for_each(|block| uses(block, |uses| &mut uses.free));
        self.pool.cached_blocks().for_each(|block| uses(block, |uses| &mut uses.cached));
        uses_by_block.iter().enumerate().try_for_each(|(block, uses)| self.check(BlockId(block as u32), uses))
    }

    fn check(&self, block: BlockId, uses: &BlockUses) -> Result<(), String> {
        let states = uses.free + uses.cached + uses.named.min(1);
        let references = self.pool.references(block);
        let is_cached_prefix = self.prefixes.as_ref().is_some_and(|prefixes| prefixes.holds(block));
        let right = states == 1
            && references == uses.named
            && (uses.cached == 0 || is_cached_prefix)
            && (uses.free == 0 || !is_cached_prefix);
        right.then_some(()).ok_or(format!(
            "block {} has {references} references, a cached prefix: {is_cached_prefix}, and {uses:?}",
            block.0
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::CacheScope;

    #[test]
    fn a_block_is_one_thing_as_often_as_it_is_named() {
        let mut kv = KvCache::new(3, 2, Some(1));
        let mut table = kv.allocate(&[1, 2, 3], CacheScope::SHARED, 0).expect("three blocks are free");
        kv.publish(&mut table, &[1, 2, 3]);
        let [known, unknown] = [0, 1].map(|index| table.held().nth(index).expect("two blocks are held"));
        let unused = kv.pool.free_blocks().next().expect("a block is free");
        let is_right =
            |kv: &KvCache, block, named, free, cached| kv.check(block, &BlockUses { named, free, cached }).is_ok();
        assert!(is_right(&kv, known, 1, 0, 0) && is_right(&kv, unknown, 1, 0, 0) && is_right(&kv, unused, 0, 1, 0));
        assert!(!is_right(&kv, unused, 0, 0, 0), "nothing");
        assert!(!is_right(&kv, unknown, 1, 1, 0), "held and free");
        assert!(!is_right(&kv, known, 2, 0, 0), "named once more than it is counted");
        assert!(!is_right(&kv, unused, 0, 0, 1), "cached, and nobody knows as what");
        kv.release(table, None);
        assert!(is_right(&kv, known, 0, 0, 1));
        assert!(!is_right(&kv, known, 0, 1, 0), "free, and known as a prefix");
    }
}
