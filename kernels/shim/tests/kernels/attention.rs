use half::bf16;
use windlass_cuda_shim::{HostMachine, Issued, Kernels};
use windlass_kernels::cuda::ops::{self, AttentionShape, Chunks, DecodeRoom, DecodeRows, Heads, Pages};
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{Device, Kernel, Memory, Stream};

use crate::common::{Random, SEEDS, ampere, device, poisoned, relative_error};

/// Sequences in pages, with queries at the end of each.
pub struct Scene {
    pub shape: AttentionShape,
    /// Keys, and of those new ones with queries.
    pub sequences: Vec<(usize, usize)>,
    /// Of each sequence's last keys, if they are guesses that branch, which of them each follows; absent for the last key before
    /// them.
    branches: Vec<Vec<Option<usize>>>,
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
        let branches = vec![Vec::new(); sequences.len()];
        let (sequences, tables) = (sequences.to_vec(), order);
        Scene { shape, sequences, branches, max_pages, tables, pages, query, bytes: None }
    }

    /// The same where so many of each sequence's last keys are guesses, which follow any guess before them or none.
    fn branching(mut self, random: &mut Random, guesses: &[usize]) -> Scene {
        let mut parent = |guess: usize| random.below(guess + 1).checked_sub(1);
        self.branches = guesses.iter().map(|&count| (0..count).map(&mut parent).collect()).collect();
        self
    }

    /// The same with NaNs in all pages that lie before the window of a sequence's first query: they are others' by then.
    fn without_what_windows_passed(mut self) -> Scene {
        let (page, window) = (self.shape.heads.page_values(), self.shape.window as usize);
        for (sequence, &(keys, new)) in self.sequences.iter().enumerate() {
            let passed = (keys - new + 1).saturating_sub(window) / 64;
            for &at in &self.tables[sequence * self.max_pages..][..if window > 0 { passed } else { 0 }] {
                self.pages[at as usize * page..][..page].fill(bf16::NAN);
            }
        }
        self
    }

    /// The keys that the query at `position` sees if its window holds them.
    fn visible(&self, sequence: usize, position: usize) -> Vec<usize> {
        let (keys, parents) = (self.sequences[sequence].0, &self.branches[sequence]);
        let trunk = keys - parents.len();
        let path = std::iter::successors(position.checked_sub(trunk), |&guess| parents[guess]);
        let mut path: Vec<usize> = path.map(|guess| trunk + guess).collect();
        path.reverse();
        (0..trunk.min(position + 1)).chain(path).collect()
    }

    /// What the kernel is told of that, for each query.
    fn seen(&self) -> Vec<u32> {
        let bits = |sequence, position: usize| {
            let visible = self.visible(sequence, position);
            let sees = |back: usize| position.checked_sub(back).is_none_or(|key| visible.contains(&key));
            (0..ops::SEEN_KEYS).fold(0, |bits, back| bits | u32::from(sees(back)) << back)
        };
        let positions = |(sequence, &(keys, new)): (usize, &(usize, usize))| {
            (keys - new..keys).map(move |position| (sequence, position)).collect::<Vec<_>>()
        };
        self.sequences.iter().enumerate().flat_map(positions).map(|(sequence, at)| bits(sequence, at)).collect()
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
                    let visible = self.visible(sequence, position);
                    let visible = match self.shape.window as usize {
                        0 => &visible[..],
                        window => &visible[visible.len().saturating_sub(window)..],
                    };
                    let score = |key: usize| {
                        let key = self.at(sequence, key, false, head / (heads / kv_heads));
                        let dot: f64 = query.iter().zip(key).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
                        let (scaled, cap) = (dot * f64::from(self.shape.scale), f64::from(self.shape.cap));
                        if cap > 0.0 { cap * (scaled / cap).tanh() } else { scaled }
                    };
                    let scores: Vec<f64> = visible.iter().copied().map(score).collect();
                    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    out.extend((0..dim).map(|i| {
                        let values =
                            visible.iter().map(|&key| self.at(sequence, key, true, head / (heads / kv_heads))[i]);
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
        let lengths: Vec<u32> = self.sequences.iter().map(|&(keys, _)| keys as u32).collect();
        let tokens: Vec<u32> = (0..rows as u32).collect();
        let (tables, lengths) = (device.upload(&self.tables).unwrap(), device.upload(&lengths).unwrap());
        let (tokens, query) = (device.upload(&tokens).unwrap(), device.upload(&self.query).unwrap());
        let (common, cache) = (device.upload(common).unwrap(), self.cache(device));
        let mut room = DecodeRoom::new(device, rows, self.shape.heads, splits).unwrap();
        let rows = DecodeRows {
            tables: tables.slice(0..rows * self.max_pages),
            lengths: lengths.view(),
            tokens: tokens.view(),
            common: common.view(),
            splits,
        };
        let mut step = || {
            let (shape, query, pages) = (&self.shape, query.view(), cache.pages());
            let mut out = poisoned::<bf16>(device, self.query.len());
            ops::attention_decode(stream, shape, rows, query, pages, &mut room, out.view_mut()).unwrap();
            out.read(stream).unwrap()
        };
        let first = step();
        // What a step leaves of its counts would be seen by the next.
        assert_eq!(step(), first, "the same step once more");
        first
    }

    fn prefill(&self, device: &Device, stream: &Stream) -> Vec<bf16> {
        let branches = self.branches.iter().any(|branches| !branches.is_empty());
        self.prefill_seeing(device, stream, branches.then(|| self.seen()))
    }

    fn prefill_seeing(&self, device: &Device, stream: &Stream, seen: Option<Vec<u32>>) -> Vec<bf16> {
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
        let seen = seen.map(|seen| upload(&seen));
        let mut out = poisoned::<bf16>(device, self.query.len());
        let chunks = Chunks {
            tables: tables.slice(0..self.sequences.len() * self.max_pages),
            tile_sequences: tile_sequences.view(),
            tile_firsts: tile_firsts.view(),
            first_tokens: firsts.view(),
            token_counts: counts.view(),
            first_positions: positions.view(),
            seen: seen.as_ref().map(Memory::view),
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

/// Splits of 512 keys: as many as a block merges where it decodes, and more, which another kernel merges. Beside them a sequence
/// with splits of 256 keys, and one with a single split, which nobody merges.
#[test]
fn long_contexts_match_the_reference() {
    let mut random = Random::new(24);
    let pages = CODES.map(Some).into_iter().chain([None]);
    let cases = [vec![8193, 300], vec![17_000, 8192, 100, 8193]];
    let cases: Vec<_> = pages.flat_map(|code| cases.clone().map(|lengths| (code, lengths))).collect();
    for (seed, (code, lengths)) in SEEDS.into_iter().cycle().zip(cases) {
        let (device, stream) = device(seed);
        let sequences: Vec<_> = lengths.iter().map(|&length| (length, 1)).collect();
        let scene = Scene::new(&mut random, shape(3, 1, 32), &sequences);
        let scene = if let Some(code) = code { scene.in_bytes(&mut random, code) } else { scene };
        let splits = ops::splits(lengths.iter().copied().max().unwrap());
        let error = relative_error(&scene.decode(&device, &stream, splits), &scene.reference());
        assert!(error <= 1e-2, "{lengths:?} in {code:?}: {error}");
    }
}

/// What pages in bytes hold.
const CODES: [EightBits; 2] = [EightBits::E4m3, EightBits::Int8];

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
    for (seed, (shape, sequences)) in SEEDS.into_iter().cycle().zip(in_steps([40, 72])) {
        for (device, stream) in devices(seed) {
            let scene = Scene::new(&mut random, shape, &sequences);
            let error = relative_error(&scene.prefill(&device, &stream), &scene.reference());
            assert!(error <= 5e-3, "{shape:?} of {sequences:?}: {error}");
        }
    }
}

/// The same of pages in bytes, each code in every order.
#[test]
fn prefill_in_steps_of_pages_in_bytes_matches_the_reference() {
    let mut random = Random::new(22);
    let turns = CODES.map(|code| in_steps([48, 80]).map(|case| (code, case))).into_iter().flatten();
    for (seed, (code, (shape, sequences))) in SEEDS.into_iter().cycle().zip(turns) {
        let scene = Scene::new(&mut random, shape, &sequences).in_bytes(&mut random, code);
        for (device, stream) in devices(seed) {
            let error = relative_error(&scene.prefill(&device, &stream), &scene.reference());
            assert!(error <= 1e-2, "{shape:?} of {sequences:?} in {code:?}: {error}");
        }
    }
}

/// Shapes and sequences, two of heads that are shorter than what a kernel has room for.
fn in_steps([short, shorter]: [usize; 2]) -> [(AttentionShape, Vec<(usize, usize)>); 9] {
    [
        (shape(1, 1, 64), vec![(1, 1), (128, 2), (129, 3), (192, 65), (64, 9)]),
        (shape(3, 3, 128), vec![(700, 130), (256, 64), (255, 2)]),
        (shape(7, 1, 128), vec![(400, 40)]),
        (shape(2, 1, short), vec![(300, 150)]),
        (shape(4, 4, shorter), vec![(513, 3)]),
        (AttentionShape { window: 3, ..shape(2, 2, 64) }, vec![(70, 2), (140, 40), (400, 200)]),
        (AttentionShape { window: 64, ..shape(2, 1, 128) }, vec![(450, 90), (192, 1), (193, 1)]),
        (AttentionShape { window: 300, ..shape(1, 1, 128) }, vec![(900, 140)]),
        (AttentionShape { window: 1, ..shape(1, 1, 128) }, vec![(195, 195)]),
    ]
}

/// Pages of any kind go by warpgroups on Hopper, but for scores with a cap, and for heads that are shorter or longer.
#[test]
fn prefill_takes_the_kernel_that_there_is() {
    let (hopper, others) = ((9, 0), [(8, 0), (10, 0)]);
    let capped = AttentionShape { cap: 5.0, ..shape(2, 1, 64) };
    for (code, found) in [
        (
            EightBits::E4m3,
            [Kernel::AttentionHopperFp8D64, Kernel::AttentionHopperFp8D128, Kernel::AttentionPrefillFp8D64],
        ),
        (
            EightBits::Int8,
            [Kernel::AttentionHopperInt8D64, Kernel::AttentionHopperInt8D128, Kernel::AttentionPrefillInt8D64],
        ),
    ] {
        let chosen = |capability, shape| kernel_of(capability, shape, code);
        assert_eq!([48, 80].map(|dim| chosen(hopper, shape(2, 1, dim))), found[..2]);
        assert_eq!(chosen(hopper, capped), found[2]);
        for other in others {
            assert_eq!(chosen(other, shape(2, 1, 64)), found[2]);
            assert!([32, 144].iter().all(|&dim| chosen(hopper, shape(2, 1, dim)) == chosen(other, shape(2, 1, dim))));
        }
    }
}

fn kernel_of(capability: (u32, u32), shape: AttentionShape, code: EightBits) -> Kernel {
    let driver = HostMachine::new(Kernels::Record, 1).with_capability(capability).driver(0, 1 << 24);
    let (device, mut random) = (driver.device(), Random::new(23));
    let scene = Scene::new(&mut random, shape, &[(9, 9)]).in_bytes(&mut random, code);
    scene.prefill(&device, &device.stream().unwrap());
    let kernel = |work: &Issued| if let Issued::Launch(kernel) = work { Some(*kernel) } else { None };
    driver.issued().iter().find_map(kernel).unwrap()
}

/// Guesses behind a few tokens and behind many, across the borders of pages and of blocks, up to as many as bits tell of; windows
/// that end among guesses, that begin behind some of a guess's own, and that all fit in; texts beside them.
fn branching(random: &mut Random) -> Vec<Scene> {
    let window = |window: u32, shape: AttentionShape| AttentionShape { window, ..shape };
    // Keys, new tokens, and the guesses that are the last of those.
    type Guessed = (usize, usize, usize);
    let cases: [(AttentionShape, &[Guessed]); 11] = [
        (shape(9, 3, 64), &[(50, 4, 3), (70, 20, 9)]),
        (shape(2, 2, 32), &[(70, 10, 9), (64, 64, 0), (3, 3, 2)]),
        (shape(8, 1, 96), &[(133, 33, 32)]),
        (shape(4, 1, 128), &[(40, 40, 12), (129, 8, 5)]),
        (shape(3, 1, 80), &[(200, 90, 32)]),
        (AttentionShape { cap: 5.0, ..shape(4, 2, 256) }, &[(66, 5, 4)]),
        (window(3, shape(2, 1, 64)), &[(140, 33, 32), (80, 9, 8)]),
        (window(1, shape(2, 1, 64)), &[(70, 12, 8)]),
        (window(20, shape(4, 2, 128)), &[(90, 40, 32), (30, 30, 5)]),
        (window(33, shape(2, 1, 64)), &[(100, 33, 32), (200, 7, 6)]),
        (window(70, shape(16, 1, 64)), &[(330, 33, 32), (150, 20, 0), (72, 5, 4)]),
    ];
    let mut scenes = Vec::new();
    for (shape, sequences) in cases {
        let guesses: Vec<usize> = sequences.iter().map(|&(_, _, guesses)| guesses).collect();
        let sequences: Vec<_> = sequences.iter().map(|&(keys, new, _)| (keys, new)).collect();
        let scene = Scene::new(random, shape, &sequences).without_what_windows_passed();
        scenes.push(scene.branching(random, &guesses));
    }
    for (code, shape) in [
        (EightBits::E4m3, shape(4, 2, 64)),
        (EightBits::Int8, shape(2, 1, 32)),
        (EightBits::E4m3, window(40, shape(2, 2, 256))),
        (EightBits::Int8, window(9, shape(4, 1, 128))),
    ] {
        let scene = Scene::new(random, shape, &[(140, 40), (9, 9)]);
        let scene = scene.without_what_windows_passed().in_bytes(random, code);
        scenes.push(scene.branching(random, &[20, 7]));
    }
    scenes
}

#[test]
fn guesses_that_branch_see_what_they_follow_alone() {
    let mut random = Random::new(31);
    for (seed, scene) in SEEDS.into_iter().cycle().zip(branching(&mut random)) {
        for (device, stream) in devices(seed) {
            let error = relative_error(&scene.prefill(&device, &stream), &scene.reference());
            assert!(error <= 1e-2, "{:?} of {:?}: {error}", scene.shape, scene.sequences);
        }
    }
}

#[test]
fn what_does_not_branch_gives_the_same_beside_what_does() {
    let mut random = Random::new(32);
    for shape in [shape(4, 2, 64), AttentionShape { window: 9, ..shape(3, 1, 128) }] {
        let (device, stream) = ampere(2);
        let mut scene = Scene::new(&mut random, shape, &[(200, 70), (90, 33)]);
        let plain = scene.prefill(&device, &stream)[..70 * shape.heads.query_width()].to_vec();
        scene = scene.branching(&mut random, &[0, 32]);
        assert!(scene.prefill(&device, &stream).starts_with(&plain), "{shape:?}");
        scene.branches = vec![Vec::new(); 2];
        let seen = scene.seen();
        let told = scene.prefill_seeing(&device, &stream, Some(seen));
        assert_eq!(told, scene.prefill(&device, &stream), "{shape:?}: all keys are seen");
    }
}

#[test]
fn a_token_of_a_prompt_gives_the_same_at_any_cut_and_beside_others() {
    let mut random = Random::new(21);
    for shape in [shape(2, 1, 64), AttentionShape { window: 70, ..shape(3, 1, 128) }] {
        for code in [None].into_iter().chain(CODES.map(Some)) {
            let scene = Scene::new(&mut random, shape, &[(330, 250), (40, 40)]);
            let mut scene = match code {
                Some(code) => scene.in_bytes(&mut random, code),
                None => scene,
            };
            devices(2).iter().for_each(|(device, stream)| scene.is_the_same_at_any_cut(device, stream));
        }
    }
}

impl Scene {
    /// Of two sequences, the first of which has 250 new tokens.
    fn is_the_same_at_any_cut(&mut self, device: &Device, stream: &Stream) {
        let (width, sequences, query) = (self.shape.heads.query_width(), self.sequences.clone(), self.query.clone());
        let together = self.prefill(device, stream);
        for new in [250, 101, 2] {
            let cut = (250 - new) * width..250 * width;
            self.sequences = vec![(330, new)];
            self.query = query[cut.clone()].to_vec();
            assert_eq!(
                self.prefill(device, stream),
                together[cut],
                "{:?}, {new} tokens, in bytes: {}",
                self.shape,
                self.bytes.is_some()
            );
        }
        (self.sequences, self.query) = (sequences, query);
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

/// Alone its splits are merged by a block that decodes, beside a longer one by another kernel.
#[test]
fn a_long_sequence_decodes_the_same_beside_a_longer_one() {
    let mut random = Random::new(25);
    let (device, stream) = device(2);
    let mut scene = Scene::new(&mut random, shape(2, 1, 32), &[(8193, 1), (16_385, 1)]);
    let [few, many] = [8193, 16_385].map(ops::splits);
    assert_eq!([few, many], [32, 33]);
    let together = scene.decode(&device, &stream, many);
    let width = scene.shape.heads.query_width();
    scene.sequences.truncate(1);
    scene.query.truncate(width);
    assert_eq!(scene.decode(&device, &stream, few), together[..width]);
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
    for code in CODES {
        for (seed, &(shape, keys)) in SEEDS.into_iter().cycle().zip(&cases) {
            let (device, stream) = device(seed);
            let scene = Scene::new(&mut random, shape, &[(keys, 1)]).in_bytes(&mut random, code);
            let error = relative_error(&scene.decode(&device, &stream, ops::splits(keys)), &scene.reference());
            assert!(error <= 1e-2, "decoding {shape:?} in {code:?}: {error}");
            let scene = Scene::new(&mut random, shape, &[(keys, 40), (9, 9)]).in_bytes(&mut random, code);
            for (device, stream) in devices(seed) {
                let error = relative_error(&scene.prefill(&device, &stream), &scene.reference());
                assert!(error <= 1e-2, "prefill {shape:?} in {code:?}: {error}");
            }
        }
    }
}
