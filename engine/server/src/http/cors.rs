//! Which pages of other origins a browser lets ask this server.

use axum::http::{HeaderValue, Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Allows `origins`, each as a browser spells it, or any by `*`.
pub fn layer(origins: &[HeaderValue]) -> CorsLayer {
    let any = origins.iter().any(|origin| origin == "*");
    let allowed = if any { AllowOrigin::any() } else { AllowOrigin::list(origins.iter().cloned()) };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER, header::HeaderName::from_static(super::error::SHOULD_RETRY)])
}
