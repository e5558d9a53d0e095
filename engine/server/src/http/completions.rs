//! `/v1/completions`.

use super::api::Api;
use super::auth::Admitted;
use super::body::JsonBody;
use super::error::ApiError;
use super::respond::{EventBuffer, Events, Head};
use super::stream;
use crate::answer::{Answer, Piece, Whole};
use crate::generation::Generation;
use crate::tenants::Lease;
use crate::text::tokenizer::Tokenizer;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use windlass_engine_api::completions::{
    Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice, CompletionRequest, Prompt,
};
use windlass_engine_api::usage::Usage;

/// OpenAI's limit where the client gives none.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Continues one or more prompts, whole or streamed.
pub async fn create(
    State(api): State<Arc<Api>>,
    Admitted(lease): Admitted,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let CompletionRequest { model, prompts, generation: fields } = api.read(&body, CompletionRequest::from_body)?;
    api.check_model(&model)?;
    let streaming = fields.stream;
    let generation = api.generation(fields)?;
    let answers = submit(&api, &lease, prompts, &generation).await?;
    let head = Head::new("cmpl", &lease, model);
    match streaming {
        Some(options) => Ok(stream::respond(answers, CompletionEvents(head), options, &api.patience)),
        None => Ok(Json(whole(head, answers).await?).into_response()),
    }
}

/// One answer per prompt. Where one is refused, the others are dropped, which ends them.
async fn submit(
    api: &Arc<Api>,
    lease: &Lease,
    prompts: Vec<Prompt>,
    generation: &Generation,
) -> Result<Vec<Answer>, ApiError> {
    let mut answers = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let tokens = match prompt {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Text(text) => {
                api.check_length(&text, "prompt")?;
                api.tokenize(text, Tokenizer::encode_prompt).await?
            }
        };
        answers.push(api.submit(lease, tokens, generation, DEFAULT_MAX_TOKENS, "prompt").await?);
    }
    Ok(answers)
}

async fn whole(head: Head, answers: Vec<Answer>) -> Result<Completion, ApiError> {
    let answers = futures::future::try_join_all(answers.into_iter().map(Answer::whole)).await?;
    let usage = answers.iter().fold(Usage::default(), |sum, answer| sum + answer.usage);
    Ok(Completion {
        id: head.id,
        object: "text_completion".to_owned(),
        created: head.created,
        model: head.model,
        choices: (0..).zip(answers).map(choice).collect(),
        usage,
    })
}

fn choice((index, answer): (u32, Whole)) -> CompletionChoice {
    let (finish_reason, stop_reason) = (answer.end.reason, answer.end.stop);
    CompletionChoice { index, text: answer.text, logprobs: None, finish_reason, stop_reason }
}

struct CompletionEvents(Head);

impl CompletionEvents {
    fn chunk(&self, choices: &[CompletionChunkChoice<'_>], usage: Option<Usage>, out: &mut EventBuffer) {
        let Head { id, created, model } = &self.0;
        out.event(&CompletionChunk { id, object: "text_completion", created: *created, model, choices, usage });
    }
}

impl Events for CompletionEvents {
    fn piece(&self, index: u32, piece: &Piece, usage: Option<Usage>, out: &mut EventBuffer) {
        if piece.text.is_empty() && piece.end.is_none() {
            return;
        }
        let finish_reason = piece.end.as_ref().map(|end| end.reason);
        let stop_reason = piece.end.as_ref().and_then(|end| end.stop.clone());
        let choice = CompletionChunkChoice { index, text: &piece.text, logprobs: None, finish_reason, stop_reason };
        self.chunk(&[choice], usage, out);
    }

    fn usage(&self, usage: Usage, out: &mut EventBuffer) {
        self.chunk(&[], Some(usage), out);
    }
}
