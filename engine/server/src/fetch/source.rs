//! Where the bytes come from: an HTTP server that may stop half-way, or standard input.

use super::partial::Partial;
use super::progress::Progress;
use super::storage;
use crate::cli::FetchArgs;
use crate::failure::Failure;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;
use ureq::http::{Response, StatusCode, header};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::typestate::WithoutBody;
use ureq::{Agent, Body, RequestBuilder};
use windlass_engine_contract::termination::Reason;

/// Attempts in a row that may bring nothing.
const FRUITLESS_ATTEMPTS: u32 = 4;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence of a server.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest file with a token or certificates.
const MAX_CREDENTIAL_BYTES: u64 = 1 << 20;

/// Where the bytes come from.
pub enum Source {
    /// Standard input; it cannot be resumed.
    Stdin,
    /// A web server.
    Http(Box<HttpSource>),
}

/// A URL with what it takes to read it.
pub struct HttpSource {
    agent: Agent,
    url: String,
    authorization: Option<String>,
    first_pause: Duration,
}

/// Why an attempt ended early.
enum Interruption {
    /// Another attempt may go further.
    Retry(String),
    /// It may not.
    Fatal(Failure),
}

impl Source {
    /// Checks the flags and reads the credentials they name.
    pub fn parse(args: &FetchArgs, first_pause: Duration) -> Result<Source, Failure> {
        if args.url == "-" {
            return Ok(Source::Stdin);
        }
        let source = HttpSource::new(&args.url, args.token_file.as_deref(), args.ca_file.as_deref(), first_pause)?;
        Ok(Source::Http(Box::new(source)))
    }

    /// Brings everything into `partial`, at most `max_bytes`.
    pub fn download(&self, partial: &mut Partial, max_bytes: u64) -> Result<(), Failure> {
        match self {
            Source::Http(source) => source.download(partial, max_bytes),
            Source::Stdin => {
                partial.restart().map_err(|error| storage(Path::new("the file"), &error))?;
                match copy(&mut std::io::stdin().lock(), partial, None, max_bytes) {
                    Ok(()) => Ok(()),
                    Err(Interruption::Fatal(failure)) => Err(failure),
                    Err(Interruption::Retry(cause)) => Err(unavailable("standard input", &cause)),
                }
            }
        }
    }
}

/// Some bytes of a file behind a URL.
pub struct Part {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Length of the whole file.
    pub whole: u64,
    /// The server's name of this version of the file.
    pub tag: Option<String>,
}

impl HttpSource {
    /// Checks the URL and reads the credentials.
    pub fn new(
        url: &str,
        token_file: Option<&Path>,
        ca_file: Option<&Path>,
        first_pause: Duration,
    ) -> Result<HttpSource, Failure> {
        if !url.starts_with("https://") && !url.starts_with("http://") {
            let message = format!("the URL must begin with https:// or http://, or be -; it is {}", redact(url));
            return Err(Failure::configuration(message));
        }
        let authorization = token_file.map(bearer).transpose()?;
        Ok(HttpSource { agent: agent(ca_file)?, url: url.to_owned(), authorization, first_pause })
    }

    /// The bytes from `start` to before `end`, or to the end of the file, in one attempt.
    pub fn part(&self, start: u64, end: u64) -> Result<Part, Failure> {
        let unavailable = |cause: String| unavailable(&redact(&self.url), &cause);
        let request = self.request().header(header::RANGE, format!("bytes={start}-{}", end.saturating_sub(1)));
        let response = request.call().map_err(|error| unavailable(error.to_string()))?;
        // A server without ranges sends the whole file, of which the rest is left unread.
        let (skipped, whole) = match response.status() {
            StatusCode::PARTIAL_CONTENT if range_start(&response) == Some(start) => (0, whole_length(&response)),
            StatusCode::OK => (start, content_length(&response)),
            status => return Err(unavailable(format!("the server answered {status} to a range"))),
        };
        let whole = whole.ok_or_else(|| unavailable("the server does not tell the file's length".to_owned()))?;
        let tag = response.headers().get(header::ETAG).and_then(|tag| Some(tag.to_str().ok()?.to_owned()));
        let mut reader = response.into_body().into_reader();
        let mut bytes = Vec::new();
        let copied = std::io::copy(&mut reader.by_ref().take(skipped), &mut std::io::sink())
            .and_then(|_| reader.take(end - start).read_to_end(&mut bytes));
        copied.map_err(|error| unavailable(error.to_string()))?;
        Ok(Part { bytes, whole, tag })
    }

    fn request(&self) -> RequestBuilder<WithoutBody> {
        let request = self.agent.get(&self.url).header(header::ACCEPT_ENCODING, "identity");
        match &self.authorization {
            Some(authorization) => request.header(header::AUTHORIZATION, authorization),
            None => request,
        }
    }

