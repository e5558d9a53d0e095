//! The heads of tokens between their projection and attention.

use half::bf16;

use super::word;
use crate::cuda::launch::{Argument, Launch};
use crate::cuda::weights::EightBits;
use crate::cuda::{DriverError, Kernel, Stream, View, ViewMut};
use crate::ops::RopePairing;

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 64;
/// Heads that a block takes, one for each of its warps.
const BLOCK_HEADS: usize = 4;
/// Largest head: a lane holds four pairs.
pub const MAX_HEAD_DIM: usize = 256;

/// Heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Of queries, a multiple of `kv_heads`.
    pub heads: usize,
    /// Of keys, and of values.
    pub kv_heads: usize,
    /// Values in one.
    pub dim: usize,
}

impl Heads {
    /// Values of a token's queries, keys and values.
    pub fn projected_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.dim
    }

    /// Values of a token's queries.
    pub fn query_width(&self) -> usize {
        self.heads * self.dim
    }

    /// Values of a layer's page, `[K|V][kv_head][64][dim]`.
    pub fn page_values(&self) -> usize {
        self.page_rows() * self.dim
    }

    /// Keys and values of a layer's page, `[K|V][kv_head][64]`: so many scales it has where it holds bytes.
    pub fn page_rows(&self) -> usize {
        2 * self.kv_heads * PAGE_TOKENS
    }
}

/// How heads turn by their token's position.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// Cosine and sine of every pair, for each position: [`rope_table`].
    pub table: View<'a, f32>,
    /// Pairs that turn.
    pub pairs: usize,
    /// Which values are a pair.
    pub pairing: RopePairing,
}

/// Cosine and sine of each position below `positions` and each pair, `[position, pair, 2]`.
///
/// Pair `i` turns by `position · theta^(-i/pairs) / factor[i]`; without factors, by 1. What was turned is `magnitude` times
/// as long (LongRoPE, YaRN; 1 for others).
///
/// # Panics
/// When there is another number of factors.
pub fn rope_table(pairs: usize, positions: usize, theta: f32, factors: Option<&[f32]>, magnitude: f32) -> Vec<f32> {
    assert!(factors.is_none_or(|factors| factors.len() == pairs), "one frequency factor per pair");
    let frequency = |i: usize| {
        let factor = factors.map_or(1.0, |factors| f64::from(factors[i]));
        f64::from(theta).powf(-(i as f64) / pairs as f64) / factor
    };
    let frequencies: Vec<f64> = (0..pairs).map(frequency).collect();
    let turns =
        (0..positions).flat_map(|at| frequencies.iter().map(move |frequency| (at as f64 * frequency).sin_cos()));
    turns.flat_map(|(sine, cosine)| [cosine, sine].map(|part| (part * f64::from(magnitude)) as f32)).collect()
}

/// What is done to a layer's heads.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// Added to queries, keys and values, one for each of a token's values.
    pub bias: Option<View<'a, f32>>,
    /// Weights of the norm of each query head and of each key head.
    pub norms: Option<[View<'a, f32>; 2]>,
    /// Added to the mean square before its root.
    pub epsilon: f32,
    /// How queries and keys turn, if they do.
    pub rotation: Option<Rotation<'a>>,
}

/// Where tokens are, one of each for every token.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// In their sequences.
    pub positions: View<'a, u32>,
    /// In the pages: `page · 64 + place in the page`.
    pub slots: View<'a, u32>,
}

/// The pages of a layer, `[page][K|V][kv_head][64][dim]`, to read.
#[derive(Clone, Copy, Debug)]
pub enum Pages<'a> {
    /// In bf16.
    Bf16(View<'a, bf16>),
    /// In bytes, relative to a scale for each token and head.
    Bytes {
        /// What they stand for.
        code: EightBits,
        /// The values.
        codes: View<'a, u8>,
        /// What they are to be multiplied with, `[page][K|V][kv_head][64]`.
        scales: View<'a, f32>,
    },
}

/// The pages of a layer, to write.
#[derive(Debug)]
pub enum PagesMut<'a> {
    /// In bf16.
    Bf16(ViewMut<'a, bf16>),
    /// In bytes: the largest of a token and head becomes 448 in e4m3, and 127 in signed bytes.
    Bytes {
        /// What they stand for.
        code: EightBits,
        /// The values.
        codes: ViewMut<'a, u8>,
        /// What they are to be multiplied with, `[page][K|V][kv_head][64]`.
        scales: ViewMut<'a, f32>,
    },
}

