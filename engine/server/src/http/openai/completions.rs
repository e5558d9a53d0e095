//! `/v1/completions`.

use super::{best, logprobs};
use crate::answer::{Answer, Piece, Thoughts, Whole};
use crate::generation::{Choices, Generation, MAX_CHOICES, Shows};
use crate::http::api::Api;
use crate::http::auth::Admitted;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::respond::{EventBuffer, Events, Head};
use crate::http::stream;
use crate::text::tokenizer::Tokenizer;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use windlass_engine_api::completions::{
    Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice, CompletionRequest, Prompt,
};
use windlass_engine_api::error::FieldError;
use windlass_engine_api::logprobs::CompletionLogprobs;
use windlass_engine_api::usage::Usage;
use windlass_engine_core::request::TokenId;

/// OpenAI's limit where the client gives none.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Continues one or more prompts, whole or streamed.
pub async fn create(
    State(api): State<Arc<Api>>,
    Admitted(lease): Admitted,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let (request, room) = api.door.read(body, CompletionRequest::from_body).await?;
    let CompletionRequest { model, prompts, generation: fields } = request;
    api.door.check_model(&model)?;
    let streaming = fields.stream;
    let generation = api.generation(fields).await?;
    check_choices(&generation, prompts.len(), streaming.is_some())?;
    let prompts = tokens(&api, prompts).await?;
    drop(room);
    let answers = api.submit(&lease, prompts, &generation, DEFAULT_MAX_TOKENS, "prompt").await?;
    let writer = Writer {
        head: Head::new("cmpl", &lease, &api.door, model),
        tokenizer: api.tokenizer.clone(),
        shows: generation.shows,
    };
    match streaming {
        Some(options) => Ok(stream::respond(answers, writer, options, &api.door.patience)),
        None => Ok(Json(writer.whole(answers, generation.choices).await?).into_response()),
    }
}

/// Refuses more answers than one request may ask for, and a choice among answers that were shown already.
fn check_choices(generation: &Generation, prompts: usize, streaming: bool) -> Result<(), FieldError> {
    let Choices { given, generated } = generation.choices;
    if streaming && generated > given {
        let message = "`best_of` greater than `n` chooses among whole answers, so it does not go with `stream`";
        return Err(FieldError::invalid("best_of", message));
    }
    let answers = prompts * generated as usize;
    if prompts > 1 && answers > MAX_CHOICES as usize {
        let message = format!("{prompts} prompts with {generated} answers each; at most {MAX_CHOICES} in one request");
        return Err(FieldError::invalid("n", message));
    }
    Ok(())
}

async fn tokens(api: &Arc<Api>, prompts: Vec<Prompt>) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let mut tokens = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        tokens.push(match prompt {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Text(text) => {
                api.check_length(&text, "prompt")?;
                api.tokenize(text, Tokenizer::encode_prompt).await?
            }
        });
    }
    Ok(tokens)
}

/// Writes answers as this endpoint does.
struct Writer {
    head: Head,
    tokenizer: Arc<Tokenizer>,
    shows: Shows,
}

impl Writer {
    async fn whole(self, answers: Vec<Answer>, choices: Choices) -> Result<Completion, ApiError> {
        let answers = futures::future::try_join_all(answers.into_iter().map(Answer::whole)).await?;
        let usage = answers.iter().fold(Usage::default(), |sum, answer| sum + answer.usage);
        let given = best::of_each_prompt(answers, choices);
        let choices = (0..).zip(given).map(|answer| self.choice(answer)).collect();
        let Head { id, created, model, fingerprint } = self.head;
        let (object, system_fingerprint) = ("text_completion".to_owned(), fingerprint.to_string());
        Ok(Completion { id, object, created, model, system_fingerprint, choices, usage })
    }

    fn choice(&self, (index, answer): (u32, Whole)) -> CompletionChoice {
        let (finish_reason, stop_reason) = (answer.end.reason, answer.end.stop);
        let prompt = answer.thoughts.prompt.as_ref().filter(|_| self.shows.prompt_logprobs);
        CompletionChoice {
            index,
            text: answer.text,
            logprobs: self.logprobs(&answer.thoughts),
            finish_reason,
            stop_reason,
            prompt_logprobs: prompt.map(|prompt| logprobs::prompt(self.tokenizer.vocabulary(), prompt)),
        }
    }

    fn logprobs(&self, thoughts: &Thoughts) -> Option<CompletionLogprobs> {
        let vocabulary = self.tokenizer.vocabulary();
        self.shows.logprobs.then(|| logprobs::completion(vocabulary, thoughts, self.shows.prompt))
    }

    fn chunk(&self, choices: &[CompletionChunkChoice<'_>], usage: Option<Usage>, out: &mut EventBuffer) {
        let Head { id, created, model, fingerprint: system_fingerprint } = &self.head;
        let (object, created) = ("text_completion", *created);
        out.event(&CompletionChunk { id, object, created, model, system_fingerprint, choices, usage });
    }
}

impl Events for Writer {
    fn piece(&mut self, index: u32, piece: &Piece, usage: Option<Usage>, out: &mut EventBuffer) {
        if piece.text.is_empty() && piece.end.is_none() && piece.thoughts.tokens.is_empty() {
            return;
        }
        let finish_reason = piece.end.as_ref().map(|end| end.reason);
        let stop_reason = piece.end.as_ref().and_then(|end| end.stop.clone());
        let logprobs = self.logprobs(&piece.thoughts);
        let choice = CompletionChunkChoice { index, text: &piece.text, logprobs, finish_reason, stop_reason };
        self.chunk(&[choice], usage, out);
    }

    fn usage(&self, usage: Usage, out: &mut EventBuffer) {
        self.chunk(&[], Some(usage), out);
    }
}
