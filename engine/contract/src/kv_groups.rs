//! How a decoder's layers share the blocks of the KV cache.
//!
//! A block holds the keys and values of a run of tokens in the layers of one group, and a sequence has a table of blocks
//! for each group. Groups have equally many layers, so that any block of the pool serves any of them. Layers that read a
//! whole sequence and layers that read a window of it are in different groups: the latter give up what has fallen out of
//! the window. (vLLM's hybrid KV cache manager divides layers alike.)

use crate::shape::{ModelShape, WindowedLayers};

/// Attention reads keys in tiles of so many tokens, on every device: the one in which a window begins is read whole.
pub const READ_TILE_TOKENS: u32 = 64;
/// Most groups: every row of a step names the blocks of each.
const MAX_GROUPS: u32 = 8;

/// The groups of a decoder's layers: first those that read everything, then those that read a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroups {
    /// Groups whose layers read every token of a sequence.
    pub full: u32,
    /// Groups whose layers read the end of a sequence alone.
    pub windowed: u32,
    /// Tokens at the end of a sequence, the one that is computed among them, before which windowed groups read nothing.
    pub read_back_tokens: u32,
}

impl KvGroups {
    /// All layers in one group that reads everything.
    pub const ONE: KvGroups = KvGroups { full: 1, windowed: 0, read_back_tokens: 0 };

    /// All layers in one group that reads the end of a sequence alone.
    pub const fn one_windowed(read_back_tokens: u32) -> KvGroups {
        KvGroups { full: 0, windowed: 1, read_back_tokens }
    }

    /// One group of all layers, which reads everything if one of them does.
    pub fn undivided(shape: &ModelShape) -> KvGroups {
        match shape.windowed.filter(|windowed| windowed.layers == shape.layers) {
            Some(windowed) => KvGroups::one_windowed(windowed.read_back_tokens()),
            None => KvGroups::ONE,
        }
    }

    /// The groups that take least for a sequence of `longest` tokens; of equals the fewest.
    pub fn of(shape: &ModelShape, longest: u32) -> KvGroups {
        let undivided = KvGroups::undivided(shape);
        let Some(windowed) = shape.windowed.filter(|windowed| windowed.layers < shape.layers) else { return undivided };
        let divided = |layers: u32| KvGroups {
            full: (shape.layers - windowed.layers).div_ceil(layers),
            windowed: windowed.layers.div_ceil(layers),
            read_back_tokens: windowed.read_back_tokens(),
        };
        let ways = (1..shape.layers).map(divided).filter(|way| way.count() <= MAX_GROUPS);
        let cost = |way: &KvGroups| (u64::from(way.layers(shape)) * way.sequence_tokens(longest.into()), way.count());
        [undivided].into_iter().chain(ways).min_by_key(cost).unwrap_or(undivided)
    }

    /// Groups there are.
    pub const fn count(&self) -> u32 {
        self.full + self.windowed
    }

    /// Of what a group reads, the tokens at the end of a sequence; absent where it reads everything.
    pub fn read_back(&self, group: u32) -> Option<u32> {
        (group >= self.full).then_some(self.read_back_tokens)
    }

    /// Layers that a block has room for.
    pub fn layers(&self, shape: &ModelShape) -> u32 {
        let windowed = shape.windowed.map_or(0, |windowed| windowed.layers);
        self.layers_of(shape.layers - windowed.min(shape.layers), windowed)
    }

    /// The same of a decoder with so many layers that read everything, and so many that read a window.
    pub fn layers_of(&self, full: u32, windowed: u32) -> u32 {
        match self.count() {
            1 => full + windowed,
            _ => full.div_ceil(self.full.max(1)).max(windowed.div_ceil(self.windowed.max(1))),
        }
    }

    /// Tokens that a sequence holds blocks for, in all groups together.
    pub fn sequence_tokens(&self, tokens: u64) -> u64 {
        u64::from(self.full) * tokens + u64::from(self.windowed) * tokens.min(self.read_back_tokens.into())
    }

    /// Blocks that a sequence needs to be computed up to `tokens` tokens.
    pub fn sequence_blocks(&self, tokens: u64, block_tokens: u32) -> u64 {
        let blocks = tokens.div_ceil(u64::from(block_tokens.max(1)));
        u64::from(self.full) * blocks + u64::from(self.windowed) * blocks.min(self.window_blocks(block_tokens))
    }

