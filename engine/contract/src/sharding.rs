//! How a decoder is divided among the ranks of a tensor-parallel group (Shoeybi et al., "Megatron-LM", 2019): whole
//! heads, a run of the feed-forward block's columns, and a run of the vocabulary for each.
//!
//! A rank computes its heads and its columns alone; after the attention's output and after the feed-forward block the
//! ranks add up what they have. Norms are on every rank. A mixture's experts are divided each, or among the ranks as they
//! are (Lepikhin et al., "GShard", 2020): then a rank has a run of them whole.

use std::fmt;
use std::ops::Range;

use crate::shape::ModelShape;

/// What one rank holds, as ranges of the whole decoder's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which rank, from 0.
    pub rank: u32,
    /// Ranks in the group.
    pub ranks: u32,
    /// Query heads.
    pub heads: Range<u32>,
    /// Key and value heads. With more ranks than those, several ranks hold the same one.
    pub kv_heads: Range<u32>,
    /// Columns of the feed-forward block, unless that is a mixture of whole experts.
    pub feed_forward: Range<u32>,
    /// Columns that stay together.
    pub feed_forward_unit: u32,
    /// Experts that it holds whole; absent where it holds columns of each.
    pub experts: Option<Range<u32>>,
    /// Tokens whose embeddings and logits it holds.
    pub vocabulary: Range<u32>,
}

/// Why a decoder cannot be divided among so many ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Indivisible {
    /// Its heads cannot.
    Heads {
        /// Query heads.
        heads: u32,
        /// Key and value heads.
        kv_heads: u32,
        /// Ranks asked for.
        ranks: u32,
    },
    /// Something else has too few parts for each rank to get one.
    Parts {
        /// What is divided.
        what: &'static str,
        /// Its parts.
        parts: u32,
        /// Ranks asked for.
        ranks: u32,
    },
    /// Nothing would be left for one of two stages.
    Split {
        /// Its layers.
        layers: u32,
        /// Layers asked for of the last stage.
        last_layers: u32,
    },
}

impl Shard {
    /// What each of `ranks` ranks holds. Columns of the feed-forward block stay together in units of
    /// `feed_forward_unit`: the blocks in which its weights are quantized. Of a mixture with so many `whole_experts` each
    /// has a run.
    pub fn all(
        shape: &ModelShape,
        ranks: u32,
        feed_forward_unit: u32,
        whole_experts: Option<u32>,
    ) -> Result<Vec<Shard>, Indivisible> {
        let ModelShape { heads, kv_heads, feed_forward, vocabulary, .. } = *shape;
        if !divides(ranks, heads, kv_heads) {
            return Err(Indivisible::Heads { heads, kv_heads, ranks });
        }
        let feed_forward_unit = feed_forward_unit.max(1);
        let columns_or_experts = match whole_experts {
            None => ("blocks of feed-forward columns", feed_forward / feed_forward_unit),
            Some(experts) => ("experts", experts),
        };
        for (what, parts) in [columns_or_experts, ("tokens of the vocabulary", vocabulary)] {
            if parts < ranks {
                return Err(Indivisible::Parts { what, parts, ranks });
            }
        }
        let shard = |rank: u32| Shard {
            rank,
            ranks,
            heads: run(heads, rank, ranks),
            kv_heads: kv_run(kv_heads, rank, ranks),
            feed_forward: columns(feed_forward, feed_forward_unit, rank, ranks),
            feed_forward_unit,
            experts: whole_experts.map(|experts| run(experts, rank, ranks)),
            vocabulary: run(vocabulary, rank, ranks),
        };
        Ok((0..ranks).map(shard).collect())
    }

    /// The whole decoder on one rank.
    pub fn whole(shape: &ModelShape) -> Shard {
        let ModelShape { heads, kv_heads, feed_forward, vocabulary, .. } = *shape;
        Shard {
            rank: 0,
            ranks: 1,
            heads: 0..heads,
            kv_heads: 0..kv_heads,
            feed_forward: 0..feed_forward,
            feed_forward_unit: 1,
            experts: None,
            vocabulary: 0..vocabulary,
        }
    }

    /// Its columns of another feed-forward block, `width` wide: an expert's. None where there are too few units.
    pub fn columns(&self, width: u32) -> Range<u32> {
        columns(width, self.feed_forward_unit, self.rank, self.ranks)
    }
}

/// A run of a decoder's layers: what one process of a pipeline holds, or one device of two that are unlike. The first one
/// embeds, the last one has the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Which one, from 0.
    pub index: u32,
    /// Stages there are.
    pub count: u32,
    /// Where the second of two begins; absent where each has as many layers as the others.
    border: Option<u32>,
}

