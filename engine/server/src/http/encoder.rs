//! The API port of an encoder: embeddings, scores and rankings instead of texts.

mod embeddings;
mod rank;

use super::door::Door;
use super::error::ApiError;
use super::{openai, openapi};
use crate::encoding::{EncoderHandle, Failed, Refused};
use crate::tenants::Lease;
use crate::text::encoder_text::EncoderText;
use axum::Router;
use axum::extract::{FromRef, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use std::sync::Arc;
use windlass_engine_model::EncoderInput;

/// What every route needs.
pub struct EncoderApi {
    /// What every request passes.
    pub door: Door,
    /// The encoder.
    pub encoder: EncoderHandle,
    /// Its tokenizer.
    pub text: EncoderText,
    /// Its vectors may be cut: their first numbers say the most.
    pub cuttable: bool,
}

impl FromRef<Arc<EncoderApi>> for Door {
    fn from_ref(api: &Arc<EncoderApi>) -> Door {
        api.door.clone()
    }
}

/// The routes.
pub fn router(api: Arc<EncoderApi>) -> Router {
    let door = api.door.clone();
    let routes = openai::model_routes()
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/score", post(rank::score))
        .route("/score", post(rank::score))
        .route("/v1/rerank", post(rank::rerank))
        .route("/v2/rerank", post(rank::rerank))
        .route("/rerank", post(rank::rerank))
        .route("/v1/chat/completions", post(does_not_generate))
        .route("/v1/completions", post(does_not_generate))
        .route("/v1/metrics", get(metrics))
        .route("/openapi.json", get(openapi::show_encoder))
        .with_state(api);
    door.guard(routes)
}

async fn does_not_generate() -> ApiError {
    let message = "this model reads texts and writes none; use /v1/embeddings, /v1/score or /v1/rerank";
    ApiError::new(StatusCode::BAD_REQUEST, "model_does_not_generate", message).param("model")
}

async fn metrics(State(door): State<Door>) -> axum::Json<windlass_engine_api::native::ServerMetrics> {
    axum::Json(door.monitor.recent(door.lifecycle.phase(), 0))
}

impl EncoderApi {
    /// Computes texts that `field` holds, and counts them.
    async fn run(&self, lease: &Lease, field: &str, texts: Vec<EncoderInput>) -> Result<Vec<Vec<f32>>, ApiError> {
        for text in &texts {
            self.check(field, text)?;
        }
        lease.spend(texts.iter().map(|text| text.len() as u32).sum());
        self.encoder.run(texts).await.map_err(refused)?.map_err(failed)
    }

    /// Text to tokens on a thread that may block.
    async fn tokenize(
        self: &Arc<EncoderApi>,
        field: &'static str,
        bytes: usize,
        encode: impl FnOnce(&EncoderText) -> Result<Vec<EncoderInput>, String> + Send + 'static,
    ) -> Result<Vec<EncoderInput>, ApiError> {
        /// Bytes that are tokenized in place.
        const INLINE: usize = 4 << 10;
        let wrong = |why: String| ApiError::bad_request("invalid_prompt", format!("`{field}`: {why}")).param(field);
        if bytes <= INLINE {
            return encode(&self.text).map_err(wrong);
        }
        let api = self.clone();
        let encoded = tokio::task::spawn_blocking(move || encode(&api.text)).await;
        let failed = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "the tokenizer failed");
        encoded.map_err(failed)?.map_err(wrong)
    }

    fn check(&self, field: &str, text: &EncoderInput) -> Result<(), ApiError> {
        let shape = self.encoder.shape();
        let (tokens, limit) = (text.len(), shape.max_tokens);
        if tokens > limit as usize {
            let message = format!(
                "a text in `{field}` has {tokens} tokens; the model reads {limit}, or fewer if cut by truncate_prompt_tokens"
            );
            return Err(ApiError::bad_request("context_length_exceeded", message).param(field));
        }
        match text.tokens.iter().find(|token| **token >= shape.vocabulary) {
            _ if tokens == 0 => {
                Err(ApiError::bad_request("invalid_value", format!("a text in `{field}` is empty")).param(field))
            }
            Some(token) => {
                let message = format!("`{field}` has token {token}; the model's tokens are below {}", shape.vocabulary);
                Err(ApiError::bad_request("invalid_value", message).param(field))
            }
            None => Ok(()),
        }
    }

    /// How many of a text's tokens count.
    fn cut(&self, asked: Option<i64>) -> Result<Option<usize>, ApiError> {
        match asked {
            None => Ok(None),
            Some(-1) => Ok(Some(self.encoder.shape().max_tokens as usize)),
            Some(tokens @ 2..) => Ok(Some(usize::try_from(tokens).unwrap_or(usize::MAX))),
            Some(tokens) => {
                let message = format!(
                    "`truncate_prompt_tokens` is {tokens}; it must be at least 2, or -1 for what the model reads"
                );
                Err(ApiError::bad_request("invalid_value", message).param("truncate_prompt_tokens"))
            }
        }
    }
}

/// A text's beginning, with the token that ends it.
fn shortened(mut text: EncoderInput, most: Option<usize>) -> EncoderInput {
    let Some(most) = most.filter(|most| *most < text.len()) else { return text };
    if let Some(end) = text.tokens.last().copied() {
        text.tokens.truncate(most - 1);
        text.tokens.push(end);
        text.types.truncate(most);
    }
    text
}

fn refused(refused: Refused) -> ApiError {
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", refused.to_string());
    error.retry_after(refused.retry_after_seconds)
}

fn failed(failed: Failed) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "engine_failed", failed.to_string())
}

/// How long texts are together, for where they are tokenized.
fn total_bytes<'a>(texts: impl IntoIterator<Item = &'a String>) -> usize {
    texts.into_iter().map(String::len).sum()
}

/// The cosine of the angle between two vectors.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    product(a, b) / (product(a, a).sqrt() * product(b, b).sqrt()).max(f32::MIN_POSITIVE)
}