    /// Tokens of the longest sequence that `blocks` blocks hold; no bound where windows fit and nothing else is kept.
    pub fn longest_tokens(&self, blocks: u64, block_tokens: u32) -> u64 {
        let [full, windowed, window] = [self.full.into(), self.windowed.into(), self.window_blocks(block_tokens)];
        let alike = blocks / (full + windowed).max(1);
        let held = match alike < window || windowed == 0 {
            true => alike,
            false => (blocks - windowed * window).checked_div(full).unwrap_or(u64::MAX),
        };
        held.saturating_mul(block_tokens.into())
    }

    /// The most blocks of a group that are read at once: a window may begin and end within one.
    fn window_blocks(&self, block_tokens: u32) -> u64 {
        u64::from(self.read_back_tokens.div_ceil(block_tokens.max(1))) + 1
    }
}

impl WindowedLayers {
    /// Tokens at the end of a sequence that these layers read.
    pub fn read_back_tokens(&self) -> u32 {
        self.tokens.saturating_add(READ_TILE_TOKENS - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::llama_8b;

    fn shape(full: u32, windowed: u32, tokens: u32) -> ModelShape {
        let layers = full + windowed;
        ModelShape { layers, windowed: Some(WindowedLayers { layers: windowed, tokens }), ..llama_8b() }
    }

    /// Groups, and layers of each, of published models.
    #[test]
    fn layers_are_divided_so_that_a_long_sequence_takes_least() {
        for (name, full, windowed, window, longest, groups, layers) in [
            ("Gemma 2 9B", 21, 21, 4096, 8192, (1, 1), 21),
            ("Gemma 3 1B", 4, 22, 512, 32_768, (1, 6), 4),
            ("Gemma 3 4B", 5, 29, 1024, 131_072, (1, 6), 5),
            ("Gemma 3 12B", 8, 40, 1024, 131_072, (1, 5), 8),
            ("Command R7B", 8, 24, 4096, 131_072, (1, 3), 8),
            ("Ministral 8B", 9, 27, 32_768, 131_072, (1, 3), 9),
            ("gpt-oss 20B", 12, 12, 128, 131_072, (1, 1), 12),
            ("Gemma 3 4B within its window", 5, 29, 1024, 1000, (1, 0), 34),
            ("few windows", 27, 1, 1024, 131_072, (3, 1), 9),
        ] {
            let shape = shape(full, windowed, window);
            let divided = KvGroups::of(&shape, longest);
            assert_eq!(((divided.full, divided.windowed), divided.layers(&shape)), (groups, layers), "{name}");
        }
        assert_eq!(KvGroups::of(&llama_8b(), 1000), KvGroups::ONE);
        assert_eq!(KvGroups::of(&shape(0, 32, 100), 1000), KvGroups::one_windowed(163));
        assert_eq!((KvGroups::ONE.layers(&llama_8b()), KvGroups::undivided(&shape(5, 29, 9))), (32, KvGroups::ONE));
    }

    #[test]
    fn no_division_takes_more_than_none() {
        for (full, windowed) in (1..40).flat_map(|full| (1..40).map(move |windowed| (full, windowed))) {
            let shape = shape(full, windowed, 512);
            for longest in [100, 1000, 100_000] {
                let divided = KvGroups::of(&shape, longest);
                let taken = u64::from(divided.layers(&shape)) * divided.sequence_tokens(longest.into());
                assert!(taken <= u64::from(shape.layers * longest), "{full} and {windowed} layers, {longest} tokens");
                assert!(divided.count() <= MAX_GROUPS && divided.full > 0);
            }
        }
    }

    #[test]
    fn a_sequence_is_as_long_as_its_blocks_allow() {
        let mixed = KvGroups { full: 2, windowed: 3, read_back_tokens: 20 };
        for groups in [KvGroups::ONE, KvGroups::one_windowed(20), mixed] {
            for blocks in 1..100 {
                let longest = groups.longest_tokens(blocks, 16).min(10_000);
                assert!(groups.sequence_blocks(longest, 16) <= blocks, "{groups:?} {blocks}");
                let beyond = groups.sequence_blocks(longest + 1, 16);
                assert!(beyond > blocks || longest == 10_000, "{groups:?} {blocks}: {longest} tokens");
            }
        }
        assert_eq!(mixed.sequence_blocks(1000, 16), 2 * 63 + 3 * 3);
    }
}
