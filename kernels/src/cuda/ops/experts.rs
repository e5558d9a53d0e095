//! A mixture of experts (Shazeer et al. 2017) around its products: who goes through which expert, and the sum of what they
//! give. Tokens are sorted by expert, so that an expert's weights are read once for a tile of them. Of experts that are
//! elsewhere nothing is computed.

use half::bf16;

use super::blocks::Block;
use super::word;
use crate::cuda::launch::{Argument, Launch};
use crate::cuda::table::GEMM_HOPPER_TILE;
use crate::cuda::{Device, DriverError, Kernel, Memory, Stream, View, ViewMut};

/// Most experts of a layer: threads of the kernel that sorts, and slots of a warp that chooses.
pub const MAX_EXPERTS: usize = 512;
/// Most experts of a token: lanes of a warp.
pub const MAX_USED_EXPERTS: usize = 32;
/// Tokens that a block chooses for: one for each of its warps.
const CHOOSING: usize = 4;
/// Values of a row that a block adds up.
const MIXING: usize = 256;
/// Words of a tile.
const TILE_WORDS: usize = 4;

/// A layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// How many there are.
    pub count: usize,
    /// The first one whose weights are on the device.
    pub first: usize,
    /// How many of those there are, from it on.
    pub held: usize,
    /// Through how many of them each token goes.
    pub used: usize,
    /// Whether there is one besides that every token goes through.
    pub shared: bool,
    /// Whether the weights of a token's experts are scaled to a sum of one.
    pub sum_to_one: bool,
}

impl Mixture {
    /// Scores of a token: its router's.
    pub fn scores(&self) -> usize {
        self.count + usize::from(self.shared)
    }

    /// Weights of a token: of its experts, and of the shared one.
    pub fn weights(&self) -> usize {
        self.used + usize::from(self.shared)
    }

    /// About as many of `tokens` tokens as an expert gets.
    pub(super) fn share(&self, tokens: usize) -> usize {
        (tokens * self.used).div_ceil(self.count)
    }

    /// Tiles of up to `width` tokens that hold `tokens` tokens however they choose: of each expert one may be partly filled.
    fn tiles(&self, tokens: usize, width: usize) -> usize {
        let pairs = tokens * self.used;
        pairs.min(pairs / width + self.held)
    }

    /// Most tiles of any step of up to `tokens` tokens: wide ones are fewer.
    fn most_tiles(&self, tokens: usize) -> usize {
        let tiles = |tokens| self.tiles(tokens, Tiling::Block(Block::for_tokens(self.share(tokens))).width());
        (1..=tokens).map(tiles).max().unwrap_or(0)
    }

    fn check(&self) {
        assert!((1..=MAX_EXPERTS).contains(&self.count), "{} experts", self.count);
        let of_count = self.first + self.held <= self.count;
        assert!(self.held > 0 && of_count, "{} from {} on, of {}", self.held, self.first, self.count);
        assert!((1..=self.count.min(MAX_USED_EXPERTS)).contains(&self.used), "{} of {}", self.used, self.count);
    }
}

/// How many tokens tiles have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tiling {
    /// As many as a block of [`linear_experts`](super::linear_experts).
    Block(Block),
    /// As many as one of [`linear_experts_wide`](super::linear_experts_wide).
    Wide,
}

impl Tiling {
    fn width(self) -> usize {
        match self {
            Tiling::Block(block) => block.tokens(),
            Tiling::Wide => GEMM_HOPPER_TILE as usize,
        }
    }
}

/// Where the sum of what experts give goes, `[tokens, cols]`.
#[derive(Debug)]
pub enum ExpertSum<'a> {
    /// Rounded: a rank's part of it.
    Bf16(ViewMut<'a, bf16>),
    /// Added to what is there: the residual stream.
    AddTo(ViewMut<'a, f32>),
}

impl ExpertSum<'_> {
    fn len(&self) -> usize {
        match self {
            ExpertSum::Bf16(out) => out.len(),
            ExpertSum::AddTo(residual) => residual.len(),
        }
    }

    /// The kernel's two arguments, of which one is null.
    fn arguments(self) -> [Argument; 2] {
        match self {
            ExpertSum::Bf16(out) => [out.into(), Argument::none::<f32>()],
            ExpertSum::AddTo(residual) => [Argument::none::<bf16>(), residual.into()],
        }
    }
}

/// Which of a step's tokens go through which experts, on the device. What an earlier step left is written over.
#[derive(Debug)]
pub struct Routes {
    mixture: Mixture,
    tokens: usize,
    /// Of the last choice.
    tiling: Tiling,
    chosen: Memory<u32>,
    weights: Memory<f32>,
    /// The token at each place.
    token_at: Memory<u32>,
    /// The place of each token and expert.
    places: Memory<u32>,
    tiles: Memory<u32>,
}

impl Routes {
    /// Room for steps of up to `tokens` tokens.
    pub fn new(device: &Device, mixture: Mixture, tokens: usize) -> Result<Routes, DriverError> {
        mixture.check();
        let pairs = tokens * mixture.used;
        Ok(Routes {
            mixture,
            tokens,
            tiling: Tiling::Block(Block::T8),
            chosen: device.allocate(pairs)?,
            weights: device.allocate(tokens * mixture.weights())?,
            token_at: device.allocate(pairs)?,
            places: device.allocate(pairs)?,
            tiles: device.allocate(TILE_WORDS * mixture.most_tiles(tokens))?,
        })
    }

