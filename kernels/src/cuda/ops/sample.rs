//! Drawing tokens: adjustments of single logits, then temperature, min-p, top-k and top-p; and what the model thought of them.

use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::{DriverError, Kernel, Stream, View, ViewMut};

/// What is drawn from a row with a logit that is no number.
pub const NOT_FINITE: u32 = u32::MAX;
/// What is drawn from a row of which every token is banned.
pub const ALL_BANNED: u32 = u32::MAX - 1;

/// Most of a row's most likely tokens that are told.
pub const MOST_TOLD: usize = 20;
/// Numbers of each kind that are told of a row.
pub const TOLD: usize = 2 + MOST_TOLD;
/// No token, and no count.
pub const NONE: u32 = u32::MAX;

/// The only tokens that may come, where something decides it.
#[derive(Clone, Copy, Debug)]
pub struct Masks<'a> {
    /// Each row's mask, or `u32::MAX` for none.
    pub rows: View<'a, u32>,
    /// A bit for each token, `[masks, vocabulary / 32 rounded up]`.
    pub bits: View<'a, u32>,
}

/// Changes of single logits.
#[derive(Clone, Copy, Debug)]
pub struct Edits<'a> {
    /// Where each row's edits begin, and where the last one's end: rows + 1 numbers.
    pub firsts: View<'a, u32>,
    /// The token of each; one row names a token once.
    pub tokens: View<'a, u32>,
    /// `[edit, 4]`: a bias that is added, what a positive logit is divided and another multiplied by (1 for none), a cost
    /// that is subtracted, and whether the token may not come (not 0).
    pub values: View<'a, f32>,
}

/// Masks and edits the rows of `logits`, `[rows, vocabulary]`.
///
/// # Panics
/// When the lengths do not match.
pub fn adjust_logits(
    stream: &Stream,
    masks: Masks<'_>,
    edits: Edits<'_>,
    vocabulary: usize,
    logits: ViewMut<'_, f32>,
) -> Result<(), DriverError> {
    let rows = whole_rows(logits.len(), vocabulary);
    assert_eq!(masks.rows.len(), rows, "a mask or none for each row");
    assert!(masks.bits.len().is_multiple_of(vocabulary.div_ceil(32)), "whole masks");
    assert_eq!(edits.firsts.len(), rows + 1, "where each row's edits begin and end");
    assert_eq!(edits.values.len(), 4 * edits.tokens.len(), "four numbers for each edit");
    let launch = Launch::new(Kernel::AdjustLogits, [word(rows), 1, 1]).with(logits).with(masks.rows).with(masks.bits);
    let launch = launch.with(edits.firsts).with(edits.tokens).with(edits.values).with(word(vocabulary));
    // SAFETY: each block changes one row; which masks and edits rows name is the caller's promise.
    unsafe { stream.launch(&launch) }
}

/// How each row is drawn from.
#[derive(Clone, Copy, Debug)]
pub struct Samplers<'a> {
    /// 0 takes the most likely token.
    pub temperatures: View<'a, f32>,
    /// 0 keeps all.
    pub top_ks: View<'a, u32>,
    /// 1 keeps all.
    pub top_ps: View<'a, f32>,
    /// The logarithm of min-p; minus infinity keeps all.
    pub floors: View<'a, f32>,
    /// The seed of the row's sequence.
    pub seeds: View<'a, u64>,
    /// The position that the drawn token will have.
    pub positions: View<'a, u32>,
}

/// Draws a token from each row of `logits`, `[rows, vocabulary]`: into `out`, or [`NOT_FINITE`] or [`ALL_BANNED`].
///
/// # Panics
/// When the lengths do not match.
pub fn sample(
    stream: &Stream,
    samplers: Samplers<'_>,
    logits: View<'_, f32>,
    vocabulary: usize,
    out: ViewMut<'_, u32>,
) -> Result<(), DriverError> {
    let rows = whole_rows(logits.len(), vocabulary);
    let lengths = [samplers.temperatures.len(), samplers.top_ks.len(), samplers.top_ps.len(), samplers.floors.len()];
    assert!(lengths.iter().all(|&len| len == rows), "a sampler for each of {rows} rows");
    assert!(samplers.seeds.len() == rows && samplers.positions.len() == rows, "a seed and a position for each row");
    assert_eq!(out.len(), rows, "a token for each row");
    let launch = Launch::new(Kernel::Sample, [word(rows), 1, 1]).with(logits).with(samplers.temperatures);
    let launch = launch.with(samplers.top_ks).with(samplers.top_ps).with(samplers.floors).with(samplers.seeds);
    let launch = launch.with(samplers.positions).with(out).with(word(vocabulary));
    // SAFETY: each block reads one row and writes one token.
    unsafe { stream.launch(&launch) }
}

/// What each row tells.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The tokens drawn.
    pub drawn: View<'a, u32>,
    /// A token that is known, or [`NONE`] for the one drawn.
    pub targets: View<'a, u32>,
    /// Of how many most likely tokens: at most [`MOST_TOLD`] and the vocabulary. [`NONE`] tells nothing.
    pub counts: View<'a, u32>,
}

/// What is told of each row, for log probabilities.
#[derive(Debug)]
pub struct Told<'a> {
    /// `2⁴⁰ · Σ exp(logit - largest)`.
    pub wholes: ViewMut<'a, u64>,
    /// `[rows, TOLD]`: the largest logit, the token's own, and those of the most likely ones.
    pub logits: ViewMut<'a, f32>,
    /// `[rows, TOLD]`: how many tokens are more likely, or as likely and have a lower number; nothing; and the most likely ones.
    pub tokens: ViewMut<'a, u32>,
}

impl Told<'_> {
    /// Values of [`Told::wholes`] that stand for one.
    pub const ONE: f64 = (1u64 << 40) as f64;
}

/// Tells of each row of `logits`, `[rows, vocabulary]`, what the model thinks of a token and of the most likely ones. Nothing is
/// told of a row whose token is none, nor of one that [`sample`] finds no token in.
///
/// # Panics
/// When the lengths do not match.
pub fn tell(
    stream: &Stream,
    asked: Asked<'_>,
    logits: View<'_, f32>,
    vocabulary: usize,
    told: Told<'_>,
) -> Result<(), DriverError> {
    let rows = whole_rows(logits.len(), vocabulary);
    let lengths = [asked.drawn.len(), asked.targets.len(), asked.counts.len(), told.wholes.len()];
    assert!(lengths.iter().all(|&len| len == rows), "one for each of {rows} rows");
    assert!(
        told.logits.len() == rows * TOLD && told.tokens.len() == rows * TOLD,
        "room for what is told of {rows} rows"
    );
    let launch = Launch::new(Kernel::Tell, [word(rows), 1, 1]).with(logits).with(asked.drawn).with(asked.targets);
    let launch = launch.with(asked.counts).with(told.wholes).with(told.logits).with(told.tokens);
    // SAFETY: each block reads one row and writes what is told of it.
    unsafe { stream.launch(&launch.with(word(vocabulary))) }
}

fn whole_rows(values: usize, vocabulary: usize) -> usize {
    assert!(
        vocabulary > 0 && values > 0 && values.is_multiple_of(vocabulary),
        "{values} logits of {vocabulary} tokens"
    );
    values / vocabulary
}
