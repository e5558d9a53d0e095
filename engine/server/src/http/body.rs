//! Request bodies, bounded in size and time.

use super::door::Door;
use super::error::ApiError;
use axum::body::{Bytes, to_bytes};
use axum::extract::{FromRef, FromRequest, Request};
use axum::http::{StatusCode, header};

/// Largest body.
const MAX_BODY_BYTES: usize = 32 << 20;

/// The bytes of a JSON body.
pub struct JsonBody(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for JsonBody
where
    Door: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<JsonBody, ApiError> {
        check_type(&request)?;
        let limit = Door::from_ref(state).patience.body;
        let read = tokio::time::timeout(limit, to_bytes(request.into_body(), MAX_BODY_BYTES)).await;
        match read {
            Ok(Ok(bytes)) => Ok(JsonBody(bytes)),
            Ok(Err(error)) => Err(unreadable(&error)),
            Err(_) => {
                let message = format!("the body did not arrive within {} s", limit.as_secs_f64());
                Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message))
            }
        }
    }
}

/// A body that says it is something else than JSON is not guessed at; one that says nothing is read.
fn check_type(request: &Request) -> Result<(), ApiError> {
    if let Some(encoding) = request.headers().get(header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity") {
        let message = format!("the Content-Encoding is {encoding:?}; send the body as it is");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
    }
    let Some(value) = request.headers().get(header::CONTENT_TYPE) else { return Ok(()) };
    let media = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("the Content-Type is {media:?}; it must be application/json");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

fn unreadable(error: &axum::Error) -> ApiError {
    let too_long = std::error::Error::source(error).is_some_and(|source| source.to_string().contains("length limit"));
    if too_long {
        let message = format!("the body is longer than {MAX_BODY_BYTES} bytes");
        return ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message);
    }
    ApiError::bad_request("unreadable_body", format!("the body could not be read: {error}"))
}
