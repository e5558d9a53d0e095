//! `/v1/chat/completions`.

use super::api::Api;
use super::auth::Admitted;
use super::body::JsonBody;
use super::error::ApiError;
use super::respond::{EventBuffer, Events, Head};
use super::{logprobs, stream};
use crate::answer::{Answer, Piece, Thoughts, Whole};
use crate::generation::{Generation, Shows};
use crate::text::tokenizer::Tokenizer;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use windlass_engine_api::chat::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatRequest, Delta, Message, Role,
};
use windlass_engine_api::error::FieldError;
use windlass_engine_api::logprobs::ChatLogprobs;
use windlass_engine_api::usage::Usage;
use windlass_engine_core::request::TokenId;

/// Answers a conversation, whole or streamed.
pub async fn create(
    State(api): State<Arc<Api>>,
    Admitted(lease): Admitted,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let ChatRequest { model, messages, generation: fields } = api.read(&body, ChatRequest::from_body)?;
    api.check_model(&model)?;
    let streaming = fields.stream;
    let generation = api.generation(fields).await?;
    check_choices(&generation)?;
    let prompt = prompt(&api, &messages).await?;
    let answers = api.submit(&lease, prompt, &generation, u32::MAX, "messages").await?;
    let writer = Writer {
        head: Head::new("chatcmpl", &lease, model),
        tokenizer: api.tokenizer.clone(),
        shows: generation.shows,
    };
    match streaming {
        Some(options) => Ok(stream::respond(answers, writer, options, &api.patience)),
        None => Ok(Json(writer.whole(answers).await?).into_response()),
    }
}

/// Chats give every answer they generate.
fn check_choices(generation: &Generation) -> Result<(), FieldError> {
    match generation.choices.generated > generation.choices.given {
        true => Err(FieldError::invalid("best_of", "`best_of` greater than `n` is for /v1/completions; remove it")),
        false => Ok(()),
    }
}

/// The conversation as tokens, by the model's template.
pub(super) async fn prompt(api: &Arc<Api>, messages: &[Message]) -> Result<Vec<TokenId>, ApiError> {
    let Some(template) = &api.template else {
        let message = "this model has no chat template; use /v1/completions";
        return Err(ApiError::bad_request("no_chat_template", message));
    };
    let text = template.render(messages)?;
    api.check_length(&text, "messages")?;
    api.tokenize(text, Tokenizer::encode).await
}

/// Writes answers as this endpoint does.
struct Writer {
    head: Head,
    tokenizer: Arc<Tokenizer>,
    shows: Shows,
}

impl Writer {
    async fn whole(self, answers: Vec<Answer>) -> Result<ChatCompletion, ApiError> {
        let answers = futures::future::try_join_all(answers.into_iter().map(Answer::whole)).await?;
        let usage = answers.iter().fold(Usage::default(), |sum, answer| sum + answer.usage);
        let prompt = answers.first().and_then(|answer| answer.thoughts.prompt.as_ref());
        let prompt = prompt.filter(|_| self.shows.prompt_logprobs);
        let prompt_logprobs = prompt.map(|prompt| logprobs::prompt(self.tokenizer.vocabulary(), prompt));
        let choices = (0..).zip(answers).map(|answer| self.choice(answer)).collect();
        let Head { id, created, model } = self.head;
        let object = "chat.completion".to_owned();
        Ok(ChatCompletion { id, object, created, model, choices, usage, prompt_logprobs })
    }

    fn choice(&self, (index, answer): (u32, Whole)) -> ChatChoice {
        let message = AssistantMessage { role: Role::Assistant, content: answer.text, refusal: None };
        let (finish_reason, stop_reason) = (answer.end.reason, answer.end.stop);
        ChatChoice { index, message, logprobs: self.logprobs(&answer.thoughts), finish_reason, stop_reason }
    }

    fn logprobs(&self, thoughts: &Thoughts) -> Option<ChatLogprobs> {
        self.shows.logprobs.then(|| logprobs::chat(self.tokenizer.vocabulary(), &thoughts.tokens))
    }

    fn chunk(&self, choices: &[ChatChunkChoice<'_>], usage: Option<Usage>, out: &mut EventBuffer) {
        let Head { id, created, model } = &self.head;
        out.event(&ChatChunk { id, object: "chat.completion.chunk", created: *created, model, choices, usage });
    }
}

impl Events for Writer {
    fn piece(&self, index: u32, piece: &Piece, usage: Option<Usage>, out: &mut EventBuffer) {
        let plain =
            ChatChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason: None, stop_reason: None };
        if piece.first {
            let delta = Delta { role: Some(Role::Assistant), content: Some("") };
            self.chunk(&[ChatChunkChoice { delta, ..plain.clone() }], usage, out);
        }
        if !piece.text.is_empty() || !piece.thoughts.tokens.is_empty() {
            let delta = Delta { role: None, content: Some(&piece.text) };
            let logprobs = self.logprobs(&piece.thoughts);
            self.chunk(&[ChatChunkChoice { delta, logprobs, ..plain.clone() }], usage, out);
        }
        if let Some(end) = &piece.end {
            let (finish_reason, stop_reason) = (Some(end.reason), end.stop.clone());
            self.chunk(&[ChatChunkChoice { finish_reason, stop_reason, ..plain }], usage, out);
        }
    }

    fn usage(&self, usage: Usage, out: &mut EventBuffer) {
        self.chunk(&[], Some(usage), out);
    }
}
