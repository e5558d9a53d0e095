//! `/v1/chat/completions`.

use super::api::Api;
use super::auth::Admitted;
use super::body::JsonBody;
use super::error::ApiError;
use super::respond::{EventBuffer, Events, Head};
use super::stream;
use crate::answer::{Piece, Whole};
use crate::text::tokenizer::Tokenizer;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use windlass_engine_api::chat::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatRequest, Delta, Message, Role,
};
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
    let generation = api.generation(fields)?;
    let prompt = prompt(&api, &messages).await?;
    let answer = api.submit(&lease, prompt, &generation, u32::MAX, "messages").await?;
    let head = Head::new("chatcmpl", &lease, model);
    match streaming {
        Some(options) => Ok(stream::respond(vec![answer], ChatEvents(head), options, &api.patience)),
        None => Ok(Json(whole(head, answer.whole().await?)).into_response()),
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

fn whole(head: Head, answer: Whole) -> ChatCompletion {
    let message = AssistantMessage { role: Role::Assistant, content: answer.text, refusal: None };
    let (finish_reason, stop_reason) = (answer.end.reason, answer.end.stop);
    ChatCompletion {
        id: head.id,
        object: "chat.completion".to_owned(),
        created: head.created,
        model: head.model,
        choices: vec![ChatChoice { index: 0, message, logprobs: None, finish_reason, stop_reason }],
        usage: answer.usage,
    }
}

struct ChatEvents(Head);

impl ChatEvents {
    fn chunk(&self, choices: &[ChatChunkChoice<'_>], usage: Option<Usage>, out: &mut EventBuffer) {
        let Head { id, created, model } = &self.0;
        out.event(&ChatChunk { id, object: "chat.completion.chunk", created: *created, model, choices, usage });
    }
}

impl Events for ChatEvents {
    fn piece(&self, index: u32, piece: &Piece, usage: Option<Usage>, out: &mut EventBuffer) {
        let plain =
            ChatChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason: None, stop_reason: None };
        if piece.first {
            let delta = Delta { role: Some(Role::Assistant), content: Some("") };
            self.chunk(&[ChatChunkChoice { delta, ..plain.clone() }], usage, out);
        }
        if !piece.text.is_empty() {
            let delta = Delta { role: None, content: Some(&piece.text) };
            self.chunk(&[ChatChunkChoice { delta, ..plain.clone() }], usage, out);
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
