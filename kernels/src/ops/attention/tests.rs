use super::*;
use crate::testing::{Random, bits, relative_error};
use crate::{Kernels, KvType};

/// Sequences in a cache whose blocks lie in no order, with garbage in every unused place.
struct Fixture {
    layout: KvLayout,
    heads: usize,
    scoring: Scoring,
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
        let (scoring, lengths) = (Scoring::scaled(0.17), lengths.to_vec());
        Fixture { layout, heads, scoring, lengths, tables, queries, keys, values }
    }

    fn cache(&self, kind: KvType) -> KvCache {
        KvCache::new(self.layout, kind, 2, self.tables.iter().map(Vec::len).sum())
    }

    /// Appends and attends for the given ranges of tokens of some sequences, as one call.
    fn step(&self, pool: &Pool, cache: &mut KvCache, parts: &[(usize, Range<usize>)]) -> Vec<Vec<f32>> {
        let rows: Vec<_> = parts
            .iter()
            .map(|(sequence, range)| AttentionRow {
                block_table: &self.tables[*sequence],
                first_position: range.start,
                tokens: range.len(),
                seen: &[],
            })
            .collect();
        let gather = |of: &[Vec<f32>], per_token: usize| -> Vec<f32> {
            parts.iter().flat_map(|(s, r)| of[*s][r.start * per_token..r.end * per_token].to_vec()).collect()
        };
        let (kv, q) = (self.layout.kv_heads * self.layout.head_dim, self.heads * self.layout.head_dim);
        append_kv(pool, cache, 1, &rows, &gather(&self.keys, kv), &gather(&self.values, kv));
        let queries = gather(&self.queries, q);
        let mut out = vec![f32::NAN; queries.len()];
        paged_attention(pool, cache, 1, self.heads, self.scoring, &rows, &queries, &mut out);
        let mut rest = &out[..];
        let mut take = |n: usize| {
            let (head, tail) = rest.split_at(n);
            rest = tail;
            head.to_vec()
        };
        parts.iter().map(|(_, range)| take(range.len() * q)).collect()
    }

    fn whole(&self, pool: &Pool, kind: KvType) -> Vec<Vec<f32>> {
        let all: Vec<_> = self.lengths.iter().map(|&length| 0..length).enumerate().collect();
        self.step(pool, &mut self.cache(kind), &all)
    }

    /// Token by token in f64, over keys and values rounded as `kind` does.
    fn reference(&self, sequence: usize, kind: KvType) -> Vec<f64> {
        let dim = self.layout.head_dim;
        let (kv, q) = (self.layout.kv_heads * dim, self.heads * dim);
        let [keys, values] = [&self.keys, &self.values].map(|of| rounded(&of[sequence], dim, kind));
        let mut out = Vec::new();
        for position in 0..self.lengths[sequence] {
            for head in 0..self.heads {
                let kv_head = head / (self.heads / self.layout.kv_heads);
                let query = &self.queries[sequence][position * q + head * dim..][..dim];
                let at = |p: usize| p * kv + kv_head * dim..p * kv + kv_head * dim + dim;
                let dot = |key: &[f64]| query.iter().zip(key).map(|(&q, k)| f64::from(q) * k).sum::<f64>();
                let Scoring { scale, soft_cap, window } = self.scoring;
                let bend = |score: f64| soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
                let seen = |p: usize| window.is_none_or(|window| p + window > position);
                let score = |p: usize| if seen(p) { bend(f64::from(scale) * dot(&keys[at(p)])) } else { f64::MIN };
                let scores: Vec<f64> = (0..=position).map(score).collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                let mut sums = vec![0.0; dim];
                for (p, weight) in weights.iter().enumerate() {
                    sums.iter_mut().zip(&values[at(p)]).for_each(|(sum, v)| *sum += weight / total * v);
                }
                out.extend(sums);
            }
        }
        out
    }
}

