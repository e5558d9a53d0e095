//! `/v1/metrics`.

use crate::http::api::Api;
use axum::Json;
use axum::extract::State;
use std::sync::Arc;
use windlass_engine_api::native::ServerMetrics;

/// The last minute in numbers.
pub async fn show(State(api): State<Arc<Api>>) -> Json<ServerMetrics> {
    Json(api.door.monitor.recent(api.door.lifecycle.phase(), api.engine.unseen()))
}