    /// Attempts as long as each brings something.
    fn download(&self, partial: &mut Partial, max_bytes: u64) -> Result<(), Failure> {
        let mut fruitless = 0;
        loop {
            let before = partial.resume().map_err(|error| storage(Path::new("the file"), &error))?;
            let cause = match self.attempt(partial, max_bytes) {
                Ok(()) => return Ok(()),
                Err(Interruption::Fatal(failure)) => return Err(failure),
                Err(Interruption::Retry(cause)) => cause,
            };
            fruitless = if partial.len() > before { 0 } else { fruitless + 1 };
            if fruitless == FRUITLESS_ATTEMPTS {
                return Err(unavailable(&redact(&self.url), &format!("{cause} ({FRUITLESS_ATTEMPTS} attempts)")));
            }
            warn!(bytes = partial.len(), "{cause}; trying again");
            std::thread::sleep(self.first_pause * (1 << fruitless.saturating_sub(1)));
        }
    }

    fn attempt(&self, partial: &mut Partial, max_bytes: u64) -> Result<(), Interruption> {
        let have = partial.len();
        let mut request = self.request();
        if have > 0 {
            request = request.header(header::RANGE, format!("bytes={have}-"));
        }
        let response = request.call().map_err(|error| Interruption::Retry(error.to_string()))?;
        match response.status() {
            StatusCode::PARTIAL_CONTENT if range_start(&response) == Some(have) => (),
            StatusCode::OK => restart(partial)?,
            // The range cannot be had: either nothing is missing, or the file is another one now.
            StatusCode::RANGE_NOT_SATISFIABLE if whole_length(&response) == Some(have) => return Ok(()),
            StatusCode::RANGE_NOT_SATISFIABLE | StatusCode::PARTIAL_CONTENT => {
                restart(partial)?;
                return Err(Interruption::Retry("the server does not have the rest of the partial file".to_owned()));
            }
            status => return Err(self.refused(status)),
        }
        let expected = content_length(&response).map(|length| partial.len() + length);
        copy(&mut response.into_body().into_reader(), partial, expected, max_bytes)
    }

    fn refused(&self, status: StatusCode) -> Interruption {
        let cause = format!("the server answered {status}");
        let passing =
            status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
        match passing {
            true => Interruption::Retry(cause),
            false => Interruption::Fatal(unavailable(&redact(&self.url), &cause)),
        }
    }
}

/// Copies until the end, which must be at `expected` if that is known.
fn copy(
    reader: &mut impl Read,
    partial: &mut Partial,
    expected: Option<u64>,
    max_bytes: u64,
) -> Result<(), Interruption> {
    check_size(expected.unwrap_or(0), max_bytes)?;
    let mut progress = Progress::start(partial.len(), expected);
    let mut chunk = vec![0; 1 << 18];
    loop {
        let read = reader.read(&mut chunk).map_err(|error| Interruption::Retry(error.to_string()))?;
        if read == 0 {
            break;
        }
        check_size(partial.len() + read as u64, max_bytes)?;
        let stored = partial.append(&chunk[..read]);
        stored.map_err(|error| Interruption::Fatal(storage(Path::new("the file"), &error)))?;
        progress.at(partial.len());
    }
    match expected {
        Some(expected) if partial.len() < expected => {
            let message = format!("the connection ended after {} of {expected} bytes", partial.len());
            Err(Interruption::Retry(message))
        }
        _ => Ok(()),
    }
}

fn check_size(bytes: u64, max_bytes: u64) -> Result<(), Interruption> {
    if bytes <= max_bytes {
        return Ok(());
    }
    let message = format!("the file has at least {bytes} bytes; --max-bytes is {max_bytes}");
    Err(Interruption::Fatal(Failure::new(Reason::ModelInvalid, message)))
}

fn restart(partial: &mut Partial) -> Result<(), Interruption> {
    partial.restart().map_err(|error| Interruption::Fatal(storage(Path::new("the file"), &error)))
}

fn content_length(response: &Response<Body>) -> Option<u64> {
    response.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// `7` of `Content-Range: bytes 7-41/42`.
fn range_start(response: &Response<Body>) -> Option<u64> {
    let range = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}

/// `42` of `Content-Range: bytes */42`, or of `bytes 7-41/42`.
fn whole_length(response: &Response<Body>) -> Option<u64> {
    response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?.rsplit_once('/')?.1.parse().ok()
}

fn agent(ca_file: Option<&Path>) -> Result<Agent, Failure> {
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
        .build();
    Ok(config.new_agent())
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

fn bearer(path: &Path) -> Result<String, Failure> {
    let token = read_credential("--token-file", path)?;
    match token.trim() {
        "" => Err(Failure::configuration(format!("--token-file {} is empty", path.display()))),
        token => Ok(format!("Bearer {token}")),
    }
}

fn read_credential(flag: &str, path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let file = std::fs::File::open(path);
    let read = file.and_then(|file| file.take(MAX_CREDENTIAL_BYTES).read_to_string(&mut text));
    read.map_err(|error| Failure::configuration(format!("{flag} {}: {error}", path.display())))?;
    Ok(text)
}

fn unavailable(source: &str, cause: &str) -> Failure {
    Failure::new(Reason::ModelUnavailable, format!("cannot fetch {source}: {cause}"))
}

/// A URL without what may be secret in it: user, password, query.
fn redact(url: &str) -> String {
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
