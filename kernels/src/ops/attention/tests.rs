use super::*;
use crate::Kernels;
use crate::testing::{Random, bits, relative_error};

/// Sequences in a cache whose blocks lie in no order, with garbage in every unused place.
struct Fixture {
    layout: KvLayout,
    heads: usize,
    lengths: Vec<usize>,
    tables: Vec<Vec<u32>>,
    queries: Vec<Vec<f32>>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Fixture {
    fn new(layout: KvLayout, heads: usize, lengths: &[usize]) -> Self {
        let mut random = Random::new(lengths.len() as u64);
        let counts = lengths.iter().map(|length| length.div_ceil(layout.block_tokens));
        let mut free: Vec<u32> = (0..counts.clone().sum::<usize>() as u32).collect();
        let tables = counts.map(|n| (0..n).map(|_| free.swap_remove(random.below(free.len()))).collect()).collect();
        let mut fill =
            |per_token: usize| lengths.iter().map(|&length| random.values(length * per_token, 2.0)).collect::<Vec<_>>();
        let kv = layout.kv_heads * layout.head_dim;
        let (queries, keys, values) = (fill(heads * layout.head_dim), fill(kv), fill(kv));
        Fixture { layout, heads, lengths: lengths.to_vec(), tables, queries, keys, values }
    }

    fn cache(&self) -> KvCache {
        KvCache::new(self.layout, 2, self.tables.iter().map(Vec::len).sum())
    }

    /// Appends and attends for the given ranges of tokens of some sequences, as one call.
    fn step(&self, pool: &Pool, cache: &mut KvCache, parts: &[(usize, Range<usize>)]) -> Vec<Vec<f32>> {
        let rows: Vec<_> = parts
            .iter()
            .map(|(sequence, range)| AttentionRow {
                block_table: &self.tables[*sequence],
                first_position: range.start,
                tokens: range.len(),
            })
            .collect();
        let gather = |of: &[Vec<f32>], per_token: usize| -> Vec<f32> {
            parts.iter().flat_map(|(s, r)| of[*s][r.start * per_token..r.end * per_token].to_vec()).collect()
        };
        let (kv, q) = (self.layout.kv_heads * self.layout.head_dim, self.heads * self.layout.head_dim);
        append_kv(pool, cache, 1, &rows, &gather(&self.keys, kv), &gather(&self.values, kv));
        let queries = gather(&self.queries, q);
        let mut out = vec![f32::NAN; queries.len()];
        paged_attention(pool, cache, 1, self.heads, 0.17, &rows, &queries, &mut out);
        let mut rest = &out[..];
        let mut take = |n: usize| {
            let (head, tail) = rest.split_at(n);
            rest = tail;
            head.to_vec()
        };
        parts.iter().map(|(_, range)| take(range.len() * q)).collect()
    }

    fn whole(&self, pool: &Pool) -> Vec<Vec<f32>> {
        let all: Vec<_> = self.lengths.iter().map(|&length| 0..length).enumerate().collect();
        self.step(pool, &mut self.cache(), &all)
    }

    /// Token by token in f64.
    fn reference(&self, sequence: usize) -> Vec<f64> {
        let dim = self.layout.head_dim;
        let (kv, q) = (self.layout.kv_heads * dim, self.heads * dim);
        let round = |x: f32| half::bf16::from_f32(x).to_f64();
        let mut out = Vec::new();
        for position in 0..self.lengths[sequence] {
            for head in 0..self.heads {
                let kv_head = head / (self.heads / self.layout.kv_heads);
                let query = &self.queries[sequence][position * q + head * dim..][..dim];
                let at = |p: usize| p * kv + kv_head * dim..p * kv + kv_head * dim + dim;
                let dot = |key: &[f32]| query.iter().zip(key).map(|(&q, &k)| f64::from(q) * round(k)).sum::<f64>();
                let scores: Vec<f64> = (0..=position).map(|p| 0.17 * dot(&self.keys[sequence][at(p)])).collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                let mut sums = vec![0.0; dim];
                for (p, weight) in weights.iter().enumerate() {
                    let value = &self.values[sequence][at(p)];
                    sums.iter_mut().zip(value).for_each(|(sum, &v)| *sum += weight / total * round(v));
                }
                out.extend(sums);
            }
        }
        out
    }
}

fn layouts() -> [(KvLayout, usize); 5] {
    let layout = |block_tokens, kv_heads, head_dim| KvLayout { block_tokens, kv_heads, head_dim };
    [
        (layout(16, 3, 64), 9),
        (layout(64, 1, 128), 1),
        (layout(5, 2, 80), 16),
        (layout(32, 2, 6), 2),
        (layout(1, 1, 24), 60),
    ]
}

#[test]
fn matches_the_reference_in_every_set() {
    for (layout, heads) in layouts() {
        let fixture = Fixture::new(layout, heads, &[1, 65, 130]);
        let references: Vec<_> = (0..3).map(|sequence| fixture.reference(sequence)).collect();
        let mut first: Option<Vec<Vec<f32>>> = None;
        for kernels in Kernels::available() {
            let out = fixture.whole(&Pool::with_kernels(2, kernels).unwrap());
            for (out, reference) in out.iter().zip(&references) {
                let error = relative_error(out, reference);
                assert!(error < 1e-6, "{} {layout:?}: {error:e}", kernels.name());
            }
            assert_eq!(*first.get_or_insert(out.clone()), out, "{} {layout:?}", kernels.name());
        }
    }
}

#[test]
fn chunks_batches_and_threads_change_no_bit() {
    for (layout, heads) in layouts() {
        let fixture = Fixture::new(layout, heads, &[200, 77, 130]);
        let expected = fixture.whole(&Pool::new(1).unwrap());
        for threads in [1, 3] {
            let pool = Pool::new(threads).unwrap();
            let mut random = Random::new(threads as u64);
            let mut cache = fixture.cache();
            let mut done = vec![0; 3];
            let mut out = vec![Vec::new(); 3];
            while done != fixture.lengths {
                let mut parts = Vec::new();
                for sequence in 0..3 {
                    let left = fixture.lengths[sequence] - done[sequence];
                    let tokens = [0, 1, 1, 7, 40][random.below(5)].min(left);
                    if tokens > 0 {
                        parts.push((sequence, done[sequence]..done[sequence] + tokens));
                        done[sequence] += tokens;
                    }
                }
                for ((sequence, _), rows) in parts.clone().into_iter().zip(fixture.step(&pool, &mut cache, &parts)) {
                    out[sequence].extend(rows);
                }
            }
            for sequence in 0..3 {
                assert_eq!(bits(&expected[sequence]), bits(&out[sequence]), "{layout:?} on {threads} threads");
            }
        }
    }
}

#[test]
fn layers_and_sequences_do_not_mix() {
    let (layout, heads) = layouts()[0];
    let fixture = Fixture::new(layout, heads, &[40, 40]);
    let pool = Pool::new(1).unwrap();
    let mut cache = fixture.cache();
    let both = fixture.step(&pool, &mut cache, &[(0, 0..40), (1, 0..40)]);
    let alone = fixture.step(&pool, &mut fixture.cache(), &[(1, 0..40)]);
    assert_eq!(both[1], alone[0]);
    assert!(cache.layer(0).iter().all(|value| *value == half::bf16::ZERO), "layer 0 was not written");
}

#[test]
#[should_panic(expected = "2 of 3 blocks in a table")]
fn a_short_block_table_is_refused() {
    let layout = KvLayout { block_tokens: 16, kv_heads: 1, head_dim: 16 };
    let mut cache = KvCache::new(layout, 1, 4);
    let row = AttentionRow { block_table: &[0, 1], first_position: 32, tokens: 1 };
    append_kv(&Pool::new(1).unwrap(), &mut cache, 0, &[row], &[0.0; 16], &[0.0; 16]);
}
