//! Adjusts the logits of single tokens before anything is drawn: banned tokens, biases, penalties.

use windlass_engine_core::constraint::TokenSet;
use windlass_engine_core::request::TokenId;
use windlass_engine_core::sampling::Penalties;

use super::Draw;

/// The changes to the logit of one token, in the order of the fields. The logit of a banned token becomes minus
/// infinity, whatever the other fields are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Edit {
    /// The token.
    pub token: TokenId,
    /// Added to the logit.
    pub bias: f32,
    /// Repetition penalty: a positive logit is divided by it, another is multiplied with it; 1 changes nothing.
    pub repetition: f32,
    /// Frequency and presence penalties: subtracted from the logit.
    pub cost: f32,
    /// Whether the token is banned.
    pub is_banned: bool,
}

/// Why a token's logit changes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reason {
    Banned,
    Biased(f32),
    InPrompt,
    Generated,
}

/// Applies all changes and the token mask. The logits of tokens that must not be drawn become minus infinity.
pub(super) fn adjust(logits: &mut [f32], draw: &Draw<'_>) {
    if let Some(allowed) = draw.allowed {
        keep(logits, allowed);
    }
    keep_allowed(logits, &draw.sampling.allowed_tokens);
    for edit in edits(draw) {
        if let Some(logit) = logits.get_mut(edit.token as usize) {
            edit.apply(logit);
        }
    }
}

/// The changes of all tokens whose logits change, by ascending token id, one for each token.
pub(crate) fn edits(draw: &Draw<'_>) -> Vec<Edit> {
    let penalties = draw.sampling.penalties;
    let mut reasons: Vec<(TokenId, Reason)> = reasons(draw).collect();
    reasons.sort_by_key(|(token, _)| *token);
    reasons.chunk_by(|(a, _), (b, _)| a == b).map(|of_one| Edit::new(of_one, penalties)).collect()
}

fn reasons<'a>(draw: &'a Draw<'a>) -> impl Iterator<Item = (TokenId, Reason)> {
    let Draw { sampling, banned, prompt, generated, .. } = draw;
    let completed = sampling.bad_words.iter().filter_map(|word| completes(word, generated));
    let banned = banned.iter().copied().chain(completed).map(|token| (token, Reason::Banned));
    let biased = sampling.logit_bias.iter().map(|&(token, bias)| (token, Reason::Biased(bias)));
    let penalized = sampling.penalties != Penalties::NONE;
    let seen =
        |tokens: &'a [TokenId], reason| tokens.iter().filter(move |_| penalized).map(move |&token| (token, reason));
    banned.chain(biased).chain(seen(prompt, Reason::InPrompt)).chain(seen(generated, Reason::Generated))
}

/// The token that would complete `word`, if the answer ends with all before it.
fn completes(word: &[TokenId], generated: &[TokenId]) -> Option<TokenId> {
    let (last, before) = word.split_last()?;
    generated.ends_with(before).then_some(*last)
}

impl Edit {
    /// The change of one token, for one or more reasons.
    fn new(of_one: &[(TokenId, Reason)], penalties: Penalties) -> Edit {
        let mut edit = Edit { token: of_one[0].0, bias: 0.0, repetition: 1.0, cost: 0.0, is_banned: false };
        let mut generated = 0;
        for (_, reason) in of_one {
            match reason {
                Reason::Banned => edit.is_banned = true,
                Reason::Biased(bias) => edit.bias += bias,
                Reason::InPrompt => edit.repetition = penalties.repetition,
                Reason::Generated => {
                    edit.repetition = penalties.repetition;
                    generated += 1;
                }
            }
        }
        if generated > 0 {
            edit.cost = penalties.presence + penalties.frequency * generated as f32;
        }
        edit
    }

    /// The values that kernels read: bias, repetition, cost, and 1 for a banned token.
    pub fn values(&self) -> [f32; 4] {
        [self.bias, self.repetition, self.cost, f32::from(u8::from(self.is_banned))]
    }

    /// Changes a logit that is not banned, and keeps it finite.
    fn apply(&self, logit: &mut f32) {
        if self.is_banned {
            *logit = f32::NEG_INFINITY;
        }
        if *logit == f32::NEG_INFINITY {
            return;
        }
        let kept = |value: f32| value.clamp(f32::MIN, f32::MAX);
        let biased = kept(*logit + self.bias);
        let repeated = if biased > 0.0 { biased / self.repetition } else { biased * self.repetition };
        *logit = kept(kept(repeated) - self.cost);
    }
}

/// Sets the logits of tokens that are not allowed to minus infinity.
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

/// The token mask as bits, 32 to a word, in `words` words; `None` if all tokens are allowed.
pub(crate) fn allowed_words(draw: &Draw<'_>, words: usize) -> Option<Vec<u32>> {
    let listed = &draw.sampling.allowed_tokens;
    let mut allowed = match (draw.allowed, listed.is_empty()) {
        (None, true) => return None,
        (Some(set), true) => set.words().to_vec(),
        (set, false) => {
            let mut both = TokenSet::default();
            listed
                .iter()
                .filter(|token| set.is_none_or(|set| set.contains(**token)))
                .for_each(|&token| both.insert(token));
            both.words().to_vec()
        }
    };
    allowed.resize(words, 0);
    Some(allowed)
}
