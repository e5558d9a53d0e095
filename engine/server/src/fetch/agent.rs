//! The HTTP client of all sources, what it trusts, and the credentials it sends.

use super::attempt::Interruption;
use super::redirect::Redirects;
use crate::failure::Failure;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use ureq::http::{Response, StatusCode};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};
use windlass_engine_contract::termination::Reason;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence of a server.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest file with a token or certificates.
const MAX_CREDENTIAL_BYTES: u64 = 1 << 20;
/// Largest answer that describes files: a repository of a hundred thousand takes less.
const MAX_DOCUMENT_BYTES: u64 = 32 << 20;

/// A client that trusts the public authorities, or those of a file alone.
pub fn agent(ca_file: Option<&Path>) -> Result<Agent, Failure> {
    let mut tls = TlsConfig::builder();
    if let Some(path) = ca_file {
        tls = tls.root_certs(trusting(path)?);
    }
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(READ_TIMEOUT))
        .timeout_per_read(Some(READ_TIMEOUT))
        .user_agent(concat!("windlass-engine/", env!("CARGO_PKG_VERSION")))
        .tls_config(tls.build())
        .max_redirects(0)
        .build();
    Ok(Agent::config_builder().middleware(Redirects(config.new_agent())).build().new_agent())
}

/// The authorities in a PEM file, and no others.
fn trusting(path: &Path) -> Result<RootCerts, Failure> {
    let pem = read_credential("--ca-file", path)?;
    let wrong = |why: &str| Failure::configuration(format!("--ca-file {}: {why}", path.display()));
    let mut certificates: Vec<Certificate<'static>> = Vec::new();
    for item in parse_pem(pem.as_bytes()) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| wrong(&error.to_string()))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        return Err(wrong("it holds no certificate"));
    }
    Ok(RootCerts::Specific(Arc::new(certificates)))
}

/// `Authorization` with the token of a file.
pub fn bearer(path: &Path) -> Result<String, Failure> {
    let token = read_credential("--token-file", path)?;
    match token.trim() {
        "" => Err(Failure::configuration(format!("--token-file {} is empty", path.display()))),
        token => Ok(format!("Bearer {token}")),
    }
}

/// The text of a credential's file.
pub fn read_credential(flag: &str, path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let file = std::fs::File::open(path);
    let read = file.and_then(|file| file.take(MAX_CREDENTIAL_BYTES).read_to_string(&mut text));
    read.map_err(|error| Failure::configuration(format!("{flag} {}: {error}", path.display())))?;
    Ok(text)
}

/// A JSON document that a server answered with.
pub fn document(response: Response<Body>) -> Result<serde_json::Value, Interruption> {
    json(&body(response)?)
}

/// What a server answered with, where it is no longer than a document may be.
pub fn body(response: Response<Body>) -> Result<Vec<u8>, Interruption> {
    let read = response.into_body().into_with_config().limit(MAX_DOCUMENT_BYTES).read_to_vec();
    read.map_err(|error| Interruption::Retry(error.to_string()))
}

/// A server's bytes as JSON.
pub fn json(bytes: &[u8]) -> Result<serde_json::Value, Interruption> {
    serde_json::from_slice(bytes).map_err(|error| Interruption::Retry(format!("the answer is not JSON: {error}")))
}

/// A server's refusal: another attempt helps where it is busy or broken.
pub fn refused(url: &str, status: StatusCode) -> Interruption {
    let passing =
        status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
    let hint = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => " (does it need a token?)",
        _ => "",
    };
    let cause = format!("the server answered {status}{hint}");
    match passing {
        true => Interruption::Retry(cause),
        false => Interruption::Fatal(unavailable(&redact(url), &cause)),
    }
}

/// Why a source cannot be had.
pub fn unavailable(source: &str, cause: &str) -> Failure {
    Failure::new(Reason::ModelUnavailable, format!("cannot fetch {source}: {cause}"))
}

/// A URL without what may be secret in it: user, password, query.
pub fn redact(url: &str) -> String {
    let bare = url.split(['?', '#']).next().unwrap_or_default();
    let (scheme, rest) = bare.split_once("://").unwrap_or(("", bare));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    format!("{scheme}://{host}/{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_secret_of_a_url_is_shown() {
        assert_eq!(redact("https://user:pw@host:1/a/b?sig=s#f"), "https://host:1/a/b");
        assert_eq!(redact("https://host"), "https://host/");
    }
}
