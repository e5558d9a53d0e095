//! From a request's key to its tenant.

use super::door::Door;
use super::error::ApiError;
use super::request_name::RequestName;
use crate::tenants::{Account, Lease};
use axum::extract::{FromRef, FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;

/// Lets a request through if there are no keys or it carries one, and notes whose it is. What [`super::api::is_open`]
/// names needs none.
pub async fn authenticate(State(door): State<Door>, mut request: Request, next: Next) -> Result<Response, ApiError> {
    let Some(tenants) = door.tenants.as_ref().filter(|_| !super::api::is_open(request.method(), request.uri().path()))
    else {
        return Ok(next.run(request).await);
    };
    let key = bearer(request.headers());
    let key = key.ok_or_else(|| unauthorized("an API key is required: send `Authorization: Bearer KEY`"))?;
    let account = tenants.find(key).ok_or_else(|| unauthorized("the API key is not valid"))?;
    request.extensions_mut().insert(account);
    Ok(next.run(request).await)
}

/// A request that may generate: its tenant's limits allow it, and it counts as running until the last clone of the
/// lease is dropped.
pub struct Admitted(pub Lease);

impl<S: Send + Sync> FromRequestParts<S> for Admitted
where
    Door: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Admitted, ApiError> {
        let door = Door::from_ref(state);
        let span = |name: &str| {
            let traces = door.traces.as_ref()?;
            Some(traces.begin(&parts.headers, name, parts.uri.path()))
        };
        let name = parts.extensions.get::<RequestName>().map(|name| name.0.clone()).unwrap_or_default();
        let account = parts.extensions.get::<Arc<Account>>().zip(door.tenants.as_ref());
        let Some((account, tenants)) = account else {
            return Ok(Admitted(Lease::of_nobody(name.clone()).traced(span(&name))));
        };
        let begun = account.begin(name.clone(), tenants.now());
        begun.map(|lease| Admitted(lease.traced(span(&name)))).map_err(|over| door.over_limit(over))
    }
}

pub(super) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, key) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

fn unauthorized(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
}
