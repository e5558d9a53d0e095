//! `/sleep`, `/wake_up` and `/is_sleeping`, by vLLM's names: the server stays, its memory goes.

use super::admin::Admin;
use crate::driver::{Depth, EngineHandle};
use crate::lifecycle::{Rest, Stage};
use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tracing::info;

/// Between two looks at what still streams.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Looks in a row that find nothing: what is seen of the engine may be a look old.
const QUIET_LOOKS: u32 = 3;

/// Why several nodes do not sleep at level 2: none of them would load its layers again.
const NODES_KEEP_WEIGHTS: &str = "level is 2, and the model's layers are on several nodes, which cannot load them again: use \
                                  level=1, which keeps weights and gives back keys and values, or end the processes";

/// What may follow `/sleep?`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SleepQuery {
    #[serde(default = "one")]
    level: u8,
    #[serde(default)]
    mode: Mode,
}

/// What becomes of requests that are being answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    /// They finish, within the drain's time.
    #[default]
    Wait,
    /// They end.
    Abort,
}

fn one() -> u8 {
    1
}

/// Refuses new requests, lets streams finish, gives memory back.
pub async fn sleep(State(admin): State<Arc<Admin>>, Query(query): Query<SleepQuery>) -> Response {
    let depth = match query.level {
        1 => Depth::KeepsWeights,
        2 => Depth::DropsWeights,
        level => return refusal(StatusCode::BAD_REQUEST, &format!("level is {level}; it must be 1 or 2")),
    };
    let Some(engine) = admin.engine.get().filter(|_| admin.lifecycle.stage() == Stage::Serving).cloned() else {
        return refusal(StatusCode::CONFLICT, "only a model that generates and is being served can sleep");
    };
    if depth == Depth::DropsWeights && admin.monitor.pipeline_stages() > 1 {
        return refusal(StatusCode::BAD_REQUEST, NODES_KEEP_WEIGHTS);
    }
    if !admin.lifecycle.change_rest(Rest::Awake, Rest::FallingAsleep(depth)) {
        return refusal(StatusCode::CONFLICT, "it sleeps already");
    }
    to_its_end(fall_asleep(admin, engine, depth, query.mode)).await
}

/// Takes memory again and generates a token; ready after that. What only falls asleep stays awake.
pub async fn wake(State(admin): State<Arc<Admin>>) -> Response {
    let Some(engine) = admin.engine.get().cloned() else { return StatusCode::OK.into_response() };
    if let rest @ Rest::FallingAsleep(_) = admin.lifecycle.rest()
        && admin.lifecycle.change_rest(rest, Rest::Awake)
    {
        return StatusCode::OK.into_response();
    }
    to_its_end(wake_up(admin, engine)).await
}

/// Does what was asked for though the client may go meanwhile: half of it would leave a server that is neither asleep
/// nor awake.
async fn to_its_end(work: impl Future<Output = Response> + Send + 'static) -> Response {
    let failed = |_| refusal(StatusCode::INTERNAL_SERVER_ERROR, "the server failed on this request");
    tokio::spawn(work).await.unwrap_or_else(failed)
}

async fn fall_asleep(admin: Arc<Admin>, engine: EngineHandle, depth: Depth, mode: Mode) -> Response {
    let falling = Rest::FallingAsleep(depth);
    if mode == Mode::Wait {
        tokio::select! {
            // What is left after that ends.
            _ = tokio::time::timeout(admin.drain_timeout, nothing_streams(&admin, &engine)) => (),
            () = admin.lifecycle.left(falling) => (),
        }
    }
    let _turn = admin.turn.lock().await;
    if !admin.lifecycle.change_rest(falling, Rest::Asleep(depth)) {
        return refusal(StatusCode::CONFLICT, "it was woken before it slept");
    }
    match engine.sleep(depth).await {
        Ok(()) => {
            admin.monitor.rests(Some(depth));
            info!(?depth, "asleep");
            StatusCode::OK.into_response()
        }
        Err(_) => refusal(StatusCode::INTERNAL_SERVER_ERROR, "the engine has ended"),
    }
}

async fn wake_up(admin: Arc<Admin>, engine: EngineHandle) -> Response {
    let _turn = admin.turn.lock().await;
    let asleep @ Rest::Asleep(_) = admin.lifecycle.rest() else { return StatusCode::OK.into_response() };
    match engine.wake().await {
        Ok(()) => {
            admin.lifecycle.change_rest(asleep, Rest::Awake);
            admin.monitor.rests(None);
            info!("awake");
            StatusCode::OK.into_response()
        }
        Err(failure) => {
            refusal(StatusCode::INTERNAL_SERVER_ERROR, &format!("{:?}: {}", failure.reason, failure.message))
        }
    }
}

/// Whether it sleeps.
pub async fn is_sleeping(State(admin): State<Arc<Admin>>) -> Json<Value> {
    Json(json!({"is_sleeping": admin.lifecycle.rest() != Rest::Awake}))
}

async fn nothing_streams(admin: &Admin, engine: &EngineHandle) {
    let mut quiet = 0;
    while quiet < QUIET_LOOKS {
        quiet = if engine.unseen() > 0 || admin.monitor.load() > 0 { 0 } else { quiet + 1 };
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn refusal(status: StatusCode, why: &str) -> Response {
    (status, Json(json!({"error": why}))).into_response()
}
