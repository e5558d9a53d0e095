//! `/v1/models`.

use super::api::Api;
use super::error::ApiError;
use axum::Json;
use axum::extract::{Path, State};
use std::sync::Arc;
use windlass_engine_api::models::{Model, ModelList};

/// Every served name.
pub async fn list(State(api): State<Arc<Api>>) -> Json<ModelList> {
    Json(ModelList::new(api.served_names.iter().map(|name| model(&api, name)).collect()))
}

/// One served name.
pub async fn show(State(api): State<Arc<Api>>, Path(name): Path<String>) -> Result<Json<Model>, ApiError> {
    api.check_model(&name)?;
    Ok(Json(model(&api, &name)))
}

fn model(api: &Api, name: &str) -> Model {
    Model::new(name, api.created, api.max_model_tokens)
}
