//! The prefix cache: which block holds the K and V of which prefix, in which group of layers.
//!
//! K and V of a block depend on its tokens and on all before them, so a block is identified by a hash of both:
//! SipHash of 128 bits (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012) over the hash of the prefix
//! before and the block's tokens. Each process draws the key, so that nobody can aim for collisions; and a hit
//! compares the tokens themselves, so that a collision never serves the cache of another prompt. A hash depends on
//! the tokens alone: blocks after an evicted block are found again once that one is computed again. Each
//! [`CacheScope`] starts from a hash of its own.

use std::collections::HashMap;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::plan::BlockId;
use crate::request::{CacheScope, TokenId};

/// Hash of a sequence of whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PrefixHash(u128);

impl PrefixHash {
    /// The empty prefix of a scope.
    pub(super) fn root(scope: CacheScope) -> PrefixHash {
        PrefixHash(scope.0 | 1 << 127)
    }
}

/// Identifies a cached block: the prefix that ends with it, and the group of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockKey {
    pub(super) prefix: PrefixHash,
    pub(super) group: u32,
}

/// A cached block, with what its hash stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CachedBlock {
    pub(super) block: BlockId,
    pub(super) parent: PrefixHash,
    pub(super) tokens: Box<[TokenId]>,
}

#[derive(Debug)]
pub(super) struct PrefixCache {
    hasher: PrefixHasher,
    blocks: HashMap<BlockKey, CachedBlock>,
    /// The key of each cached block.
    keys: Vec<Option<BlockKey>>,
}

impl PrefixCache {
    pub(super) fn new(blocks: u32, key: u128) -> PrefixCache {
        PrefixCache { hasher: PrefixHasher::new(key), blocks: HashMap::new(), keys: vec![None; blocks as usize] }
    }

    /// The hash of the prefix `parent` followed by `tokens`.
    pub(super) fn extend(&self, parent: PrefixHash, tokens: &[TokenId]) -> PrefixHash {
        self.hasher.of(parent, tokens)
    }

    /// The block of `key`, if its prefix is `parent` followed by `tokens`.
    pub(super) fn find(&self, key: BlockKey, parent: PrefixHash, tokens: &[TokenId]) -> Option<BlockId> {
        self.blocks.get(&key).filter(|cached| cached.matches(parent, tokens)).map(|cached| cached.block)
    }

    /// Caches `block` under `key`, the prefix of which is `parent` followed by `tokens`, unless a block is cached
    /// there. False on a collision: then blocks that follow cannot be cached.
    pub(super) fn insert(&mut self, key: BlockKey, parent: PrefixHash, tokens: &[TokenId], block: BlockId) -> bool {
        if let Some(cached) = self.blocks.get(&key) {
            return cached.matches(parent, tokens);
        }
        self.blocks.insert(key, CachedBlock { block, parent, tokens: tokens.into() });
        self.keys[block.0 as usize] = Some(key);
        true
    }

    /// Removes a block whose contents are about to be overwritten; returns what it was.
    pub(super) fn remove(&mut self, block: BlockId) -> Option<(BlockKey, CachedBlock)> {
        let key = self.keys[block.0 as usize].take()?;
        self.blocks.remove_entry(&key)
    }

    pub(super) fn holds(&self, block: BlockId) -> bool {
        self.keys[block.0 as usize].is_some()
    }
}

impl CachedBlock {
    pub(super) fn matches(&self, parent: PrefixHash, tokens: &[TokenId]) -> bool {
        self.parent == parent && *self.tokens == *tokens
    }
}

/// The keyed hash. Tests that want collisions use fewer bits.
#[derive(Clone, Copy, Debug)]
struct PrefixHasher {
    keys: [u64; 2],
    bits: u32,
}

impl PrefixHasher {
    fn new(key: u128) -> PrefixHasher {
        PrefixHasher { keys: [key as u64, (key >> 64) as u64], bits: 127 }
    }

    /// The highest bit is reserved for the roots of scopes.
    fn of(&self, parent: PrefixHash, tokens: &[TokenId]) -> PrefixHash {
        let mut hasher = SipHasher13::new_with_keys(self.keys[0], self.keys[1]);
        hasher.write_u128(parent.0);
        tokens.iter().for_each(|token| hasher.write_u32(*token));
        PrefixHash(hasher.finish128().as_u128() & ((1 << self.bits) - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: PrefixHash = PrefixHash(1 << 127);

    #[test]
    fn roots_have_the_highest_bit_whatever_their_scope() {
        for scope in [0, 5, u128::MAX] {
            assert_eq!(PrefixHash::root(CacheScope(scope)), PrefixHash(scope | ROOT.0));
        }
    }

    fn key(prefix: PrefixHash) -> BlockKey {
        BlockKey { prefix, group: 0 }
    }

    /// Caches `block` after `parent`; returns the hash of the longer prefix.
    fn insert(cache: &mut PrefixCache, parent: PrefixHash, tokens: &[TokenId], block: u32) -> Option<PrefixHash> {
        let hash = cache.extend(parent, tokens);
        cache.insert(key(hash), parent, tokens, BlockId(block)).then_some(hash)
    }

    fn tokens(number: u32) -> [TokenId; 2] {
        [number / 7, number % 7]
    }

    #[test]
    fn a_prefix_is_its_tokens_in_their_order_under_a_key() {
        let hasher = PrefixHasher::new(5);
        assert_eq!(hasher.of(ROOT, &[1, 2]), hasher.of(ROOT, &[1, 2]));
        let others = [
            hasher.of(ROOT, &[2, 1]),
            hasher.of(hasher.of(ROOT, &[1]), &[2]),
            hasher.of(PrefixHash::root(CacheScope(9)), &[1, 2]),
            PrefixHasher::new(6).of(ROOT, &[1, 2]),
            PrefixHasher::new(5 << 64).of(ROOT, &[1, 2]),
        ];
        assert!(others.iter().all(|other| *other != hasher.of(ROOT, &[1, 2])));
    }

    #[test]
    fn colliding_digests_serve_no_other_prompt() {
        let mut cache = PrefixCache::new(100, 3);
        cache.hasher.bits = 4;
        let kept: Vec<_> = (0..40).map(|number| insert(&mut cache, ROOT, &tokens(number), number)).collect();
        for number in 0..40 {
            let prefix = cache.extend(ROOT, &tokens(number));
            let own = kept[number as usize].map(|_| BlockId(number));
            assert_eq!(cache.find(key(prefix), ROOT, &tokens(number)), own, "{number}");
        }
        let refused = kept.iter().filter(|prefix| prefix.is_none()).count();
        assert!((20..40).contains(&refused), "{refused} of 40 prompts share the 16 digests of others");
    }

    #[test]
    fn what_followed_an_evicted_block_is_found_again() {
        let mut cache = PrefixCache::new(4, 3);
        let first = insert(&mut cache, ROOT, &[1], 0).unwrap();
        let second = insert(&mut cache, first, &[2], 1).unwrap();
        assert_eq!(cache.remove(BlockId(0)).map(|(key, _)| key.prefix), Some(first));
        assert_eq!(cache.find(key(first), ROOT, &[1]), None);
        assert_eq!(insert(&mut cache, ROOT, &[1], 2), Some(first));
        assert_eq!(cache.find(key(second), first, &[2]), Some(BlockId(1)));
        assert_eq!(cache.find(BlockKey { group: 1, ..key(second) }, first, &[2]), None, "another group's");
        assert_eq!(insert(&mut cache, ROOT, &[1], 3), Some(first), "the first one stays");
        assert!(cache.holds(BlockId(2)) && !cache.holds(BlockId(3)));
    }
}
