//! Request bodies, bounded in size and time.

use super::door::Door;
use super::error::ApiError;
use axum::body::{Body, Bytes};
use axum::extract::{FromRef, FromRequest, Request};
use axum::http::{StatusCode, header};
use futures::StreamExt;
use std::time::Duration;

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
        let read = tokio::time::timeout(limit, read(request.into_body(), MAX_BODY_BYTES)).await;
        read.unwrap_or_else(|_| Err(late(limit))).map(JsonBody)
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

/// All of a body of at most `most_bytes`. Its chunks are copied together as they come: a million of a byte each would
/// take forty times their length, and keep the buffers that they arrived in.
async fn read(body: Body, most_bytes: usize) -> Result<Bytes, ApiError> {
    let mut chunks = body.into_data_stream();
    let mut whole = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| unreadable(&error))?;
        if chunk.len() > most_bytes - whole.len() {
            return Err(too_long(most_bytes));
        }
        whole.extend_from_slice(&chunk);
    }
    Ok(whole.into())
}

fn unreadable(error: &axum::Error) -> ApiError {
    ApiError::bad_request("unreadable_body", format!("the body could not be read: {error}"))
}

fn too_long(most_bytes: usize) -> ApiError {
    let message = format!("the body is longer than {most_bytes} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

fn late(limit: Duration) -> ApiError {
    let message = format!("the body did not arrive within {} s", limit.as_secs_f64());
    ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::response::IntoResponse;
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A chunk's buffer, counted while it is held.
    struct Held(Arc<AtomicUsize>);

    impl AsRef<[u8]> for Held {
        fn as_ref(&self) -> &[u8] {
            b"a"
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn chunks_are_given_back_as_they_come() {
        let (held, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let chunk = |(held, most): (Arc<AtomicUsize>, Arc<AtomicUsize>)| {
            most.fetch_max(held.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            Ok::<_, Infallible>(Bytes::from_owner(Held(held)))
        };
        let chunks = vec![(held.clone(), most.clone()); 1000].into_iter().map(chunk);
        let whole = read(Body::from_stream(futures::stream::iter(chunks)), 1000).await.unwrap();
        assert_eq!(whole, "a".repeat(1000));
        assert!(most.load(Ordering::Relaxed) <= 2, "{most:?} chunks at once");
    }

    #[tokio::test]
    async fn a_body_may_be_as_long_as_the_limit_and_no_longer() {
        let chunks = |count: usize| Body::from_stream(futures::stream::iter(vec![Ok::<_, Infallible>("ab"); count]));
        assert_eq!(read(chunks(4), 8).await.unwrap().len(), 8);
        let refused = read(chunks(5), 8).await.unwrap_err().into_response();
        assert_eq!(refused.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
}
