//! The page at `/`: a conversation and the server's state, in one file that loads nothing from elsewhere.

use axum::http::{HeaderName, header};
use axum::response::{Html, IntoResponse};

/// Only what is in the page itself may run, and only this server may be asked.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                      frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// The page.
pub async fn show() -> impl IntoResponse {
    let headers: [(HeaderName, &str); 3] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, Html(include_str!("page.html")))
}
