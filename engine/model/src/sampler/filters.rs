//! Draws from scaled logits through `min_p`, `top_k`, `typical_p` (Meister et al. 2023) and `top_p` (Holtzman et al.
//! 2020).

use windlass_engine_core::request::{Sampling, TokenId};
use windlass_kernels::ops;

/// Number of most likely tokens that `top_p` searches first, and the factor by which the number grows.
const FIRST_CANDIDATES: usize = 64;
const CANDIDATE_GROWTH: usize = 8;

/// A token and its logit, relative to the largest.
type Candidate = (TokenId, f32);

/// Draws by inverting the cumulative distribution of the tokens that the filters keep; `uniform` is in [0, 1).
pub(super) fn draw(scaled: &[f32], sampling: &Sampling, uniform: f64) -> TokenId {
    let floor = if sampling.min_p > 0.0 { sampling.min_p.ln() } else { f32::NEG_INFINITY };
    let top_k = if sampling.top_k == 0 { scaled.len() } else { scaled.len().min(sampling.top_k as usize) };
    let typical = sampling.typical_p < 1.0;
    if top_k == scaled.len() && sampling.top_p >= 1.0 && !typical {
        let all = (0..).zip(scaled.iter().copied()).filter(|&(_, logit)| logit >= floor);
        return pick(all.clone(), total(all), uniform);
    }
    let kept = if typical {
        typical_nucleus(scaled, floor, top_k, sampling)
    } else {
        nucleus(scaled, floor, top_k, sampling.top_p.into())
    };
    pick(kept.iter().copied(), total(kept.iter().copied()), uniform)
}

/// The weight of a token: its probability before normalization.
fn weight((_, logit): Candidate) -> f64 {
    // Below the smallest normal f32 the weight is 0.
    if logit < -87.0 { 0.0 } else { logit.exp().into() }
}

fn total(candidates: impl Iterator<Item = Candidate>) -> f64 {
    candidates.map(weight).sum()
}

/// The most likely tokens that `floor`, `top_k` and `top_p` keep, most likely first.
fn nucleus(scaled: &[f32], floor: f32, top_k: usize, top_p: f64) -> Vec<Candidate> {
    // Without `top_k` the share is relative to all tokens, so their sum is needed before the search.
    let whole =
        (top_k == scaled.len()).then(|| total((0..).zip(scaled.iter().copied()).filter(|&(_, logit)| logit >= floor)));
    let mut count = if whole.is_some() { FIRST_CANDIDATES.min(top_k) } else { top_k };
    loop {
        let mut candidates = most_likely(scaled, floor, count);
        let whole = whole.unwrap_or_else(|| total(candidates.iter().copied()));
        if let Some(last) = reaches(&candidates, top_p * whole) {
            candidates.truncate(last + 1);
            return candidates;
        }
        if candidates.len() < count || count == top_k {
            return candidates;
        }
        count = top_k.min(count * CANDIDATE_GROWTH);
    }
}

/// The tokens that `floor`, `top_k`, `typical_p` and `top_p` keep, most likely first.
fn typical_nucleus(scaled: &[f32], floor: f32, top_k: usize, sampling: &Sampling) -> Vec<Candidate> {
    let mut kept = most_typical(most_likely(scaled, floor, top_k), sampling.typical_p.into());
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let whole = total(kept.iter().copied());
    if let Some(last) = reaches(&kept, f64::from(sampling.top_p) * whole) {
        kept.truncate(last + 1);
    }
    kept
}

fn most_likely(scaled: &[f32], floor: f32, count: usize) -> Vec<Candidate> {
    let mut candidates = ops::top_k(scaled, count);
    candidates.truncate(candidates.partition_point(|&(_, logit)| logit >= floor));
    candidates
}

/// The candidates whose surprise (-log p) is nearest to its mean, as many as reach the share `typical_p`.
fn most_typical(mut candidates: Vec<Candidate>, typical_p: f64) -> Vec<Candidate> {
    let whole = total(candidates.iter().copied());
    let surprise = |candidate: &Candidate| whole.ln() - f64::from(candidate.1);
    // Banned tokens have weight 0 and infinite surprise.
    candidates.retain(|candidate| weight(*candidate) > 0.0);
    let entropy: f64 = candidates.iter().map(|candidate| weight(*candidate) / whole * surprise(candidate)).sum();
    let distance = |candidate: &Candidate| (surprise(candidate) - entropy).abs();
    candidates.sort_by(|a, b| distance(a).total_cmp(&distance(b)).then(a.0.cmp(&b.0)));
    if let Some(last) = reaches(&candidates, typical_p * whole) {
        candidates.truncate(last + 1);
    }
    candidates
}

/// The first index at which the candidates' shares together reach `share`.
fn reaches(candidates: &[Candidate], share: f64) -> Option<usize> {
    let mut sum = 0.0;
    candidates.iter().position(|&candidate| {
        sum += weight(candidate);
        sum >= share
    })
}

/// The token at which the running share passes `uniform` of `total`.
fn pick(tokens: impl Iterator<Item = Candidate>, total: f64, uniform: f64) -> TokenId {
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