impl Pages<'_> {
    /// The pages, and their scales.
    pub(super) fn arguments(self, heads: Heads) -> [Argument; 2] {
        match self {
            Pages::Bf16(pages) => {
                check_pages(heads, pages.len(), None);
                [pages.into(), Argument::none::<f32>()]
            }
            Pages::Bytes { codes, scales, .. } => {
                check_pages(heads, codes.len(), Some(scales.len()));
                [codes.into(), scales.into()]
            }
        }
    }
}

impl PagesMut<'_> {
    /// Which of the kernels for bf16, e4m3 and signed bytes changes them, the pages, and their scales.
    pub(super) fn arguments(self, heads: Heads, kernels: [Kernel; 3]) -> (Kernel, [Argument; 2]) {
        let [halves, e4m3, int8] = kernels;
        match self {
            PagesMut::Bf16(pages) => {
                check_pages(heads, pages.len(), None);
                (halves, [pages.into(), Argument::none::<f32>()])
            }
            PagesMut::Bytes { code, codes, scales } => {
                check_pages(heads, codes.len(), Some(scales.len()));
                let kernel = match code {
                    EightBits::E4m3 => e4m3,
                    EightBits::Int8 => int8,
                };
                (kernel, [codes.into(), scales.into()])
            }
        }
    }

    /// Values in them.
    pub(super) fn len(&self) -> usize {
        match self {
            PagesMut::Bf16(pages) => pages.len(),
            PagesMut::Bytes { codes, .. } => codes.len(),
        }
    }
}

fn check_pages(heads: Heads, values: usize, scales: Option<usize>) {
    assert!(values.is_multiple_of(heads.page_values()), "{values} values are no whole pages");
    assert!(scales.is_none_or(|scales| scales * heads.dim == values), "a scale for each token and head");
    assert!(scales.is_none() || heads.dim.is_multiple_of(16), "rows of {} bytes; kernels copy 16", heads.dim);
}

/// For pages in bf16, e4m3 and signed bytes.
const PLACE: [Kernel; 3] = [Kernel::PlaceHeads, Kernel::PlaceHeadsFp8, Kernel::PlaceHeadsInt8];

/// Takes the heads of `projected`, `[token][queries, keys, values]`, through bias, norm and rotation, writes queries to
/// `query` and keys and values to their pages.
///
/// # Panics
/// When the lengths do not match, or a head is no multiple of 8 values or has more than 256.
pub fn place_heads(
    stream: &Stream,
    heads: Heads,
    placement: Placement<'_>,
    projected: View<'_, bf16>,
    places: Places<'_>,
    query: ViewMut<'_, bf16>,
    pages: PagesMut<'_>,
) -> Result<(), DriverError> {
    let Places { positions, slots } = places;
    let (tokens, dim) = (positions.len(), heads.dim);
    assert!(dim > 0 && dim.is_multiple_of(8) && dim <= MAX_HEAD_DIM, "heads of {dim} values");
    assert_eq!(projected.len(), tokens * heads.projected_width(), "heads of {tokens} tokens");
    assert_eq!(query.len(), tokens * heads.query_width(), "queries of {tokens} tokens");
    assert_eq!(slots.len(), tokens, "a slot for each token");
    let (kernel, [pages, scales]) = pages.arguments(heads, PLACE);
    assert!(placement.bias.is_none_or(|bias| bias.len() == heads.projected_width()), "a bias for each value");
    assert!(placement.norms.is_none_or(|norms| norms.iter().all(|norm| norm.len() == dim)), "norms of one head");
    let rotation = placement.rotation;
    assert!(rotation.is_none_or(|turn| 2 * turn.pairs <= dim && turn.pairs > 0), "pairs of a head of {dim}");
    let optional = |view: Option<View<'_, f32>>| view.map_or_else(Argument::none::<f32>, Argument::from);
    let grid = [word(tokens), word((heads.heads + 2 * heads.kv_heads).div_ceil(BLOCK_HEADS)), 1];
    let launch = Launch::new(kernel, grid).with(projected).with(optional(placement.bias));
    let launch = launch.with(optional(placement.norms.map(|[query, _]| query)));
    let launch = launch.with(optional(placement.norms.map(|[_, key]| key)));
    let launch = launch.with(optional(rotation.map(|turn| turn.table))).with(positions).with(slots);
    let launch = launch.with(query).with(pages).with(scales);
    let launch = launch.with(word(heads.heads)).with(word(heads.kv_heads)).with(word(dim));
    let launch = launch.with(rotation.map_or(0, |turn| word(turn.pairs)));
    let adjacent = rotation.is_some_and(|turn| turn.pairing == RopePairing::Adjacent);
    // SAFETY: each warp reads and writes one head; positions and slots are the caller's promise.
    unsafe { stream.launch(&launch.with(u32::from(adjacent)).with(placement.epsilon)) }
}
