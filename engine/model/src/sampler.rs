//! Draws a token from logits: the same logits, parameters and position give the same token, whatever ran beside it.
//!
//! Filters act in this order: banned tokens, temperature, `min_p`, `top_k`, `top_p` (on what the others kept). The
//! whole vocabulary is never sorted: `top_p` looks for its set among the most likely tokens, a growing number of them.

use windlass_engine_core::request::{Sampling, TokenId};
use windlass_kernels::ops;

use crate::philox::uniform;

/// Most likely tokens among which `top_p` first looks for its set, and the factor by which it looks further.
const FIRST_CANDIDATES: usize = 64;
const CANDIDATE_GROWTH: usize = 8;

/// What to draw from one row of logits.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// The distribution.
    pub sampling: &'a Sampling,
    /// Tokens that must not be drawn.
    pub banned: &'a [TokenId],
    /// The position that the drawn token will have in its sequence.
    pub position: u32,
}

/// Why no token can be drawn from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// The model overflowed, or its weights are damaged.
    #[error("the model gave a logit that is not finite, for token {token}")]
    NotFinite {
        /// The first such token.
        token: TokenId,
    },
    /// Nothing is left.
    #[error("every token is banned")]
    AllBanned,
}

/// Draws a token. The logits are overwritten.
pub fn sample(logits: &mut [f32], draw: &Draw<'_>) -> Result<TokenId, SampleError> {
    check_finite(logits)?;
    for &token in draw.banned {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    let best = ops::argmax(logits);
    match logits.get(best) {
        None | Some(&f32::NEG_INFINITY) => Err(SampleError::AllBanned),
        Some(_) if draw.sampling.temperature <= 0.0 => Ok(best as TokenId),
        Some(&max) => {
            scale(logits, max, draw.sampling.temperature);
            Ok(draw_scaled(logits, draw.sampling, uniform(draw.sampling.seed, draw.position)))
        }
    }
}

/// Looks at all logits without a branch for each.
fn check_finite(logits: &[f32]) -> Result<(), SampleError> {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    let magnitude = |logit: &f32| logit.to_bits() & !(1 << 31);
    if logits.iter().map(magnitude).fold(0, u32::max) < INFINITY {
        return Ok(());
    }
    let token = logits.iter().position(|logit| !logit.is_finite()).unwrap_or_default();
    Err(SampleError::NotFinite { token: token as TokenId })
}

/// Logits relative to the largest over the temperature: at most 0, so that no temperature overflows.
fn scale(logits: &mut [f32], max: f32, temperature: f32) {
    logits.iter_mut().for_each(|logit| *logit = (*logit - max) / temperature);
}

/// Draws by the inverse of the distribution that the filters leave; `uniform` is in [0, 1).
fn draw_scaled(scaled: &[f32], sampling: &Sampling, uniform: f64) -> TokenId {
    let floor = if sampling.min_p > 0.0 { sampling.min_p.ln() } else { f32::NEG_INFINITY };
    let top_k = if sampling.top_k == 0 { scaled.len() } else { scaled.len().min(sampling.top_k as usize) };
    if top_k == scaled.len() && sampling.top_p >= 1.0 {
        let all = (0..).zip(scaled.iter().copied()).filter(|&(_, logit)| logit >= floor);
        let total = all.clone().map(weight).sum();
        return pick(all, total, uniform);
    }
    let kept = nucleus(scaled, floor, top_k, sampling.top_p.into());
    let total = kept.iter().copied().map(weight).sum();
    pick(kept.into_iter(), total, uniform)
}

/// The share of a token before normalization.
fn weight((_, logit): (TokenId, f32)) -> f64 {
    // Where f32's smallest normal number ends, a share is nothing.
    if logit < -87.0 { 0.0 } else { logit.exp().into() }
}

/// The most likely tokens that `floor`, `top_k` and `top_p` keep, most likely first.
fn nucleus(scaled: &[f32], floor: f32, top_k: usize, top_p: f64) -> Vec<(TokenId, f32)> {
    // Without a bound on their number, the candidates' share is of all tokens, so that is summed before the search.
    let total = (top_k == scaled.len()).then(|| {
        let kept = (0..).zip(scaled.iter().copied()).filter(|&(_, logit)| logit >= floor);
        kept.map(weight).sum::<f64>()
    });
    let mut count = if total.is_some() { FIRST_CANDIDATES.min(top_k) } else { top_k };
    loop {
        let mut candidates = ops::top_k(scaled, count);
        candidates.truncate(candidates.partition_point(|&(_, logit)| logit >= floor));
        let total = total.unwrap_or_else(|| candidates.iter().copied().map(weight).sum());
        if let Some(last) = reaches(&candidates, top_p * total) {
            candidates.truncate(last + 1);
            return candidates;
        }
        if candidates.len() < count || count == top_k {
            return candidates;
        }
        count = top_k.min(count * CANDIDATE_GROWTH);
    }
}

/// The first index at which the candidates' shares together reach `share`.
fn reaches(candidates: &[(TokenId, f32)], share: f64) -> Option<usize> {
    let mut sum = 0.0;
    candidates.iter().position(|&candidate| {
        sum += weight(candidate);
        sum >= share
    })
}

/// The token at which the running share passes `uniform` of `total`.
fn pick(tokens: impl Iterator<Item = (TokenId, f32)>, total: f64, uniform: f64) -> TokenId {
    let target = uniform * total;
    let (mut sum, mut last) = (0.0, 0);
    for token in tokens {
        let share = weight(token);
        if share > 0.0 {
            last = token.0;
        }
        sum += share;
        if sum > target {
            break;
        }
    }
    last
}