impl Stage {
    /// All layers.
    pub const WHOLE: Stage = Stage { index: 0, count: 1, border: None };

    /// Stage `index` of `count`, which must not be more than there are layers.
    pub fn of(index: u32, count: u32, shape: &ModelShape) -> Result<Stage, Indivisible> {
        match count == 0 || index >= count || count > shape.layers {
            true => Err(Indivisible::Parts { what: "layers", parts: shape.layers, ranks: count }),
            false => Ok(Stage { index, count, border: None }),
        }
    }

    /// Two stages, of which the last has so many layers. Each must have one.
    pub fn split(last_layers: u32, shape: &ModelShape) -> Result<[Stage; 2], Indivisible> {
        match shape.layers.checked_sub(last_layers).filter(|first| (1..shape.layers).contains(first)) {
            Some(first) => Ok([0, 1].map(|index| Stage { index, count: 2, border: Some(first) })),
            None => Err(Indivisible::Split { layers: shape.layers, last_layers }),
        }
    }

    /// Its layers, of so many.
    pub fn layers(self, layers: u32) -> Range<u32> {
        match (self.border, self.is_first()) {
            (None, _) => run(layers, self.index, self.count),
            (Some(border), true) => 0..border,
            (Some(border), false) => border..layers,
        }
    }

    /// Whether it embeds tokens.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    /// Whether it gives logits.
    pub fn is_last(self) -> bool {
        self.index + 1 == self.count
    }
}

/// Ranks that hold each key and value head.
pub fn kv_copies(shape: &ModelShape, ranks: u32) -> u32 {
    (ranks / shape.kv_heads.max(1)).max(1)
}

/// Whether `ranks` ranks can hold equally many whole heads, and the key heads that those read.
fn divides(ranks: u32, heads: u32, kv_heads: u32) -> bool {
    ranks > 0 && heads.is_multiple_of(ranks) && (kv_heads.is_multiple_of(ranks) || ranks.is_multiple_of(kv_heads))
}

/// The run of `parts` that belongs to `rank`: all runs together cover them once, and differ by one at most.
fn run(parts: u32, rank: u32, ranks: u32) -> Range<u32> {
    let border = |rank: u32| (u64::from(parts) * u64::from(rank) / u64::from(ranks)) as u32;
    border(rank)..border(rank + 1)
}

/// The same of `width` columns in whole units.
fn columns(width: u32, unit: u32, rank: u32, ranks: u32) -> Range<u32> {
    let units = run(width / unit, rank, ranks);
    units.start * unit..units.end * unit
}

fn kv_run(kv_heads: u32, rank: u32, ranks: u32) -> Range<u32> {
    match kv_heads < ranks {
        true => {
            let head = rank / (ranks / kv_heads);
            head..head + 1
        }
        false => run(kv_heads, rank, ranks),
    }
}

impl fmt::Display for Indivisible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Indivisible::Heads { heads, kv_heads, ranks } => {
                let possible = (1..=heads).filter(|&ranks| divides(ranks, heads, kv_heads));
                let possible: Vec<String> = possible.map(|ranks| ranks.to_string()).collect();
                write!(
                    f,
                    "{heads} query heads and {kv_heads} key-value heads cannot be divided among {ranks} ranks: use {}",
                    possible.join(", ")
                )
            }
            Indivisible::Parts { what, parts, ranks } => write!(f, "{parts} {what} cannot be divided among {ranks}"),
            Indivisible::Split { layers, last_layers } => {
                write!(
                    f,
                    "{layers} layers cannot be divided so that the last stage has {last_layers} and the first some"
                )
            }
        }
    }
}

