//! The object stores' client over the program's own: one TLS, one set of trusted authorities, one set of limits.

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use std::fmt;
use std::pin::Pin;
use ureq::Agent;
use ureq::http::HeaderMap;

/// Largest answer: a part of a file, or a page of a list.
const MAX_ANSWER_BYTES: u64 = 64 << 20;

/// An answer's headers, among the extensions of what the store's client makes of it.
#[derive(Clone)]
pub struct Headers(pub HeaderMap);

/// Makes clients of this one.
pub struct Connector(pub Agent);

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connector")
    }
}

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Connector(self.0.clone())))
    }
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Connector {
    fn call<'life0, 'async_trait>(&'life0 self, request: HttpRequest) -> Answer<'async_trait>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        let agent = self.0.clone();
        Box::pin(async move {
            let answered = tokio::task::spawn_blocking(move || call(&agent, request)).await;
            answered.unwrap_or_else(|panic| Err(HttpError::new(HttpErrorKind::Unknown, panic)))
        })
    }
}

fn call(agent: &Agent, request: HttpRequest) -> Result<HttpResponse, HttpError> {
    let (parts, body) = request.into_parts();
    let body = body.as_bytes().map(|bytes| bytes.to_vec()).unwrap_or_default();
    let response = if body.is_empty() {
        agent.run(ureq::http::Request::from_parts(parts, ()))
    } else {
        agent.run(ureq::http::Request::from_parts(parts, body))
    };
    let (mut parts, body) = response.map_err(|error| HttpError::new(kind(&error), error))?.into_parts();
    parts.extensions.insert(Headers(parts.headers.clone()));
    let bytes = body.into_with_config().limit(MAX_ANSWER_BYTES).read_to_vec();
    let bytes = bytes.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error))?;
    Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(bytes::Bytes::from(bytes))))
}

fn kind(error: &ureq::Error) -> HttpErrorKind {
    match error {
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => HttpErrorKind::Connect,
        ureq::Error::Io(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Request,
    }
}
