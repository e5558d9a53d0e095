//! What is done to the logits of single tokens before anything is drawn: tokens that may not come, biases, penalties.

use windlass_engine_core::constraint::TokenSet;
use windlass_engine_core::request::TokenId;
use windlass_engine_core::sampling::Penalties;

use super::Draw;

/// Applies all of it. A token that must not be drawn has a logit of minus infinity afterwards.
pub(super) fn adjust(logits: &mut [f32], draw: &Draw<'_>) {
    if let Some(allowed) = draw.allowed {
        keep(logits, allowed);
    }
    keep_allowed(logits, &draw.sampling.allowed_tokens);
    draw.banned.iter().for_each(|&token| ban(logits, token));
    let completed = draw.sampling.bad_words.iter().filter_map(|word| completes(word, draw.generated));
    completed.for_each(|last| ban(logits, last));
    for &(token, bias) in &draw.sampling.logit_bias {
        change(logits, token, |logit| logit + bias);
    }
    penalize(logits, draw.sampling.penalties, draw.prompt, draw.generated);
}

/// A logit for each bit, in the order of both.
fn keep(logits: &mut [f32], allowed: &TokenSet) {
    for (token, logit) in (0..).zip(logits) {
        if !allowed.contains(token) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn keep_allowed(logits: &mut [f32], allowed: &[TokenId]) {
    if allowed.is_empty() {
        return;
    }
    let kept: Vec<(TokenId, f32)> =
        allowed.iter().filter_map(|&token| Some((token, *logits.get(token as usize)?))).collect();
    logits.fill(f32::NEG_INFINITY);
    kept.into_iter().for_each(|(token, logit)| logits[token as usize] = logit);
}

/// The token that would complete `word`, if the answer ends with all before it.
fn completes(word: &[TokenId], generated: &[TokenId]) -> Option<TokenId> {
    let (last, before) = word.split_last()?;
    generated.ends_with(before).then_some(*last)
}

fn penalize(logits: &mut [f32], penalties: Penalties, prompt: &[TokenId], generated: &[TokenId]) {
    if penalties == Penalties::NONE {
        return;
    }
    let mut seen = [prompt, generated].concat();
    seen.sort_unstable();
    seen.dedup();
    let repeated = |logit: f32| if logit > 0.0 { logit / penalties.repetition } else { logit * penalties.repetition };
    seen.into_iter().for_each(|token| change(logits, token, repeated));
    let mut counted = generated.to_vec();
    counted.sort_unstable();
    for same in counted.chunk_by(|a, b| a == b) {
        let cost = penalties.presence + penalties.frequency * same.len() as f32;
        change(logits, same[0], |logit| logit - cost);
    }
}

fn ban(logits: &mut [f32], token: TokenId) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

/// Changes a logit that is not banned, and keeps it finite.
fn change(logits: &mut [f32], token: TokenId, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize).filter(|logit| **logit > f32::NEG_INFINITY) {
        *logit = to(*logit).clamp(f32::MIN, f32::MAX);
    }
}
