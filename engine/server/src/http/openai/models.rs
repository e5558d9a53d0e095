//! `/v1/models`.

use crate::http::door::Door;
use crate::http::error::ApiError;
use axum::Json;
use axum::extract::{Path, State};
use windlass_engine_api::models::{Model, ModelList};

/// Every served name.
pub async fn list(State(door): State<Door>) -> Json<ModelList> {
    Json(ModelList::new(door.served_names.iter().map(|name| model(&door, name)).collect()))
}

/// One served name.
pub async fn show(State(door): State<Door>, Path(name): Path<String>) -> Result<Json<Model>, ApiError> {
    door.check_model(&name)?;
    Ok(Json(model(&door, &name)))
}

fn model(door: &Door, name: &str) -> Model {
    Model::new(name, door.created, door.max_model_tokens)
}
