//! OpenAI's dialect: `/v1/models`, `/v1/chat/completions`, `/v1/completions`.

mod best;
mod chat;
mod completions;
mod logprobs;
mod models;

use super::api::Api;
use super::door::Door;
use axum::Router;
use axum::extract::FromRef;
use axum::routing::{get, post};
pub use chat::prompt;
use std::sync::Arc;

/// Its routes over a model that generates.
pub fn routes() -> Router<Arc<Api>> {
    model_routes().route("/v1/chat/completions", post(chat::create)).route("/v1/completions", post(completions::create))
}

/// Those that tell what is served, whatever the model does.
pub fn model_routes<S: Clone + Send + Sync + 'static>() -> Router<S>
where
    Door: FromRef<S>,
{
    Router::new().route("/v1/models", get(models::list)).route("/v1/models/{*name}", get(models::show))
}
