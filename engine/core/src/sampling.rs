//! Sampling parameters, and logprobs.

use crate::request::TokenId;

/// How a token is sampled from logits. With the same parameters, tokens and position, the same token is sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token, the lowest id among equals.
    pub temperature: f32,
    /// Keep this many most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probabilities reach this sum, in (0, 1].
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one, in [0, 1].
    pub min_p: f32,
    /// Keep the tokens whose surprise is nearest the distribution's entropy until their probabilities reach this sum,
    /// in (0, 1] (Meister et al., "Locally typical sampling", 2022).
    pub typical_p: f32,
    /// Penalties on repeated tokens.
    pub penalties: Penalties,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Token sequences that are never completed, none of them empty.
    pub bad_words: Vec<Vec<TokenId>>,
    /// If not empty, only these tokens are drawn.
    pub allowed_tokens: Vec<TokenId>,
    /// Key of the counter-based random generator; the counter is the position of the token.
    pub seed: u64,
}

/// Penalties on repeated tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Divides positive logits and multiplies negative ones of tokens in the prompt or the answer; 1 has no effect
    /// (Keskar et al., "CTRL", 2019).
    pub repetition: f32,
    /// Subtracted for each occurrence of the token in the answer.
    pub frequency: f32,
    /// Subtracted if the token is in the answer.
    pub presence: f32,
}

impl Penalties {
    /// No penalties.
    pub const NONE: Penalties = Penalties { repetition: 1.0, frequency: 0.0, presence: 0.0 };
}

impl Sampling {
    /// Greedy sampling: always the most likely token.
    pub const GREEDY: Sampling = Sampling::at_temperature(0.0);

    /// Samples from the model's own distribution.
    pub const RANDOM: Sampling = Sampling::at_temperature(1.0);

    /// A temperature and no other parameter.
    pub const fn at_temperature(temperature: f32) -> Sampling {
        Sampling {
            temperature,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            penalties: Penalties::NONE,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            allowed_tokens: Vec::new(),
            seed: 0,
        }
    }

    /// Whether sampling depends on the tokens before.
    pub fn reads_history(&self) -> bool {
        self.penalties != Penalties::NONE || self.bad_words.iter().any(|word| word.len() > 1)
    }
}

/// The logprobs at one position of a sequence: natural logarithms of the model's probabilities, before penalties,
/// temperature and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token at the position.
    pub chosen: TokenLogprob,
    /// The most likely tokens, most likely first, as many as were requested.
    pub top: Vec<TokenLogprob>,
}

/// Logprob and rank of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Rank among all tokens; 1 is the most likely.
    pub rank: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_and_words_of_several_tokens_read_what_came_before() {
        let sampling = |penalties, bad_words: &[&[u32]]| Sampling {
            penalties,
            bad_words: bad_words.iter().map(|word| word.to_vec()).collect(),
            ..Sampling::GREEDY
        };
        let penalized = Penalties { presence: 0.5, ..Penalties::NONE };
        assert!(!sampling(Penalties::NONE, &[]).reads_history());
        assert!(!sampling(Penalties::NONE, &[&[1], &[]]).reads_history());
        assert!(sampling(Penalties::NONE, &[&[1], &[1, 2]]).reads_history());
        assert!(sampling(penalized, &[]).reads_history());
    }
}