const KINDS: [KvType; 5] = KvType::ALL;

/// What the cache holds of `values`, rows of `dim`.
fn rounded(values: &[f32], dim: usize, kind: KvType) -> Vec<f64> {
    let row = |row: &[f32]| -> Vec<f64> {
        let extreme = row.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap();
        let code = |value: f32, scale: f32| f64::from((value * (1.0 / scale)).round_ties_even());
        let round = |&value: &f32| match kind {
            KvType::Bf16 => half::bf16::from_f32(value).to_f64(),
            KvType::F16 => half::f16::from_f32(value).to_f64(),
            KvType::Fp8 => e4m3_nearest(f64::from(value * (448.0 / extreme.abs()))) * f64::from(extreme.abs()) / 448.0,
            KvType::Int8 => code(value, extreme.abs() / 127.0) * f64::from(extreme.abs() / 127.0),
            KvType::Int4 => code(value, -extreme / 8.0).min(7.0) * f64::from(-extreme / 8.0),
        };
        row.iter().map(round).collect()
    };
    values.chunks(dim).flat_map(row).collect()
}

/// The e4m3 number (Micikevicius et al. 2022) next to `value`.
fn e4m3_nearest(value: f64) -> f64 {
    let number = |code: i32| match (code >> 3, f64::from(code & 7)) {
        (0, mantissa) => mantissa / 512.0,
        (exponent, mantissa) => (1.0 + mantissa / 8.0) * f64::from(exponent - 7).exp2(),
    };
    let off = |code: &i32| (number(*code) - value.abs()).abs();
    let even_first = (0..0x7f).step_by(2).chain((1..0x7f).step_by(2));
    let nearest = even_first.min_by(|a, b| off(a).total_cmp(&off(b))).unwrap();
    number(nearest).copysign(value)
}

/// How far results may lie from the reference: a value in the middle of two codes may go either way.
fn tolerance(kind: KvType) -> f64 {
    match kind {
        KvType::Bf16 | KvType::F16 => 3e-6,
        KvType::Fp8 | KvType::Int8 | KvType::Int4 => 1e-3,
    }
}

fn layouts() -> [(KvLayout, usize); 5] {
    let layout = |block_tokens, kv_heads, head_dim| KvLayout { block_tokens, kv_heads, head_dim };
    [
        (layout(16, 3, 64), 9),
        (layout(64, 1, 128), 1),
        (layout(48, 2, 80), 16),
        (layout(32, 2, 6), 2),
        (layout(16, 1, 24), 60),
    ]
}

#[test]
fn matches_the_reference_in_every_set() {
    for ((layout, heads), kind) in layouts().into_iter().flat_map(|layout| KINDS.map(|kind| (layout, kind))) {
        let fixture = Fixture::new(layout, heads, &[1, 65, 130]);
        let references: Vec<_> = (0..3).map(|sequence| fixture.reference(sequence, kind)).collect();
        let mut first: Option<Vec<Vec<f32>>> = None;
        for kernels in Kernels::available() {
            let out = fixture.whole(&Pool::with_kernels(2, kernels).unwrap(), kind);
            for (out, reference) in out.iter().zip(&references) {
                let error = relative_error(out, reference);
                assert!(error < tolerance(kind), "{} {layout:?} {kind:?}: {error:e}", kernels.name());
            }
            assert_eq!(*first.get_or_insert(out.clone()), out, "{} {layout:?} {kind:?}", kernels.name());
        }
    }
}

