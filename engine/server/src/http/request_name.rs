//! A name for every request: the client's `X-Request-Id` or one of ours, in the answer's header and id, and in the log.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;

/// Where clients and proxies put it.
const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// Longest name taken from a client, bytes.
const MAX_BYTES: usize = 128;

/// What a request is called.
#[derive(Clone, Debug)]
pub struct RequestName(pub Arc<str>);

/// Names a request and its answer.
pub async fn name(mut request: Request, next: Next) -> Response {
    let name = given(request.headers()).unwrap_or_else(|| uuid::Uuid::new_v4().simple().to_string());
    request.extensions_mut().insert(RequestName(name.as_str().into()));
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&name) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

/// The client's name, if it is one that can stand in a log line.
fn given(headers: &HeaderMap) -> Option<String> {
    let name = headers.get(HEADER)?.to_str().ok()?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    ((1..=MAX_BYTES).contains(&name.len()) && name.bytes().all(plain)).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_could_forge_a_log_line_is_replaced() {
        let taken =
            |text: &'static str| given(&HeaderMap::from_iter([(HEADER, HeaderValue::from_static(text))])).is_some();
        assert!(taken("0f8fad5b-d9cb-469f-a165-70867728950e"));
        assert!(!taken("") && !taken("a b") && !taken("a\"b") && !taken("a\tlevel=error"));
        assert_eq!(given(&HeaderMap::new()), None);
    }
}
