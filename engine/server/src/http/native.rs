//! The plain dialect: `/v1/generate`, `/tokenize`, `/detokenize`, `/v1/metrics`.

mod generate;
mod metrics;
mod tokens;

use super::api::Api;
use axum::Router;
use axum::routing::{get, post};
use std::sync::Arc;

/// Its routes.
pub fn routes() -> Router<Arc<Api>> {
    Router::new()
        .route("/v1/generate", post(generate::create))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/metrics", get(metrics::show))
}