impl std::error::Error for Indivisible {}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(heads: u32, kv_heads: u32, feed_forward: u32, vocabulary: u32) -> ModelShape {
        ModelShape {
            architecture: "llama".into(),
            layers: 1,
            hidden: 64,
            feed_forward,
            heads,
            kv_heads,
            head_dim: 64,
            vocabulary,
            context_tokens: 64,
            weight_bytes: 0,
            windowed: None,
        }
    }

    fn check_cover(shards: &[Shard], part: impl Fn(&Shard) -> &Range<u32>, end: u32) {
        assert_eq!(part(&shards[0]).start, 0);
        assert_eq!(part(&shards[shards.len() - 1]).end, end);
        assert!(shards.windows(2).all(|pair| part(&pair[0]).end == part(&pair[1]).start), "{shards:?}");
    }

    #[test]
    fn ranks_cover_everything_once_and_read_their_own_key_heads() {
        for (heads, kv_heads, ranks) in
            [(9, 3, 3), (9, 3, 9), (32, 8, 4), (32, 8, 16), (32, 8, 32), (4, 4, 2), (6, 2, 1)]
        {
            let shape = shape(heads, kv_heads, 43 * 256, 32_003);
            let shards = Shard::all(&shape, ranks, 256, None).unwrap();
            assert_eq!(shards.len(), ranks as usize);
            check_cover(&shards, |shard| &shard.heads, heads);
            check_cover(&shards, |shard| &shard.feed_forward, shape.feed_forward);
            check_cover(&shards, |shard| &shard.vocabulary, shape.vocabulary);
            let group = heads / kv_heads;
            for shard in &shards {
                let read = shard.heads.start / group..shard.heads.end.div_ceil(group);
                assert_eq!(shard.kv_heads, read, "{shard:?}");
                assert_eq!(shard.heads.len() % shard.kv_heads.len(), 0, "{shard:?}");
                assert!(shard.feed_forward.start.is_multiple_of(256), "{shard:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_divided_is_refused_with_its_numbers() {
        let refusal = |shape: &ModelShape, ranks| Shard::all(shape, ranks, 256, None).unwrap_err().to_string();
        let smol = shape(9, 3, 1536, 49_152);
        assert_eq!(
            refusal(&smol, 2),
            "9 query heads and 3 key-value heads cannot be divided among 2 ranks: use 1, 3, 9"
        );
        assert!(refusal(&smol, 0).contains("among 0 ranks"));
        // Five divides six heads' count neither as heads nor as copies of key heads.
        assert!(refusal(&shape(30, 6, 8192, 100), 10).contains("use 1, 2, 3, 6, 30"));
        assert_eq!(refusal(&shape(8, 8, 1024, 100), 8), "4 blocks of feed-forward columns cannot be divided among 8");
    }

    #[test]
    fn two_stages_have_all_layers_and_each_has_one_at_least() {
        let shape = ModelShape { layers: 5, ..shape(1, 1, 1, 1) };
        for last in 1..5 {
            let [first, second] = Stage::split(last, &shape).unwrap();
            assert_eq!([first.layers(5), second.layers(5)], [0..5 - last, 5 - last..5]);
            assert_eq!(
                [first.is_first(), first.is_last(), second.is_first(), second.is_last()],
                [true, false, false, true]
            );
        }
        for last in [0, 5, 6] {
            let refusal = Stage::split(last, &shape).unwrap_err().to_string();
            assert!(refusal.starts_with("5 layers") && refusal.contains(&format!("has {last}")), "{refusal}");
        }
    }

    /// Any number of them, whatever columns they have: the first of eight over three ranks has two, the others three.
    #[test]
    fn whole_experts_are_divided_in_runs_that_differ_by_one_at_most() {
        let shape = shape(24, 24, 96, 100);
        for (experts, ranks) in [(8, 3), (8, 8), (128, 6), (7, 4)] {
            let shards = Shard::all(&shape, ranks, 256, Some(experts)).unwrap();
            check_cover(&shards, |shard| shard.experts.as_ref().unwrap(), experts);
            let held: Vec<u32> = shards.iter().map(|shard| shard.experts.as_ref().unwrap().len() as u32).collect();
            assert!(held.iter().all(|held| (experts / ranks..=experts.div_ceil(ranks)).contains(held)), "{held:?}");
        }
        let refusal = Shard::all(&shape, 4, 1, Some(3)).unwrap_err().to_string();
        assert_eq!(refusal, "3 experts cannot be divided among 4");
    }

    #[test]
    fn keys_and_values_of_all_ranks_are_those_of_one_as_often_as_they_are_held() {
        use crate::memory::{KvDataType, kv_bytes_per_token};
        let shape = shape(32, 8, 8192, 1000);
        let per_token = |ranks: u32| -> u64 {
            let shards = Shard::all(&shape, ranks, 1, None).unwrap();
            let part = |shard: &Shard| ModelShape { kv_heads: shard.kv_heads.len() as u32, ..shape.clone() };
            shards.iter().map(|shard| kv_bytes_per_token(&part(shard), KvDataType::Bf16)).sum()
        };
        assert_eq!(per_token(4), per_token(1));
        assert_eq!(per_token(16), per_token(1) * u64::from(kv_copies(&shape, 16)));
        assert_eq!(kv_copies(&shape, 16), 2);
    }
}
