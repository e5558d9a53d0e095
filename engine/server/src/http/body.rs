//! Request bodies, bounded in size, time and memory.

use super::bodies::Room;
use super::body_bytes::BodyBytes;
use super::door::Door;
use super::error::ApiError;
use axum::body::BodyDataStream;
use axum::extract::{FromRef, FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use futures::StreamExt;
use std::time::Duration;

/// Largest body.
const MAX_BODY_BYTES: usize = 32 << 20;

/// The bytes of a JSON body, and the memory that is set aside for what is made of them, as long as this lives.
pub struct JsonBody {
    pub(super) bytes: BodyBytes,
    pub(super) room: Room,
}

impl<S: Send + Sync> FromRequest<S> for JsonBody
where
    Door: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<JsonBody, ApiError> {
        check_type(&request)?;
        let door = Door::from_ref(state);
        let (limit, room, announced) = (door.patience.body, door.bodies.room(), announced(request.headers()));
        let waits = request.headers().contains_key(header::EXPECT);
        let read = async {
            let fits = room.check(announced);
            if waits {
                // Who waits to be asked for the body need not send it.
                fits.clone()?;
            }
            let mut chunks = request.into_body().into_data_stream();
            let read = match fits {
                Ok(()) => read(&mut chunks, MAX_BODY_BYTES, room).await,
                Err(error) => Err(error),
            };
            if read.is_err() {
                let _turn = door.bodies.pass().await;
                pass_over(chunks, MAX_BODY_BYTES).await;
            }
            read
        };
        let read = tokio::time::timeout(limit, read).await.unwrap_or_else(|_| Err(late(limit)));
        read.map_err(|error| door.counted(error))
    }
}

/// How long a body says it is; one that says nothing is of any length.
fn announced(headers: &HeaderMap) -> usize {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    length.and_then(|length| length.parse().ok()).unwrap_or(0)
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
/// take forty times their length, and keep the buffers that they arrived in. Memory is set aside for what came, and for
/// nothing that was only announced.
async fn read(chunks: &mut BodyDataStream, most_bytes: usize, mut room: Room) -> Result<JsonBody, ApiError> {
    let mut bytes = BodyBytes::default();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| unreadable(&error))?;
        let length = bytes.len() + chunk.len();
        if length > most_bytes {
            return Err(too_long(most_bytes));
        }
        room.check(length)?;
        room.set(length, length)?;
        bytes.push(&chunk, most_bytes);
    }
    Ok(JsonBody { bytes, room })
}

/// Takes the rest of a body that is refused: a client that cannot send on does not look for the answer.
async fn pass_over(mut chunks: BodyDataStream, most_bytes: usize) {
    let mut left = most_bytes;
    while let Some(Ok(chunk)) = chunks.next().await
        && chunk.len() <= left
    {
        left -= chunk.len();
    }
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
    use crate::http::bodies::Bodies;
    use axum::body::{Body, Bytes};
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
        let body = Body::from_stream(futures::stream::iter(chunks));
        let room = Bodies::new(1 << 20).room();
        let whole = read(&mut body.into_data_stream(), 1000, room).await.ok().unwrap();
        assert_eq!(&*whole.bytes, "a".repeat(1000).as_bytes());
        assert!(most.load(Ordering::Relaxed) <= 2, "{most:?} chunks at once");
    }

    #[tokio::test]
    async fn a_body_may_be_as_long_as_the_limit_and_no_longer() {
        let chunks = |count: usize| Body::from_stream(futures::stream::iter(vec![Ok::<_, Infallible>("ab"); count]));
        let read = async |count| read(&mut chunks(count).into_data_stream(), 8, Bodies::new(1 << 20).room()).await;
        assert_eq!(read(4).await.ok().unwrap().bytes.len(), 8);
        let refused = read(5).await.err().unwrap().into_response();
        assert_eq!(refused.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
}
