//! Drawing tokens: adjustments of single logits, then temperature, min-p, top-k and top-p. And telling how likely they were.

use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::{DriverError, Kernel, Stream, View, ViewMut};

/// What is drawn from a row with a logit that is no number.
pub const NOT_FINITE: u32 = u32::MAX;
/// What is drawn from a row of which every token is banned.
pub const ALL_BANNED: u32 = u32::MAX - 1;

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

/// What is told of each row.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// How many of the likeliest tokens, or `u32::MAX` for nothing of the row.
    pub counts: View<'a, u32>,
    /// The token, or `u32::MAX` for the one drawn.
    pub targets: View<'a, u32>,
    /// The tokens drawn.
    pub drawn: View<'a, u32>,
}

/// Where it is told: `[rows, stride]`, of which the first place is the row's token and the others are the likeliest ones.
#[derive(Debug)]
pub struct Told<'a> {
    /// Log probabilities.
    pub logprobs: ViewMut<'a, f32>,
    /// The token's rank, from 1; the likeliest tokens.
    pub tokens: ViewMut<'a, u32>,
}

/// Tells log probabilities by the rows of `logits`, `[rows, vocabulary]`. Rows that ask for `stride` tokens or more, and those
/// whose token is none, are left as they were.
///
/// # Panics
/// When the lengths do not match.
pub fn tell_logprobs(
    stream: &Stream,
    logits: View<'_, f32>,
    vocabulary: usize,
    asked: Asked<'_>,
    told: Told<'_>,
) -> Result<(), DriverError> {
    let rows = whole_rows(logits.len(), vocabulary);
    let lengths = [asked.counts.len(), asked.targets.len(), asked.drawn.len()];
    assert!(lengths.iter().all(|&len| len == rows), "a count, a target and a drawn token for each of {rows} rows");
    let places = told.logprobs.len();
    assert!(
        places == told.tokens.len() && places >= rows && places.is_multiple_of(rows),
        "as many places for each row"
    );
    let launch = Launch::new(Kernel::TellLogprobs, [word(rows), 1, 1]).with(logits).with(asked.counts);
    let launch = launch.with(asked.targets).with(asked.drawn).with(told.logprobs).with(told.tokens);
    // SAFETY: each block reads one row and writes its own places.
    unsafe { stream.launch(&launch.with(word(places / rows)).with(word(vocabulary))) }
}

fn whole_rows(values: usize, vocabulary: usize) -> usize {
    assert!(
        vocabulary > 0 && values > 0 && values.is_multiple_of(vocabulary),
        "{values} logits of {vocabulary} tokens"
    );
    values / vocabulary
}
