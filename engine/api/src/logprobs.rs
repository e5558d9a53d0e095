//! Log probabilities as the endpoints spell them: natural logarithms, of the model's own distribution.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most tokens that may be asked for beside each one.
pub const MAX_TOP_LOGPROBS: u32 = 20;

/// Of a chat's answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatLogprobs {
    /// One entry per token.
    pub content: Vec<ChatLogprob>,
    /// Always absent.
    pub refusal: Option<Vec<ChatLogprob>>,
}

/// Of one token of a chat's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatLogprob {
    /// The token.
    #[serde(flatten)]
    pub token: TopLogprob,
    /// The most likely tokens at its place, most likely first.
    pub top_logprobs: Vec<TopLogprob>,
}

/// A token and its log probability.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// Its text; bytes that are no character of their own show as U+FFFD.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Its text as bytes.
    pub bytes: Vec<u8>,
}

/// Of a completion: lists of one entry per token, those of an echoed prompt first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionLogprobs {
    /// Texts of the tokens.
    pub tokens: Vec<String>,
    /// Absent for the first token of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most likely tokens at each place, and the token itself. Absent for the first token of a prompt.
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Where each token begins in the text, in characters.
    pub text_offset: Vec<u32>,
}

/// Of a prompt (vLLM's extension): one entry per token, by token id; absent for the first token.
pub type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

/// Of one token at one place of a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprob {
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: u32,
    /// Its text.
    pub decoded_token: String,
}