/// The last queries of a long sequence, alone: few items with many keys, whose spans are computed apart.
#[test]
fn spans_computed_apart_match_the_reference_and_change_no_bit() {
    let layout = KvLayout { block_tokens: 16, kv_heads: 1, head_dim: 24 };
    let length = 2 * SPAN_KEYS + 100;
    let fixture = Fixture::new(layout, 2, &[length]);
    for kind in [KvType::Bf16, KvType::Int8] {
        let last = 2 * 24 * (length - 1);
        let reference = fixture.reference(0, kind)[last..].to_vec();
        let expected = fixture.whole(&Pool::new(1).unwrap(), kind)[0][last..].to_vec();
        assert!(relative_error(&expected, &reference) < tolerance(kind), "{kind:?}");
        for (kernels, threads) in Kernels::available().into_iter().flat_map(|kernels| [(kernels, 1), (kernels, 5)]) {
            let pool = Pool::with_kernels(threads, kernels).unwrap();
            let mut cache = fixture.cache(kind);
            fixture.step(&pool, &mut cache, &[(0, 0..length - 1)]);
            let alone = fixture.step(&pool, &mut cache, &[(0, length - 1..length)]);
            assert_eq!(bits(&expected), bits(&alone[0]), "{kind:?} {} {threads}", kernels.name());
        }
    }
}

const WINDOWED: Scoring = Scoring { scale: 0.17, soft_cap: Some(2.0), window: Some(70) };

#[test]
fn windows_and_caps_match_the_reference_in_every_set() {
    let kinds = KINDS.map(|kind| (layouts()[3], kind));
    for ((layout, heads), kind) in layouts().map(|layout| (layout, KvType::Bf16)).into_iter().chain(kinds) {
        for window in [None, Some(1), Some(64), Some(70), Some(500)] {
            let plain = Fixture::new(layout, heads, &[1, 230]);
            let fixture = Fixture { scoring: Scoring { window, ..WINDOWED }, ..plain };
            let references: Vec<_> = (0..2).map(|sequence| fixture.reference(sequence, kind)).collect();
            for kernels in Kernels::available() {
                let out = fixture.whole(&Pool::with_kernels(2, kernels).unwrap(), kind);
                for (out, reference) in out.iter().zip(&references) {
                    let error = relative_error(out, reference);
                    assert!(error < tolerance(kind), "{} {layout:?} {window:?} {kind:?}: {error:e}", kernels.name());
                }
            }
        }
    }
}

/// A window's first key lies in the middle of a span, and what lies before it may have been given to others.
#[test]
fn long_windows_compute_spans_apart_and_read_nothing_before_them() {
    let layout = KvLayout { block_tokens: 16, kv_heads: 1, head_dim: 24 };
    let length = 3 * SPAN_KEYS + 100;
    let plain = Fixture::new(layout, 2, &[length]);
    let fixture = Fixture { scoring: Scoring { window: Some(SPAN_KEYS + 300), ..WINDOWED }, ..plain };
    let last = 2 * 24 * (length - 1);
    let reference = fixture.reference(0, KvType::Bf16)[last..].to_vec();
    let mut first: Option<Vec<u32>> = None;
    for threads in [1, 5] {
        let pool = Pool::new(threads).unwrap();
        let mut cache = fixture.cache(KvType::Bf16);
        fixture.step(&pool, &mut cache, &[(0, 0..length - 1)]);
        let unread = (length - SPAN_KEYS - 300) / TILE_KEYS * TILE_KEYS / layout.block_tokens;
        for &block in &fixture.tables[0][..unread] {
            // No numbers.
            cache.block_bytes_mut(block as usize).into_iter().for_each(|part| part.fill(0xff));
        }
        let alone = fixture.step(&pool, &mut cache, &[(0, length - 1..length)]);
        assert!(relative_error(&alone[0], &reference) < 3e-6, "{threads}");
        assert_eq!(*first.get_or_insert(bits(&alone[0])), bits(&alone[0]), "{threads}");
    }
}

#[test]
fn chunks_batches_and_threads_change_no_bit() {
    for ((layout, heads), kind) in layouts().into_iter().flat_map(|layout| KINDS.map(|kind| (layout, kind))) {
        chunks_batches_and_threads(Fixture::new(layout, heads, &[200, 77, 130]), kind);
    }
    let (layout, heads) = layouts()[0];
    chunks_batches_and_threads(
        Fixture { scoring: WINDOWED, ..Fixture::new(layout, heads, &[200, 77, 130]) },
        KvType::Bf16,
    );
}

