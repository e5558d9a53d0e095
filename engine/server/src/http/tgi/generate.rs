//! `/generate`, `/generate_stream`, and `/`.

use super::error::TgiError;
use super::stream::TgiEvents;
use crate::answer::{Answer, Interrupted, Piece};
use crate::http::api::Api;
use crate::http::auth::Admitted;
use crate::http::bodies::Room;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::stream;
use crate::tenants::Lease;
use crate::text::tokenizer::Tokenizer;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use windlass_engine_api::generation::{FinishReason as Ending, StopReason, StreamOptions};
use windlass_engine_api::tgi::{Details, FinishReason, GenerateRequest, GenerateResponse, Token};

/// The whole continuation.
pub async fn whole(
    State(api): State<Arc<Api>>,
    Admitted(lease): Admitted,
    body: JsonBody,
) -> Result<Json<GenerateResponse>, TgiError> {
    let read = api.door.read(body, GenerateRequest::from_body).await?;
    Ok(Json(answer(&api, &lease, read).await?))
}

/// The continuation token by token.
pub async fn streamed(
    State(api): State<Arc<Api>>,
    Admitted(lease): Admitted,
    body: JsonBody,
) -> Result<Response, TgiError> {
    let read = api.door.read(body, GenerateRequest::from_body).await?;
    events(&api, &lease, read).await
}

/// What the request asks for; a whole answer is the only element of a list.
pub async fn either(
    State(api): State<Arc<Api>>,
    Admitted(lease): Admitted,
    body: JsonBody,
) -> Result<Response, TgiError> {
    let read = api.door.read(body, GenerateRequest::from_body).await?;
    match read.0.stream {
        true => events(&api, &lease, read).await,
        false => Ok(Json([answer(&api, &lease, read).await?]).into_response()),
    }
}

/// A request and the memory that it has until it is tokens.
type Read = (GenerateRequest, Room);

async fn events(api: &Arc<Api>, lease: &Lease, (request, room): Read) -> Result<Response, TgiError> {
    // Every token is told with its log probability.
    let request = GenerateRequest { details: true, ..request };
    let (seed, prefix) = (request.generation.seed, prefix(&request));
    let answer = submit(api, lease, (request, room)).await?;
    let options = StreamOptions::default();
    Ok(stream::respond(vec![answer], TgiEvents::new(prefix, seed), options, &api.door.patience))
}

async fn answer(api: &Arc<Api>, lease: &Lease, (request, room): Read) -> Result<GenerateResponse, TgiError> {
    let (seed, details, prefix) = (request.generation.seed, request.details, prefix(&request));
    let answer = submit(api, lease, (request, room)).await?;
    let mut response = read(answer, prefix, seed).await?;
    response.details = response.details.filter(|_| details);
    Ok(response)
}

/// What the text begins with.
fn prefix(request: &GenerateRequest) -> String {
    if request.return_full_text { request.inputs.clone() } else { String::new() }
}

async fn submit(api: &Arc<Api>, lease: &Lease, (request, room): Read) -> Result<Answer, ApiError> {
    let GenerateRequest { inputs, truncate, mut generation, details, .. } = request;
    if details {
        generation.logprobs = Some(0);
    }
    let generation = api.generation(generation).await?;
    if truncate.is_none() {
        api.check_length(&inputs, "inputs")?;
    }
    let mut tokens = api.tokenize(inputs, Tokenizer::encode_prompt).await?;
    if let Some(keep) = truncate {
        tokens.drain(..tokens.len().saturating_sub(keep as usize));
    }
    drop(room);
    api.submit_one(lease, tokens, &generation, u32::MAX, "inputs").await
}

async fn read(mut answer: Answer, prefix: String, seed: Option<i64>) -> Result<GenerateResponse, Interrupted> {
    let (mut generated_text, mut tokens) = (prefix, Vec::new());
    while let Some(piece) = answer.next().await {
        let piece = piece?;
        generated_text.push_str(&piece.text);
        let generated_tokens = piece.usage.completion_tokens;
        let reason = piece.end.as_ref().map(|end| finish_reason(end.reason, end.stop.as_ref()));
        tokens.extend(split(&piece, reason));
        if let Some(finish_reason) = reason {
            let details = Details { finish_reason, generated_tokens, seed, prefill: Vec::new(), tokens };
            return Ok(GenerateResponse { generated_text, details: Some(details) });
        }
    }
    Err(Interrupted::GivenUp("the answer has no end".to_owned()))
}

/// The tokens of a piece, whose text the last of them completes.
pub fn split(piece: &Piece, end: Option<FinishReason>) -> impl Iterator<Item = Token> {
    let last = piece.tokens.len().saturating_sub(1);
    let special = end == Some(FinishReason::EosToken);
    piece.tokens.iter().enumerate().map(move |(index, id)| Token {
        id: *id,
        text: if index == last { piece.text.clone() } else { String::new() },
        logprob: piece.thoughts.tokens.get(index).map(|scores| scores.chosen.logprob),
        special: special && index == last,
    })
}

/// This dialect's word for how an answer ended.
pub fn finish_reason(reason: Ending, stop: Option<&StopReason>) -> FinishReason {
    match (reason, stop) {
        (Ending::Length, _) => FinishReason::Length,
        (_, Some(StopReason::Text(_))) => FinishReason::StopSequence,
        _ => FinishReason::EosToken,
    }
}
