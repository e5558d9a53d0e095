//! `/v1/chat/completions`.

mod writer;

use crate::dialogue::Expected;
use crate::generation::Generation;
use crate::http::api::Api;
use crate::http::auth::Admitted;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::respond::Head;
use crate::http::stream;
use crate::text::tokenizer::Tokenizer;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use windlass_engine_api::chat::{ChatRequest, Conversation};
use windlass_engine_api::error::FieldError;
use windlass_engine_api::structure::Structure;
use windlass_engine_api::tools::{ToolChoice, Tools};
use windlass_engine_core::request::TokenId;
use writer::Writer;

/// Answers a conversation, whole or streamed.
pub async fn create(
    State(api): State<Arc<Api>>,
    Admitted(lease): Admitted,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let (request, room) = api.door.read(body, ChatRequest::from_body).await?;
    let ChatRequest { model, conversation, include_reasoning, generation: mut fields } = request;
    api.door.check_model(&model)?;
    let streaming = fields.stream;
    fields.structure = structure(&api, fields.structure, conversation.tools.as_ref())?;
    let (prompt, expected) = prompt(&api, &conversation).await?;
    drop(conversation);
    let generation = api.generation(fields).await?.with_dialogue(expected.thought, api.dialogue.marks());
    check_choices(&generation)?;
    drop(room);
    let answers = api.submit(&lease, vec![prompt], &generation, u32::MAX, "messages").await?;
    let head = Head::new("chatcmpl", &lease, &api.door, model);
    let (tokenizer, shows) = (api.tokenizer.clone(), generation.shows);
    let writer = Writer::new(head, tokenizer, shows, expected, include_reasoning, answers.len());
    match streaming {
        Some(options) => Ok(stream::respond(answers, writer, options, &api.door.patience)),
        None => Ok(Json(writer.whole(answers).await?).into_response()),
    }
}

/// Calls that the client insists on are a form of the answer; so are those that it leaves to the model, where tools are
/// strict and it asks for no other form.
fn structure(api: &Api, asked: Option<Structure>, tools: Option<&Tools>) -> Result<Option<Structure>, FieldError> {
    let Some(tools) = tools else { return Ok(asked) };
    match (asked, api.dialogue.form(tools, api.tokenizer.vocabulary())?) {
        (Some(asked), Some(_)) if tools.choice != ToolChoice::Auto => {
            let message =
                format!("`tool_choice` says what the answer is, and so does `{}`; send one of them", asked.field);
            Err(FieldError::invalid("tool_choice", message))
        }
        (asked, form) => Ok(asked.or(form)),
    }
}

/// Chats give every answer they generate.
fn check_choices(generation: &Generation) -> Result<(), FieldError> {
    match generation.choices.generated > generation.choices.given {
        true => Err(FieldError::invalid("best_of", "`best_of` greater than `n` is for /v1/completions; remove it")),
        false => Ok(()),
    }
}

/// The conversation as tokens, and what the answer will look like.
pub async fn prompt(api: &Arc<Api>, conversation: &Conversation) -> Result<(Vec<TokenId>, Expected), ApiError> {
    let (text, expected) = api.dialogue.prompt(conversation).await?;
    api.check_length(&text, "messages")?;
    Ok((api.tokenize(text, Tokenizer::encode).await?, expected))
}
