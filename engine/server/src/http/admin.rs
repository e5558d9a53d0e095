//! The admin port: probes, metrics, the operator's stats, drain. In no Service; who may speak to it, [`admin_guard`] says.

use super::{admin_guard, admin_sleep};
use crate::driver::EngineHandle;
use crate::lifecycle::{Lifecycle, Rest, Stage};
use crate::monitor::Monitor;
use crate::tenants::Tenants;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;
use windlass_engine_contract::paths;
use windlass_engine_contract::stats::Stats;

/// The exposition format's version 0.0.4.
const EXPOSITION: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What the admin routes need. The engine comes later than the port.
pub struct Admin {
    /// What the program knows about itself.
    pub monitor: Arc<Monitor>,
    /// Where it is in its life.
    pub lifecycle: Lifecycle,
    /// The engine, once it stands.
    pub engine: OnceLock<EngineHandle>,
    /// Whose keys are taken on the API port, where any are asked for.
    pub tenants: Option<Arc<Tenants>>,
    /// Who may ask for more than probes; without tokens, everybody who reaches the port.
    pub tokens: Option<Tenants>,
    /// Held by whoever puts the engine to sleep or wakes it: one after the other.
    pub turn: Mutex<()>,
    /// How long streams may take to finish before sleep.
    pub drain_timeout: Duration,
    /// With work and no finished step for longer than this the server is not ready; for twice as long, not alive.
    pub stall_timeout_seconds: f64,
}

/// The routes.
pub fn router(admin: Arc<Admin>) -> Router {
    Router::new()
        .route(paths::LIVEZ, get(alive))
        .route(paths::READYZ, get(ready))
        .route(paths::METRICS, get(metrics))
        .route(paths::STATS, get(stats))
        .route(paths::DRAIN, post(drain))
        .route(paths::SLEEP, post(admin_sleep::sleep))
        .route(paths::WAKE, post(admin_sleep::wake))
        .route(paths::IS_SLEEPING, get(admin_sleep::is_sleeping))
        .layer(middleware::from_fn_with_state(admin.clone(), admin_guard::check))
        .with_state(admin)
}

impl Admin {
    fn unseen(&self) -> u32 {
        self.engine.get().map_or(0, EngineHandle::unseen)
    }

    /// What of the API keys cannot be read. Those that can be are served, so the server is ready.
    fn key_trouble(&self) -> Option<String> {
        let of = |tenants: &Tenants| tenants.trouble();
        self.tenants.as_deref().and_then(of).or_else(|| self.tokens.as_ref().and_then(of))
    }

    /// Loading has no steps and is bounded by the startup probe; afterwards steps must be finished.
    fn liveness(&self) -> Result<(), String> {
        match (self.lifecycle.stage(), self.monitor.stuck(2.0 * self.stall_timeout_seconds)) {
            (Stage::Starting, _) | (_, None) => Ok(()),
            (_, Some(stuck)) => Err(stuck),
        }
    }

    /// Overload is not unreadiness: a full queue refuses with 429, and the pod stays in its Service.
    fn readiness(&self) -> Result<(), String> {
        match self.lifecycle.stage() {
            Stage::Starting => Err("no token was generated yet".to_owned()),
            Stage::Closing | Stage::Refusing => Err("draining".to_owned()),
            Stage::Serving if self.lifecycle.rest() != Rest::Awake => Err("asleep".to_owned()),
            Stage::Serving => self.monitor.stuck(self.stall_timeout_seconds).map_or(Ok(()), Err),
        }
    }
}

fn probe(result: Result<(), String>) -> Response {
    match result {
        Ok(()) => "ok\n".into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n").into_response(),
    }
}

async fn alive(State(admin): State<Arc<Admin>>) -> Response {
    probe(admin.liveness())
}

async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    let response = probe(admin.readiness());
    match admin.key_trouble() {
        Some(why) if response.status() == StatusCode::OK => format!("ok\nAPI keys: {why}\n").into_response(),
        _ => response,
    }
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    admin.monitor.api_keys(admin.key_trouble().is_some());
    match admin.monitor.exposition() {
        Ok(text) => ([(header::CONTENT_TYPE, EXPOSITION)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn stats(State(admin): State<Arc<Admin>>) -> Json<Stats> {
    Json(admin.monitor.stats(admin.lifecycle.phase(), admin.unseen()))
}

/// `POST /drain?timeout_seconds=12`: the drain ends by then, where the server's own time-out is longer.
async fn drain(State(admin): State<Arc<Admin>>, RawQuery(query): RawQuery) -> Response {
    let Some(limit) = query.as_deref().map_or(Some(None), |query| drain_limit(query).map(Some)) else {
        let usage = format!("the query of {} is {}=SECONDS\n", paths::DRAIN, paths::DRAIN_TIMEOUT_QUERY);
        return (StatusCode::BAD_REQUEST, usage).into_response();
    };
    if let Some(limit) = limit {
        admin.lifecycle.limit(Instant::now() + limit);
    }
    admin.lifecycle.advance(Stage::Closing);
    StatusCode::ACCEPTED.into_response()
}

fn drain_limit(query: &str) -> Option<Duration> {
    let (key, value) = query.split_once('=')?;
    let seconds: u32 = value.parse().ok()?;
    (key == paths::DRAIN_TIMEOUT_QUERY).then(|| Duration::from_secs(seconds.into()))
}
