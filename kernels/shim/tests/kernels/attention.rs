use half::bf16;
use windlass_kernels::cuda::ops::{self, AttentionShape, Chunks, DecodeRows, DecodeWork, Heads, Pages};
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{Device, Memory, Stream};

use crate::common::{Random, SEEDS, ampere, device, poisoned, relative_error};

/// Sequences in pages, with queries at the end of each.
pub struct Scene {
    pub shape: AttentionShape,
    /// Keys, and of those new ones with queries.
    pub sequences: Vec<(usize, usize)>,
    pub max_pages: usize,
    pub tables: Vec<u32>,
    pages: Vec<bf16>,
    query: Vec<bf16>,
    /// The pages as codes, and the scale of each token and head, where they are in bytes.
    bytes: Option<(EightBits, Vec<u8>, Vec<f32>)>,
}

/// Pages on a device.
struct Cache {
    pages: Memory<bf16>,
    bytes: Option<(EightBits, Memory<u8>, Memory<f32>)>,
}

impl Cache {
    fn pages(&self) -> Pages<'_> {
        match &self.bytes {
            Some((code, codes, scales)) => Pages::Bytes { code: *code, codes: codes.view(), scales: scales.view() },
            None => Pages::Bf16(self.pages.view()),
        }
    }
}

impl Scene {
    pub fn new(random: &mut Random, shape: AttentionShape, sequences: &[(usize, usize)]) -> Scene {
        let max_pages = sequences.iter().map(|(keys, _)| keys.div_ceil(64)).max().unwrap() + 1;
        let count = sequences.len() * max_pages + 1;
        // Pages in random order; page 0 and what lies behind a sequence's end hold NaNs, which nobody may see.
        let mut order: Vec<u32> = (1..count as u32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, random.below(i + 1));
        }
        let values = shape.heads.page_values();
        let mut pages = vec![bf16::NAN; values];
        pages.extend(random.halves((count - 1) * values, 1.0));
        for (sequence, &(keys, _)) in sequences.iter().enumerate() {
            for key in keys..keys.next_multiple_of(64) {
                let page = order[sequence * max_pages + key / 64] as usize;
                for row in 0..2 * shape.heads.kv_heads {
                    let first = (page * 2 * shape.heads.kv_heads + row) * 64 + key % 64;
                    pages[first * shape.heads.dim..][..shape.heads.dim].fill(bf16::NAN);
                }
            }
        }
        let tokens: usize = sequences.iter().map(|(_, new)| new).sum();
        let query = random.halves(tokens * shape.heads.query_width(), 2.0);
        let (sequences, tables) = (sequences.to_vec(), order);
        Scene { shape, sequences, max_pages, tables, pages, query, bytes: None }
    }

    /// The same with pages in bytes, whose values times scales become the pages that the reference reads. What is nobody's
    /// has a scale that is no number.
    pub fn in_bytes(mut self, random: &mut Random, code: EightBits) -> Scene {
        let dim = self.shape.heads.dim;
        let (mut codes, mut scales) = (vec![0x7f; self.pages.len()], vec![f32::NAN; self.pages.len() / dim]);
        for ((row, codes), scale) in self.pages.chunks_mut(dim).zip(codes.chunks_mut(dim)).zip(&mut scales) {
            if row[0].is_nan() {
                continue;
            }
            // Powers of two: what the reference reads is exact.
            *scale = 2f32.powi(random.below(4) as i32 - 9);
            for (value, byte) in row.iter_mut().zip(codes) {
                *byte = random.below(0x78) as u8 | (random.below(2) as u8) << 7;
                let exact = match code {
                    EightBits::E4m3 => crate::linear::e4m3(*byte),
                    EightBits::Int8 => byte.cast_signed().into(),
                };
                *value = bf16::from_f64(exact * f64::from(*scale));
            }
        }
        self.bytes = Some((code, codes, scales));
        self
    }

    fn cache(&self, device: &Device) -> Cache {
        let upload = |(code, codes, scales): &(EightBits, Vec<u8>, Vec<f32>)| {
            (*code, device.upload(codes).unwrap(), device.upload(scales).unwrap())
        };
        Cache { pages: device.upload(&self.pages).unwrap(), bytes: self.bytes.as_ref().map(upload) }
    }

    fn at(&self, sequence: usize, key: usize, value: bool, head: usize) -> &[bf16] {
        let Heads { kv_heads, dim, .. } = self.shape.heads;
        let page = self.tables[sequence * self.max_pages + key / 64] as usize;
        let row = ((page * 2 + usize::from(value)) * kv_heads + head) * 64 + key % 64;
        &self.pages[row * dim..][..dim]
    }

    pub fn reference(&self) -> Vec<f64> {
        let Heads { heads, kv_heads, dim } = self.shape.heads;
        let mut out = Vec::new();
        let mut queries = self.query.chunks(dim);
        for (sequence, &(keys, new)) in self.sequences.iter().enumerate() {
            for position in keys - new..keys {
                for head in 0..heads {
                    let query = queries.next().unwrap();
                    let first = match self.shape.window as usize {
                        0 => 0,
                        window => (position + 1).saturating_sub(window),
                    };
                    let score = |key: usize| {
                        let key = self.at(sequence, key, false, head / (heads / kv_heads));
                        let dot: f64 = query.iter().zip(key).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
                        let (scaled, cap) = (dot * f64::from(self.shape.scale), f64::from(self.shape.cap));
                        if cap > 0.0 { cap * (scaled / cap).tanh() } else { scaled }
                    };
                    let scores: Vec<f64> = (first..=position).map(score).collect();
                    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    out.extend((0..dim).map(|i| {
                        let values =
                            (first..=position).map(|key| self.at(sequence, key, true, head / (heads / kv_heads))[i]);
                        values.zip(&weights).map(|(value, weight)| f64::from(value) * weight).sum::<f64>() / sum
                    }));
                }
            }
        }
        out
    }

    fn decode(&self, device: &Device, stream: &Stream, splits: usize) -> Vec<bf16> {
        self.decode_sharing(device, stream, splits, &vec![0; self.sequences.len()])
    }

    /// The same where each sequence has so many leading splits in common with the one before.
    pub fn decode_sharing(&self, device: &Device, stream: &Stream, splits: usize, common: &[u32]) -> Vec<bf16> {
        let rows = self.sequences.len();
        let Heads { heads, dim, .. } = self.shape.heads;
        let lengths: Vec<u32> = self.sequences.iter().map(|&(keys, _)| keys as u32).collect();
        let tokens: Vec<u32> = (0..rows as u32).collect();
        let (tables, lengths) = (device.upload(&self.tables).unwrap(), device.upload(&lengths).unwrap());
        let (tokens, query) = (device.upload(&tokens).unwrap(), device.upload(&self.query).unwrap());
        let (common, cache) = (device.upload(common).unwrap(), self.cache(device));
        let mut partial: Memory<f32> = poisoned(device, rows * heads * splits * dim);
        let mut partial_log: Memory<f32> = poisoned(device, rows * heads * splits);
        let mut out = poisoned::<bf16>(device, self.query.len());
        let rows = DecodeRows {
            tables: tables.slice(0..rows * self.max_pages),
            lengths: lengths.view(),
            tokens: tokens.view(),
            common: common.view(),
            splits,
        };
        let work = DecodeWork { partial: partial.view_mut(), partial_log: partial_log.view_mut() };
        ops::attention_decode(stream, &self.shape, rows, query.view(), cache.pages(), work, out.view_mut()).unwrap();
        out.read(stream).unwrap()
    }

    fn prefill(&self, device: &Device, stream: &Stream) -> Vec<bf16> {
        let counts: Vec<u32> = self.sequences.iter().map(|&(_, new)| new as u32).collect();
        let firsts: Vec<u32> = counts.iter().scan(0, |at, count| Some(std::mem::replace(at, *at + count))).collect();
        let positions: Vec<u32> = self.sequences.iter().map(|&(keys, new)| (keys - new) as u32).collect();
        let (tile_sequences, tile_firsts): (Vec<_>, Vec<_>) =
            ops::prefill_tiles(self.shape.heads, &counts).into_iter().unzip();
        let upload = |values: &[u32]| device.upload(values).unwrap();
        let (tables, tile_sequences, tile_firsts) =
            (upload(&self.tables), upload(&tile_sequences), upload(&tile_firsts));
        let (counts, firsts, positions) = (upload(&counts), upload(&firsts), upload(&positions));
        let (query, cache) = (device.upload(&self.query).unwrap(), self.cache(device));
        let mut out = poisoned::<bf16>(device, self.query.len());
        let chunks = Chunks {
            tables: tables.slice(0..self.sequences.len() * self.max_pages),
            tile_sequences: tile_sequences.view(),
            tile_firsts: tile_firsts.view(),
            first_tokens: firsts.view(),
            token_counts: counts.view(),
            first_positions: positions.view(),
        };
        ops::attention_prefill(stream, &self.shape, chunks, query.view(), cache.pages(), out.view_mut()).unwrap();
        out.read(stream).unwrap()
    }
}

