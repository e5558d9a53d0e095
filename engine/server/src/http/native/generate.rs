//! `/v1/generate`.

use crate::answer::{Answer, Interrupted, Piece};
use crate::http::api::Api;
use crate::http::auth::Admitted;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::respond::Head;
use crate::text::tokenizer::Tokenizer;
use axum::Json;
use axum::extract::State;
use std::sync::Arc;
use std::time::{Duration, Instant};
use windlass_engine_api::native::{GenerateRequest, GenerateResponse, Timings, TokenCounts};

/// Continues one prompt.
pub async fn create(
    State(api): State<Arc<Api>>,
    Admitted(lease): Admitted,
    body: JsonBody,
) -> Result<Json<GenerateResponse>, ApiError> {
    let began = Instant::now();
    let (request, room) = api.door.read(body, GenerateRequest::from_body).await?;
    let GenerateRequest { model, prompt, generation } = request;
    let model = api.door.model_or_first(model)?;
    let generation = api.generation(generation).await?;
    api.check_length(&prompt, "prompt")?;
    let tokens = api.tokenize(prompt, Tokenizer::encode_prompt).await?;
    drop(room);
    let answer = api.submit_one(&lease, tokens, &generation, u32::MAX, "prompt").await?;
    let timed = Timed::read(answer, began).await?;
    Ok(Json(timed.respond(Head::new("gen", &lease, &api.door, model))?))
}

/// A whole answer and when its parts came.
struct Timed {
    text: String,
    last: Option<Piece>,
    first_token: Duration,
    total: Duration,
}

impl Timed {
    async fn read(mut answer: Answer, began: Instant) -> Result<Timed, Interrupted> {
        let mut timed = Timed { text: String::new(), last: None, first_token: Duration::ZERO, total: Duration::ZERO };
        while let Some(piece) = answer.next().await {
            let piece = piece?;
            timed.total = began.elapsed();
            if piece.first {
                timed.first_token = timed.total;
            }
            timed.text.push_str(&piece.text);
            timed.last = Some(piece);
        }
        Ok(timed)
    }

    fn respond(self, head: Head) -> Result<GenerateResponse, Interrupted> {
        let timings = self.timings();
        let broken = || Interrupted::GivenUp("the answer has no end".to_owned());
        let last = self.last.ok_or_else(broken)?;
        let end = last.end.ok_or_else(broken)?;
        let usage = last.usage;
        Ok(GenerateResponse {
            id: head.id,
            model: head.model,
            text: self.text,
            tokens: TokenCounts {
                prompt: usage.prompt_tokens,
                cached: usage.prompt_tokens_details.cached_tokens,
                generated: usage.completion_tokens,
            },
            finish_reason: end.reason,
            timings,
        })
    }

    fn timings(&self) -> Timings {
        let generated = self.last.as_ref().map_or(0, |last| last.usage.completion_tokens);
        let later = generated.saturating_sub(1);
        let decode = (self.total - self.first_token).as_secs_f64() * 1000.0;
        Timings {
            time_to_first_token_ms: self.first_token.as_secs_f64() * 1000.0,
            time_per_output_token_ms: if later == 0 { 0.0 } else { decode / f64::from(later) },
            total_ms: self.total.as_secs_f64() * 1000.0,
        }
    }
}
