//! Draws a token from logits. The token depends on logits, parameters, history and position alone, not on other rows of
//! the step.
//!
//! The order is: adjustments of single tokens (`sampler::adjust`), temperature, `min_p`, `top_k`, `typical_p`, `top_p`,
//! each applied to the tokens that the ones before kept. Only `typical_p` sorts the whole vocabulary: `top_p` searches
//! a growing number of the most likely tokens. Log probabilities are those of the model, before all of this.

mod adjust;
mod filters;
mod logprobs;
pub(crate) mod philox;

use windlass_engine_core::constraint::TokenSet;
use windlass_engine_core::plan::SequenceFailure;
use windlass_engine_core::request::{Sampling, TokenId};
use windlass_engine_core::sampling::TokenLogprobs;
use windlass_kernels::ops;

use crate::sampler::philox::uniform;
pub(crate) use adjust::{Edit, allowed_words, edits};
use logprobs::Distribution;

/// The task for one row of logits.
#[derive(Clone, Copy, Debug)]
pub enum RowTask<'a> {
    /// Draw a token.
    Draw(Draw<'a>),
    /// Report the log probability of a known token.
    Score {
        /// The token.
        target: TokenId,
        /// Number of most likely tokens to report beside it.
        top: u32,
    },
}

/// A draw from one row of logits.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// The distribution.
    pub sampling: &'a Sampling,
    /// Tokens that must not be drawn.
    pub banned: &'a [TokenId],
    /// The prompt, if [`Sampling::reads_history`].
    pub prompt: &'a [TokenId],
    /// The tokens generated so far, if [`Sampling::reads_history`].
    pub generated: &'a [TokenId],
    /// The token mask; `None` if all tokens are allowed.
    pub allowed: Option<&'a TokenSet>,
    /// The position that the drawn token will have in its sequence.
    pub position: u32,
    /// Number of most likely tokens to report with the log probability of the drawn one; `None` for no log
    /// probabilities.
    pub logprobs: Option<u32>,
}

/// A drawn or known token, with its log probability if that was asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: TokenId,
    /// Log probabilities of the token and of the most likely ones.
    pub logprobs: Option<TokenLogprobs>,
}

/// Why no token can be drawn from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// A logit is not finite: the model overflowed, or its weights are damaged.
    #[error("the model gave a logit that is not finite, for token {token}")]
    NotFinite {
        /// The first such token.
        token: TokenId,
    },
    /// No token is allowed.
    #[error("every token is banned")]
    AllBanned,
    /// The token to score is not in the vocabulary.
    #[error("token {token} is outside the model's vocabulary of {vocabulary}")]
    Unknown {
        /// The token.
        token: TokenId,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
}

impl From<SampleError> for SequenceFailure {
    fn from(error: SampleError) -> SequenceFailure {
        let message = error.to_string();
        match error {
            SampleError::NotFinite { .. } => SequenceFailure::Corrupted(message),
            SampleError::AllBanned => SequenceFailure::Unsatisfiable(message),
            SampleError::Unknown { .. } => SequenceFailure::Uncomputable(message),
        }
    }
}

/// Runs the task on a row of logits, which are overwritten.
pub fn sample(logits: &mut [f32], task: &RowTask<'_>) -> Result<Drawn, SampleError> {
    check_finite(logits)?;
    match task {
        RowTask::Score { target, top } => score(logits, *target, *top),
        RowTask::Draw(draw) => {
            let distribution = draw.logprobs.map(|top| (Distribution::of(logits), top));
            let token = draw_token(logits, draw)?;
            Ok(Drawn { token, logprobs: distribution.map(|(distribution, top)| distribution.tell(token, top)) })
        }
    }
}

fn score(logits: &[f32], token: TokenId, top: u32) -> Result<Drawn, SampleError> {
    if token as usize >= logits.len() {
        return Err(SampleError::Unknown { token, vocabulary: logits.len() });
    }
    Ok(Drawn { token, logprobs: Some(Distribution::of(logits).tell(token, top)) })
}

fn draw_token(logits: &mut [f32], draw: &Draw<'_>) -> Result<TokenId, SampleError> {
    adjust::adjust(logits, draw);
    let best = ops::argmax(logits);
    match logits.get(best) {
        None | Some(&f32::NEG_INFINITY) => Err(SampleError::AllBanned),
        Some(_) if draw.sampling.temperature <= 0.0 => Ok(best as TokenId),
        Some(&max) => {
            scale(logits, max, draw.sampling.temperature);
            Ok(filters::draw(logits, draw.sampling, uniform(draw.sampling.seed, draw.position)))
        }
    }
}

/// Checks all logits without a branch for each.
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