pub fn shape(heads: usize, kv_heads: usize, dim: usize) -> AttentionShape {
    let scale = 1.0 / (dim as f32).sqrt();
    AttentionShape { heads: Heads { heads, kv_heads, dim }, scale, window: 0, cap: 0.0 }
}

#[test]
fn decoding_matches_the_reference_over_any_splits() {
    let mut random = Random::new(10);
    for (seed, (shape, lengths)) in SEEDS.into_iter().cycle().zip([
        (shape(9, 3, 64), vec![1, 64, 65, 129]),
        (shape(4, 4, 32), vec![300, 17]),
        (shape(16, 1, 96), vec![131]),
        (shape(8, 2, 128), vec![257, 640]),
        (shape(40, 2, 32), vec![130, 5]),
        (shape(35, 1, 64), vec![70]),
        (shape(2, 1, 64), vec![2049, 3]),
        (shape(4, 2, 8), vec![66]),
        (shape(3, 3, 80), vec![130]),
        (shape(4, 1, 120), vec![90, 1]),
        (shape(8, 4, 256), vec![131, 70]),
        (shape(2, 1, 160), vec![65]),
        (AttentionShape { window: 70, ..shape(2, 1, 64) }, vec![400, 69, 71]),
        (AttentionShape { window: 65, cap: 9.0, ..shape(2, 1, 256) }, vec![200]),
        (AttentionShape { cap: 5.0, ..shape(2, 2, 32) }, vec![100]),
    ]) {
        let (device, stream) = device(seed);
        let sequences: Vec<_> = lengths.iter().map(|&length| (length, 1)).collect();
        let scene = Scene::new(&mut random, shape, &sequences);
        let splits = ops::splits(lengths.iter().copied().max().unwrap());
        let error = relative_error(&scene.decode(&device, &stream, splits), &scene.reference());
        assert!(error <= 5e-3, "{shape:?} of {lengths:?}: {error}");
    }
}