fn chunks_batches_and_threads(fixture: Fixture, kind: KvType) {
    let expected = fixture.whole(&Pool::new(1).unwrap(), kind);
    for threads in [1, 3] {
        let pool = Pool::new(threads).unwrap();
        let mut random = Random::new(threads as u64);
        let mut cache = fixture.cache(kind);
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
            let layout = fixture.layout;
            assert_eq!(bits(&expected[sequence]), bits(&out[sequence]), "{layout:?} {kind:?} on {threads} threads");
        }
    }
}

#[test]
fn layers_and_sequences_do_not_mix() {
    let (layout, heads) = layouts()[0];
    let fixture = Fixture::new(layout, heads, &[40, 40]);
    let pool = Pool::new(1).unwrap();
    let mut cache = fixture.cache(KvType::Bf16);
    let both = fixture.step(&pool, &mut cache, &[(0, 0..40), (1, 0..40)]);
    let alone = fixture.step(&pool, &mut fixture.cache(KvType::Bf16), &[(1, 0..40)]);
    assert_eq!(both[1], alone[0]);
    for block in 0..cache.blocks() {
        let cells = cache.block_bytes(block)[0];
        assert!(cells[..cells.len() / 2].iter().all(|byte| *byte == 0), "layer 0 was not written");
    }
}

#[test]
#[should_panic(expected = "2 of 3 blocks in a table")]
fn a_short_block_table_is_refused() {
    let layout = KvLayout { block_tokens: 16, kv_heads: 1, head_dim: 16 };
    let mut cache = KvCache::new(layout, KvType::Bf16, 1, 4);
    let row = AttentionRow { block_table: &[0, 1], first_position: 32, tokens: 1, seen: &[] };
    append_kv(&Pool::new(1).unwrap(), &mut cache, 0, &[row], &[0.0; 16], &[0.0; 16]);
}

/// Guesses 0 and 1 follow the text, 2 and 3 follow 0, 4 follows 3, 5 follows 1.
const PARENTS: [Option<usize>; 6] = [None, None, Some(0), Some(0), Some(3), Some(1)];

fn path(guess: usize) -> Vec<usize> {
    let mut path = PARENTS[guess].map_or_else(Vec::new, path);
    path.push(guess);
    path
}

#[test]
fn a_guess_in_a_tree_sees_the_text_and_the_guesses_before_it() {
    let pool = Pool::new(2).unwrap();
    let places = [(1, layouts()[0]), (61, layouts()[1]), (64, layouts()[2]), (1100, layouts()[0])];
    for (text, (layout, heads)) in places {
        let kinds = KINDS.map(|kind| (kind, None));
        for (kind, window) in [2, 3, 67].map(|window| (KvType::Bf16, Some(window))).into_iter().chain(kinds) {
            let plain = Fixture::new(layout, heads, &[text + PARENTS.len()]);
            let fixture = Fixture { scoring: Scoring { window, ..plain.scoring }, ..plain };
            let mut cache = fixture.cache(kind);
            fixture.step(&pool, &mut cache, &[(0, 0..text)]);
            let bits = |guess| path(guess).into_iter().fold(0, |seen, guess| seen | 1 << guess);
            let seen: Vec<u64> = (0..PARENTS.len()).map(bits).collect();
            let tree = fixture.tree(&pool, &mut cache, text, &seen);
            for (guess, found) in tree.iter().enumerate() {
                let expected = fixture.along(&pool, kind, text, &path(guess));
                // Weights for integers are rounded to 16 bits together with those of their tile, which is another one.
                let bound = if kind == KvType::Int8 { 2.0 / 32768.0 } else { 1e-5 };
                for (found, expected) in found.iter().zip(&expected) {
                    assert!(
                        (found - expected).abs() < bound,
                        "guess {guess} behind {text}, {window:?}: {found}, not {expected}"
                    );
                }
            }
        }
    }
}

