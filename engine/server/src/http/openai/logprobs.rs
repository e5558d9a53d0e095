//! What the model thought of tokens, in the forms that the endpoints have for it.

use crate::answer::{PromptThoughts, Thoughts};
use crate::text::vocabulary::Vocabulary;
use std::iter::once;
use windlass_engine_api::logprobs::{
    ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TopLogprob,
};
use windlass_engine_core::request::TokenId;
use windlass_engine_core::sampling::{TokenLogprob, TokenLogprobs};

/// As a chat's choice has it.
pub fn chat(vocabulary: &Vocabulary, tokens: &[TokenLogprobs]) -> ChatLogprobs {
    let one = |token: &TokenLogprob| TopLogprob {
        token: vocabulary.text(token.token).into_owned(),
        logprob: token.logprob,
        bytes: vocabulary.spelling(token.token).to_vec(),
    };
    let entry = |scores: &TokenLogprobs| ChatLogprob {
        token: one(&scores.chosen),
        top_logprobs: scores.top.iter().map(one).collect(),
    };
    ChatLogprobs { content: tokens.iter().map(entry).collect(), refusal: None }
}

/// As a completion's choice has it; the prompt's tokens come first if they are shown.
pub fn completion(vocabulary: &Vocabulary, thoughts: &Thoughts, shows_prompt: bool) -> CompletionLogprobs {
    let mut told = CompletionLogprobs::default();
    let prompt = thoughts.prompt.as_ref().filter(|_| shows_prompt);
    let mut offset = if prompt.is_some() { 0 } else { thoughts.offset };
    let first = prompt.map(|prompt| (prompt.first, None));
    let rest = prompt.iter().flat_map(|prompt| &prompt.rest).chain(&thoughts.tokens);
    for (token, scores) in first.into_iter().chain(rest.map(|scores| (scores.chosen.token, Some(scores)))) {
        let text = vocabulary.text(token).into_owned();
        told.text_offset.push(offset);
        offset += text.chars().count() as u32;
        told.tokens.push(text);
        told.token_logprobs.push(scores.map(|scores| scores.chosen.logprob));
        told.top_logprobs.push(scores.map(|scores| {
            let tokens = once(&scores.chosen).chain(&scores.top);
            tokens.map(|token| (vocabulary.text(token.token).into_owned(), token.logprob)).collect()
        }));
    }
    told
}

/// As vLLM tells of a prompt.
pub fn prompt(vocabulary: &Vocabulary, thoughts: &PromptThoughts) -> PromptLogprobs {
    let one = |token: &TokenLogprob| -> (TokenId, PromptLogprob) {
        let decoded_token = vocabulary.text(token.token).into_owned();
        (token.token, PromptLogprob { logprob: token.logprob, rank: token.rank, decoded_token })
    };
    let entry = |scores: &TokenLogprobs| Some(once(&scores.chosen).chain(&scores.top).map(one).collect());
    once(None).chain(thoughts.rest.iter().map(entry)).collect()
}