/// A Hopper, or the GPU under test; and an Ampere, which has other kernels for prefill.
fn devices(seed: u64) -> [(Device, Stream); 2] {
    [device(seed), ampere(seed)]
}

#[test]
fn prefill_matches_the_reference_at_any_cut() {
    let mut random = Random::new(11);
    for (seed, (shape, sequences)) in SEEDS.into_iter().cycle().zip([
        (shape(9, 3, 64), vec![(50, 50), (3, 3)]),
        (shape(2, 2, 32), vec![(130, 70), (64, 64)]),
        (shape(2, 1, 96), vec![(100, 1)]),
        (shape(4, 1, 128), vec![(200, 20)]),
        (shape(40, 2, 64), vec![(70, 5)]),
        (shape(2, 1, 16), vec![(70, 66)]),
        (shape(3, 1, 80), vec![(100, 37)]),
        (shape(2, 2, 120), vec![(33, 33)]),
        (shape(4, 2, 256), vec![(90, 40), (5, 5)]),
        (AttentionShape { window: 33, ..shape(2, 1, 64) }, vec![(150, 100)]),
        (AttentionShape { window: 20, cap: 9.0, ..shape(2, 2, 256) }, vec![(130, 70)]),
        (AttentionShape { cap: 5.0, ..shape(1, 1, 32) }, vec![(65, 65)]),
        (AttentionShape { cap: 5.0, ..shape(2, 1, 64) }, vec![(65, 65)]),
    ]) {
        for (device, stream) in devices(seed) {
            let scene = Scene::new(&mut random, shape, &sequences);
            let error = relative_error(&scene.prefill(&device, &stream), &scene.reference());
            assert!(error <= 5e-3, "{shape:?} of {sequences:?}: {error}");
        }
    }
}