    /// Bytes of that.
    pub fn bytes(mixture: &Mixture, tokens: usize) -> u64 {
        let words = 3 * tokens * mixture.used + tokens * mixture.weights();
        4 * (words + TILE_WORDS * mixture.most_tiles(tokens)) as u64
    }

    /// Chooses the experts of each token with [`Mixture::scores`] scores: those with the highest, the first of equals, each
    /// with its share of the softmax. The last score is the shared expert's, whose weight is its logistic function.
    ///
    /// # Panics
    /// When the scores are no whole tokens, or more than there is room for.
    pub fn choose(&mut self, stream: &Stream, scores: View<'_, f32>) -> Result<(), DriverError> {
        let share = self.mixture.share(scores.len() / self.mixture.scores());
        self.choose_for(stream, scores, Tiling::Block(Block::for_tokens(share)))
    }

    /// The same for [`linear_experts_wide`](super::linear_experts_wide), whose tiles are wider.
    ///
    /// # Panics
    /// As [`Routes::choose`].
    pub fn choose_wide(&mut self, stream: &Stream, scores: View<'_, f32>) -> Result<(), DriverError> {
        self.choose_for(stream, scores, Tiling::Wide)
    }

    fn choose_for(&mut self, stream: &Stream, scores: View<'_, f32>, tiling: Tiling) -> Result<(), DriverError> {
        self.tiling = tiling;
        let mixture = self.mixture;
        let tokens = scores.len() / mixture.scores();
        assert!(tokens > 0 && tokens <= self.tokens, "{tokens} tokens; there is room for {}", self.tokens);
        assert_eq!(scores.len(), tokens * mixture.scores(), "whole tokens");
        let pairs = tokens * mixture.used;
        let launch = Launch::new(Kernel::ChooseExperts, [word(tokens.div_ceil(CHOOSING)), 1, 1]);
        let launch = launch.with(scores).with(self.chosen.slice_mut(0..pairs));
        let launch = launch.with(self.weights.slice_mut(0..tokens * mixture.weights()));
        let launch = launch.with(word(tokens)).with(word(mixture.count)).with(word(mixture.used));
        let launch = launch.with(u32::from(mixture.shared)).with(u32::from(mixture.sum_to_one));
        // SAFETY: a warp reads a token's scores and writes its choices.
        unsafe { stream.launch(&launch) }?;
        let launch = Launch::new(Kernel::GroupTokens, [1, 1, 1]).with(self.chosen.slice(0..pairs));
        let width = tiling.width();
        let tiles = mixture.tiles(tokens, width);
        let launch = launch.with(self.token_at.slice_mut(0..pairs)).with(self.places.slice_mut(0..pairs));
        let launch = launch.with(self.tiles.slice_mut(0..TILE_WORDS * tiles));
        let launch = launch.with(word(pairs)).with(word(mixture.first)).with(word(mixture.held));
        let launch = launch.with(word(mixture.used)).with(word(width)).with(word(tiles));
        // SAFETY: the block sorts choices that were just made into at most as many places, and into tiles whose number
        // covers them however they fall.
        unsafe { stream.launch(&launch) }
    }

    /// `Σ weight · given`, over the experts of each token that are on the device, in their order, and at last the shared one's: added to the residual
    /// stream, or written in bf16. `given` holds a row for each token and expert, as
    /// [`linear_experts`](super::linear_experts) left them.
    ///
    /// # Panics
    /// When the lengths do not match.
    pub fn mix(
        &self,
        stream: &Stream,
        given: View<'_, bf16>,
        shared: Option<View<'_, bf16>>,
        cols: usize,
        sum: ExpertSum<'_>,
    ) -> Result<(), DriverError> {
        let (mixture, values) = (self.mixture, sum.len());
        let tokens = values / cols;
        assert!(tokens > 0 && tokens <= self.tokens && values == tokens * cols, "whole tokens of {cols}");
        assert_eq!(given.len(), tokens * mixture.used * cols, "a row for each token and expert");
        assert_eq!(shared.map(|shared| shared.len()), mixture.shared.then_some(values), "the shared expert's");
        assert!(cols.is_multiple_of(8), "rows of {cols} values");
        let shared = shared.map_or_else(Argument::none::<bf16>, Argument::from);
        let launch = Launch::new(Kernel::MixExperts, [word(tokens), word(cols.div_ceil(MIXING)), 1]);
        let launch = launch.with(given).with(self.places.slice(0..tokens * mixture.used));
        let launch = launch.with(self.weights.slice(0..tokens * mixture.weights())).with(shared);
        let launch = sum.arguments().into_iter().fold(launch, Launch::with);
        // SAFETY: places are those of `given` or nowhere, and blocks write their token's columns.
        unsafe { stream.launch(&launch.with(word(mixture.used)).with(word(cols))) }
    }

    /// The tiles of `tokens` tokens, and how many there are.
    pub(super) fn tiles(&self, tokens: usize) -> (View<'_, u32>, usize) {
        let tiles = self.mixture.tiles(tokens, self.tiling.width());
        (self.tiles.slice(0..TILE_WORDS * tiles), tiles)
    }

    /// The token at each place of `tokens` tokens.
    pub(super) fn token_at(&self, tokens: usize) -> View<'_, u32> {
        self.token_at.slice(0..tokens * self.mixture.used)
    }

    /// What the last choice's tiles are for.
    pub(super) fn tiling(&self) -> Tiling {
        self.tiling
    }

    /// Whether they are for [`linear_experts_wide`](super::linear_experts_wide).
    pub fn are_wide(&self) -> bool {
        self.tiling == Tiling::Wide
    }

    /// The experts.
    pub fn mixture(&self) -> &Mixture {
        &self.mixture
    }
}
