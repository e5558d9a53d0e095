//! Requests that two servers could read in two ways: refused before anything is done for them.
//!
//! Where a proxy and this server differ about where a request ends, or whose it is, one client's bytes become another's
//! request. The parser refuses most of it by itself.

use super::error::ApiError;
use axum::http::{HeaderMap, header};

/// Why a request with these headers is refused, if it is.
pub fn refusal(headers: &HeaderMap) -> Option<ApiError> {
    for name in [header::AUTHORIZATION, header::HOST, header::TRANSFER_ENCODING] {
        if headers.get_all(&name).iter().nth(1).is_some() {
            return Some(bad(format!("the request has several {name} headers; send one")));
        }
    }
    let coding = headers.get(header::TRANSFER_ENCODING)?;
    (!coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
        .then(|| bad(format!("the Transfer-Encoding is {coding:?}; it must be chunked")))
}

fn bad(message: String) -> ApiError {
    ApiError::bad_request("invalid_request", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    fn refused(headers: &[(HeaderName, &'static str)]) -> bool {
        let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
        let mut map = HeaderMap::new();
        headers.for_each(|(name, value)| _ = map.append(name, value));
        refusal(&map).is_some()
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_refused() {
        let coding = |value| (header::TRANSFER_ENCODING, value);
        for value in ["gzip, chunked", "xchunked", "chunked, chunked", "identity", ""] {
            assert!(refused(&[coding(value)]), "{value}");
        }
        assert!(refused(&[coding("chunked"), coding("chunked")]));
        assert!(refused(&[(header::AUTHORIZATION, "Bearer a"), (header::AUTHORIZATION, "Bearer b")]));
        assert!(refused(&[(header::HOST, "a"), (header::HOST, "b")]));
        assert!(!refused(&[coding("Chunked"), (header::HOST, "a"), (header::AUTHORIZATION, "Bearer a")]));
    }
}