impl Fixture {
    /// The last tokens of the first sequence as guesses behind `text` others.
    fn tree(&self, pool: &Pool, cache: &mut KvCache, text: usize, seen: &[u64]) -> Vec<Vec<f32>> {
        let row = AttentionRow { block_table: &self.tables[0], first_position: text, tokens: seen.len(), seen };
        let (kv, q) = (self.layout.kv_heads * self.layout.head_dim, self.heads * self.layout.head_dim);
        append_kv(pool, cache, 1, &[row], &self.keys[0][text * kv..], &self.values[0][text * kv..]);
        let mut out = vec![f32::NAN; seen.len() * q];
        paged_attention(pool, cache, 1, self.heads, self.scoring, &[row], &self.queries[0][text * q..], &mut out);
        out.chunks(q).map(<[f32]>::to_vec).collect()
    }

    /// The result of the last of these guesses where they follow the text one after the other.
    fn along(&self, pool: &Pool, kind: KvType, text: usize, path: &[usize]) -> Vec<f32> {
        let pick = |of: &[f32], per_token: usize| {
            let tokens = (0..text).chain(path.iter().map(|guess| text + guess));
            tokens.flat_map(|token| of[token * per_token..(token + 1) * per_token].to_vec()).collect::<Vec<f32>>()
        };
        let (kv, q) = (self.layout.kv_heads * self.layout.head_dim, self.heads * self.layout.head_dim);
        let (queries, keys, values) = (pick(&self.queries[0], q), pick(&self.keys[0], kv), pick(&self.values[0], kv));
        let (lengths, tables) = (vec![text + path.len()], self.tables.clone());
        let chain =
            Fixture { lengths, tables, queries: vec![queries], keys: vec![keys], values: vec![values], ..*self };
        chain.whole(pool, kind).remove(0).split_off((text + path.len() - 1) * q)
    }
}

#[test]
fn a_moved_token_is_found_at_its_new_place() {
    let pool = Pool::new(1).unwrap();
    let (layout, heads) = layouts()[0];
    for kind in KINDS {
        let fixture = Fixture::new(layout, heads, &[21]);
        let mut cache = fixture.cache(kind);
        fixture.step(&pool, &mut cache, &[(0, 0..20)]);
        let place =
            |token: usize| (fixture.tables[0][token / layout.block_tokens] as usize, token % layout.block_tokens);
        let expected = fixture.step(&pool, &mut cache, &[(0, 20..21)]);
        let saved: Vec<Vec<Vec<u8>>> = (0..cache.blocks())
            .map(|block| cache.block_bytes(block).into_iter().map(<[u8]>::to_vec).collect())
            .collect();
        let mut copy = fixture.cache(kind);
        for (block, parts) in saved.iter().enumerate() {
            copy.block_bytes_mut(block).into_iter().zip(parts).for_each(|(to, from)| to.copy_from_slice(from));
        }
        assert_eq!(
            fixture.step(&pool, &mut copy, &[(0, 20..21)]),
            fixture.step(&pool, &mut cache, &[(0, 20..21)]),
            "blocks that were carried elsewhere"
        );
        cache.move_token(place(3), place(20));
        let other = fixture.step(&pool, &mut fixture.cache(kind), &[(0, 0..21)]);
        assert_eq!(other[0][20 * heads * layout.head_dim..], expected[0]);
        cache.move_token(place(20), place(3));
        assert_eq!(fixture.step(&pool, &mut cache, &[(0, 20..21)]), expected);
        cache.move_token(place(4), place(3));
        assert_ne!(fixture.step(&pool, &mut cache, &[(0, 20..21)]), expected);
    }
}
