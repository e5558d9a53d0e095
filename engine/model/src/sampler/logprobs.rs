//! Log probabilities of a row of logits as the model gave them.

use windlass_engine_core::request::TokenId;
use windlass_engine_core::sampling::{TokenLogprob, TokenLogprobs};
use windlass_kernels::ops;

/// A copy of a row of logits, which sampling does not change.
pub(super) struct Distribution {
    logits: Vec<f32>,
    /// Logarithm of the sum of all exponentials.
    log_total: f64,
}

impl Distribution {
    pub(super) fn of(logits: &[f32]) -> Distribution {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        Distribution { logits: logits.to_vec(), log_total: f64::from(max) + sum.ln() }
    }

    /// Log probabilities of `token`, which must be in the vocabulary, and of the `top` most likely tokens.
    pub(super) fn tell(&self, token: TokenId, top: u32) -> TokenLogprobs {
        let likely = ops::top_k(&self.logits, (top as usize).min(self.logits.len()));
        let top = (1..).zip(likely).map(|(rank, (token, _))| self.logprob(token, rank)).collect();
        TokenLogprobs { chosen: self.logprob(token, self.rank(token)), top }
    }

    fn logprob(&self, token: TokenId, rank: u32) -> TokenLogprob {
        let logprob = (f64::from(self.logits[token as usize]) - self.log_total) as f32;
        TokenLogprob { token, logprob, rank }
    }

    /// Rank of a token: 1 for the most likely one; of equal logits the lowest token id comes first.
    fn rank(&self, token: TokenId) -> u32 {
        let own = self.logits[token as usize];
        let before = (0..).zip(&self.logits).filter(|&(other, &logit)| logit > own || (logit == own && other < token));
        1 + before.count() as u32
    }
}
