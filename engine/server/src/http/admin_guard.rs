//! Who may speak to the admin port: programs that know where it is, and no page in a browser.
//!
//! A page of anywhere can have its browser send requests to addresses that only the browser reaches. What it sends across
//! says where the page is from (`Origin`); where its own name was made to lead here, the name stands in `Host`. Names
//! that no public server answers for cannot be made to.

use super::admin::Admin;
use super::auth::bearer;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;
use windlass_engine_contract::paths;

/// Endings of names that are of one network or one machine.
const INNER_ENDINGS: &[&str] = &[".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa", ".test"];

/// Passes on what a program asked that may.
pub async fn check(State(admin): State<Arc<Admin>>, request: Request, next: Next) -> Response {
    match refusal(&admin, request.headers(), request.uri()) {
        Some((status, why)) => (status, format!("{why}\n")).into_response(),
        None => next.run(request).await,
    }
}

fn refusal(admin: &Admin, headers: &HeaderMap, uri: &Uri) -> Option<(StatusCode, &'static str)> {
    let host = headers.get(header::HOST).map(|host| host.to_str().unwrap_or("?"));
    let host = host.or_else(|| uri.authority().map(Authority::as_str));
    if host.is_some_and(|host| !is_inner(host)) {
        return Some((
            StatusCode::FORBIDDEN,
            "the Host is a name of the public; ask by address or by a name of your network",
        ));
    }
    if headers.get(header::ORIGIN).is_some_and(|origin| !is_own(origin.to_str().unwrap_or_default(), host)) {
        return Some((StatusCode::FORBIDDEN, "this port is not for pages of other origins"));
    }
    let tokens = admin.tokens.as_ref().filter(|_| ![paths::LIVEZ, paths::READYZ].contains(&uri.path()))?;
    let known = bearer(headers).is_some_and(|token| tokens.find(token).is_some());
    (!known).then_some((StatusCode::UNAUTHORIZED, "a token is required: send `Authorization: Bearer TOKEN`"))
}

/// Whether only a network or a machine of its own knows a name: it is an address, or no public one.
fn is_inner(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    address.is_ok()
        || !name.contains('.')
        || INNER_ENDINGS.iter().any(|ending| name.ends_with(ending))
        || name.contains(".svc.")
}

/// Whether a page is from this port itself.
fn is_own(origin: &str, host: Option<&str>) -> bool {
    origin.split_once("://").is_some_and(|(_, authority)| Some(authority) == host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_of_a_network_are_taken_and_public_ones_are_not() {
        for host in [
            "10.0.0.7:8001",
            "[::1]:8001",
            "localhost",
            "engine:8001",
            "a.b.svc:8001",
            "a.b.svc.cluster.local",
            "box.lan",
        ] {
            assert!(is_inner(host), "{host}");
        }
        for host in
            ["evil.example:8001", "evil.com.", "localhost.evil.com", "a b", "", "x@evil.com", "127.0.0.1.evil.com"]
        {
            assert!(!is_inner(host), "{host}");
        }
    }

    #[test]
    fn a_page_is_from_here_or_from_elsewhere() {
        let host = Some("localhost:8001");
        assert!(is_own("http://localhost:8001", host));
        for origin in ["http://localhost", "null", "", "http://evil.com", "https://localhost:80011"] {
            assert!(!is_own(origin, host), "{origin}");
        }
    }
}
