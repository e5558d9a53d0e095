//! Redirects, with credentials for whom they were meant alone.
//!
//! The hub sends small files from another path of its own, which wants the token again, and large ones from a host that
//! must not see it. ureq's `SameHost` overlooks ports, behind which anybody else may be.

use ureq::http::{HeaderMap, Method, Request, Response, Uri, header};
use ureq::middleware::{Middleware, MiddlewareNext};
use ureq::{Agent, Body, Error, SendBody};
use url::Url;

/// The hub and its storage take two.
const MAX_REDIRECTS: usize = 10;
/// What is read of an answer that only says where to go, so that its connection serves again.
const MAX_NOTE_BYTES: u64 = 1 << 16;

/// Follows redirects of what asks and sends nothing, through a client that follows none.
pub struct Redirects(pub Agent);

impl Middleware for Redirects {
    fn handle(&self, request: Request<SendBody>, _: MiddlewareNext) -> Result<Response<Body>, Error> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return self.0.run(request);
        }
        let (mut head, _) = request.into_parts();
        for _ in 0..=MAX_REDIRECTS {
            let response = self.0.run(Request::from_parts(head.clone(), ()))?;
            let Some(location) = location(&response) else { return Ok(response) };
            head.uri = follow(&head.uri, &location, &mut head.headers)?;
            drop(response.into_body().into_with_config().limit(MAX_NOTE_BYTES).read_to_vec());
        }
        Err(Error::TooManyRedirects)
    }
}

/// Where an answer says that the file is.
fn location(response: &Response<Body>) -> Option<String> {
    let is_redirect = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
    let location = response.headers().get(header::LOCATION).filter(|_| is_redirect)?;
    Some(location.to_str().ok()?.to_owned())
}

/// The address that a location means, relative to one or not; credentials are dropped where it is another server's.
fn follow(from: &Uri, location: &str, headers: &mut HeaderMap) -> Result<Uri, Error> {
    let bad = |error: url::ParseError| Error::BadUri(format!("a redirect leads nowhere: {error}"));
    let from = Url::parse(&from.to_string()).map_err(bad)?;
    let to = from.join(location).map_err(bad)?;
    if !is_same_server(&from, &to) {
        headers.remove(header::AUTHORIZATION);
    }
    Ok(to.as_str().parse::<Uri>().map_err(ureq::http::Error::from)?)
}

/// Same scheme, host and port; or what was asked plainly, behind TLS.
fn is_same_server(from: &Url, to: &Url) -> bool {
    let has_usual_ports = from.port().is_none() && to.port().is_none();
    let is_upgrade = (from.scheme(), to.scheme()) == ("http", "https") && has_usual_ports && from.host() == to.host();
    from.origin() == to.origin() || is_upgrade
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_stay_with_their_server() {
        for (from, location, to, stay) in [
            ("https://hub/a/b?q", "/c?d=%2F", "https://hub/c?d=%2F", true),
            ("https://hub/a/b", "c", "https://hub/a/c", true),
            ("https://hub/a", "https://HUB:443/c", "https://hub/c", true),
            ("http://hub:8080/a", "/c", "http://hub:8080/c", true),
            ("http://hub/a", "https://hub/a", "https://hub/a", true),
            ("http://hub:8080/a", "http://hub:8081/a", "http://hub:8081/a", false),
            ("http://hub:8080/a", "https://hub/a", "https://hub/a", false),
            ("https://hub/a", "http://hub/a", "http://hub/a", false),
            ("https://hub/a", "//cdn.hub/a", "https://cdn.hub/a", false),
        ] {
            let mut headers = HeaderMap::from_iter([(header::AUTHORIZATION, "Bearer secret".parse().unwrap())]);
            let found = follow(&from.parse().unwrap(), location, &mut headers).unwrap();
            assert_eq!((found.to_string().as_str(), headers.len() == 1), (to, stay), "{from} to {location}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let refused = follow(&"https://hub/a".parse().unwrap(), "https://[/", &mut HeaderMap::new()).unwrap_err();
        assert!(refused.to_string().contains("a redirect leads nowhere"), "{refused}");
    }
}
