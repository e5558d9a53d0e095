//! What every request to the API port passes, whatever the model does: who asks, whether the server still takes
//! requests, and what is served.

use super::bodies::{Bodies, Room};
use super::body::JsonBody;
use super::error::ApiError;
use super::{auth, cors, request_name};
use crate::config::Patience;
use crate::lifecycle::{Lifecycle, Rest, Stage};
use crate::monitor::Monitor;
use crate::tenants::{OverLimit, Tenants};
use crate::text_log::TextLog;
use crate::traces::Traces;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;
use tower::util::option_layer;
use tower_http::catch_panic::CatchPanicLayer;
use windlass_engine_api::body::Limits;
use windlass_engine_api::fields::Parse;

/// What load balancers ask.
pub const HEALTH: &str = "/health";

/// The rules of the API port. Cheap to clone.
#[derive(Clone)]
pub struct Door(Arc<Rules>);

/// What a request is judged by.
pub struct Rules {
    /// Names the API answers to.
    pub served_names: Vec<String>,
    /// Longest sequence.
    pub max_model_tokens: u32,
    /// Seconds since 1970 when the server started.
    pub created: u64,
    /// What answers depend on besides the request.
    pub fingerprint: Arc<str>,
    /// Who may ask; without any tenants, everybody.
    pub tenants: Option<Arc<Tenants>>,
    /// Where refusals are counted.
    pub monitor: Arc<Monitor>,
    /// Where the server is in its life.
    pub lifecycle: Lifecycle,
    /// Origins whose pages may ask; none by default.
    pub allowed_origins: Vec<HeaderValue>,
    /// The memory of all bodies.
    pub bodies: Bodies,
    /// What a request may hold.
    pub limits: Limits,
    /// Which texts are logged.
    pub text_log: TextLog,
    /// Where spans of requests go, if anywhere.
    pub traces: Option<Arc<Traces>>,
    /// How patient it is with clients.
    pub patience: Patience,
}

impl From<Rules> for Door {
    fn from(rules: Rules) -> Door {
        Door(Arc::new(rules))
    }
}

impl Deref for Door {
    type Target = Rules;

    fn deref(&self) -> &Rules {
        &self.0
    }
}

impl Door {
    /// Puts `routes` behind it.
    pub fn guard(&self, routes: Router) -> Router {
        let cors = option_layer((!self.allowed_origins.is_empty()).then(|| cors::layer(&self.allowed_origins)));
        routes
            .route(HEALTH, get(async || StatusCode::OK))
            .fallback(no_such_route)
            .method_not_allowed_fallback(wrong_method)
            .layer(middleware::from_fn_with_state(self.clone(), auth::authenticate))
            .layer(cors)
            .layer(middleware::from_fn_with_state(self.clone(), refuse_when_closed))
            .layer(CatchPanicLayer::custom(panicked))
            .layer(middleware::from_fn(request_name::name))
    }

    /// Reads a request body by `parse`. What is read has its memory as long as the [`Room`] lives.
    pub async fn read<T: Send + 'static>(&self, body: JsonBody, parse: Parse<T>) -> Result<(T, Room), ApiError> {
        let JsonBody { bytes, room } = body;
        self.bodies.read(bytes, room, self.limits, parse).await.map_err(|error| self.counted(error))
    }

    /// Counts what a tenant's limits refuse for now. What they would never let in is the request's fault.
    pub fn over_limit(&self, over: OverLimit) -> ApiError {
        let reason = over.reason();
        let error = ApiError::from(over);
        if error.status() == StatusCode::TOO_MANY_REQUESTS {
            self.monitor.rejected(reason);
        }
        error
    }

    /// Counts a body that found no memory.
    pub fn counted(&self, error: ApiError) -> ApiError {
        if error.status() == StatusCode::TOO_MANY_REQUESTS {
            self.monitor.rejected("body_memory");
        }
        error
    }

    /// The model that a request names, or the first one served where it need not name any.
    pub fn model_or_first(&self, model: Option<String>) -> Result<String, ApiError> {
        let model = model.unwrap_or_else(|| self.served_names[0].clone());
        self.check_model(&model)?;
        Ok(model)
    }

    /// Refuses a model that is not served.
    pub fn check_model(&self, model: &str) -> Result<(), ApiError> {
        if self.served_names.iter().any(|name| name == model) {
            return Ok(());
        }
        let message = format!("the model {model:?} is not served here; served are {:?}", self.served_names);
        Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).param("model"))
    }
}

async fn no_such_route(method: Method, uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found", format!("there is no {method} {}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{method} is not the way to use {}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

async fn refuse_when_closed(State(door): State<Door>, request: Request, next: Next) -> Response {
    match (door.lifecycle.stage(), door.lifecycle.rest()) {
        (Stage::Refusing, _) => ApiError::shutting_down().into_response(),
        (_, Rest::FallingAsleep(_) | Rest::Asleep(_)) if request.uri().path() != HEALTH => {
            ApiError::asleep().into_response()
        }
        _ => next.run(request).await,
    }
}

/// A defect ends one request; its text goes to the log by the panic hook, not to the client.
fn panicked(_: Box<dyn Any + Send>) -> Response {
    let message = "the server failed on this request";
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message).into_response()
}