/// Steps of 128 keys: none but one, more than there are stages, ends at and beside their borders and those of pages; windows that
/// begin in the former or the latter page of a step, or end in the page that they begin in; one warpgroup, and more than one tile.
#[test]
fn prefill_in_steps_of_pages_matches_the_reference() {
    let mut random = Random::new(20);
    for (seed, (shape, sequences)) in SEEDS.into_iter().cycle().zip([
        (shape(1, 1, 64), vec![(1, 1), (128, 2), (129, 3), (192, 65), (64, 9)]),
        (shape(3, 3, 128), vec![(700, 130), (256, 64), (255, 2)]),
        (shape(7, 1, 128), vec![(400, 40)]),
        (shape(2, 1, 40), vec![(300, 150)]),
        (shape(4, 4, 72), vec![(513, 3)]),
        (AttentionShape { window: 3, ..shape(2, 2, 64) }, vec![(70, 2), (140, 40), (400, 200)]),
        (AttentionShape { window: 64, ..shape(2, 1, 128) }, vec![(450, 90), (192, 1), (193, 1)]),
        (AttentionShape { window: 300, ..shape(1, 1, 128) }, vec![(900, 140)]),
        (AttentionShape { window: 1, ..shape(1, 1, 128) }, vec![(195, 195)]),
    ]) {
        for (device, stream) in devices(seed) {
            let scene = Scene::new(&mut random, shape, &sequences);
            let error = relative_error(&scene.prefill(&device, &stream), &scene.reference());
            assert!(error <= 5e-3, "{shape:?} of {sequences:?}: {error}");
        }
    }
}

#[test]
fn a_token_of_a_prompt_gives_the_same_at_any_cut_and_beside_others() {
    let mut random = Random::new(21);
    for shape in [shape(2, 1, 64), AttentionShape { window: 70, ..shape(3, 1, 128) }] {
        for (device, stream) in devices(2) {
            let width = shape.heads.query_width();
            let mut scene = Scene::new(&mut random, shape, &[(330, 250), (40, 40)]);
            let together = scene.prefill(&device, &stream)[..250 * width].to_vec();
            for new in [250, 101, 2] {
                scene.sequences = vec![(330, new)];
                let last = scene.query[(250 - new) * width..250 * width].to_vec();
                let query = std::mem::replace(&mut scene.query, last);
                assert_eq!(scene.prefill(&device, &stream), together[(250 - new) * width..], "{shape:?}, {new} tokens");
                scene.query = query;
            }
        }
    }
}

#[test]
fn a_sequence_decodes_the_same_whatever_runs_beside_it() {
    let mut random = Random::new(12);
    let (device, stream) = device(3);
    let mut scene = Scene::new(&mut random, shape(4, 2, 64), &[(700, 1), (130, 1), (64, 1)]);
    let together = scene.decode(&device, &stream, ops::splits(700));
    let width = scene.shape.heads.query_width();
    scene.sequences.truncate(1);
    scene.query.truncate(width);
    let alone = scene.decode(&device, &stream, ops::splits(4000));
    assert_eq!(alone, together[..width]);
}

#[test]
fn there_is_room_for_the_splits_of_every_shorter_sequence() {
    for longest in (1..20_000usize).step_by(37).chain([2048, 2049, 8192, 8193]) {
        let most = (1..=longest).map(|length| length.div_ceil(ops::split_keys(length))).max().unwrap();
        assert_eq!(ops::splits(longest), most, "{longest}");
    }
}

#[test]
fn pages_in_bytes_match_the_reference() {
    let mut random = Random::new(19);
    let cases = [
        (shape(3, 1, 32), 70),
        (shape(4, 2, 64), 200),
        (shape(2, 2, 96), 65),
        (shape(8, 1, 128), 130),
        (shape(2, 1, 80), 77),
        (shape(4, 2, 256), 140),
        (AttentionShape { window: 31, cap: 4.0, ..shape(2, 1, 48) }, 150),
    ];
    for code in [EightBits::E4m3, EightBits::Int8] {
        for (seed, &(shape, keys)) in SEEDS.into_iter().cycle().zip(&cases) {
            let (device, stream) = device(seed);
            let scene = Scene::new(&mut random, shape, &[(keys, 1)]).in_bytes(&mut random, code);
            let error = relative_error(&scene.decode(&device, &stream, ops::splits(keys)), &scene.reference());
            assert!(error <= 1e-2, "decoding {shape:?} in {code:?}: {error}");
            let scene = Scene::new(&mut random, shape, &[(keys, 40), (9, 9)]).in_bytes(&mut random, code);
            let error = relative_error(&scene.prefill(&device, &stream), &scene.reference());
            assert!(error <= 1e-2, "prefill {shape:?} in {code:?}: {error}");
        }
    }
}
