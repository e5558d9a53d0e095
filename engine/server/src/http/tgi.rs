//! Text Generation Inference's dialect. Its clients post to `/` when they are given an address and nothing else.

mod error;
mod generate;
mod stream;

use super::api::Api;
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use std::sync::Arc;
use windlass_engine_api::tgi::Info;

/// Its routes.
pub fn routes() -> Router<Arc<Api>> {
    Router::new()
        .route("/", post(generate::either))
        .route("/generate", post(generate::whole))
        .route("/generate_stream", post(generate::streamed))
        .route("/info", get(info))
}

async fn info(State(api): State<Arc<Api>>) -> Json<Info> {
    Json(Info {
        model_id: api.door.served_names[0].clone(),
        model_sha: None,
        max_total_tokens: api.door.max_model_tokens,
        max_input_tokens: api.door.max_model_tokens.saturating_sub(1),
        max_stop_sequences: crate::generation::MAX_STOPS as u32,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    })
}
