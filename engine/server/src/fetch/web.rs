//! One file of a web server: in parts where the server hands them out, or as a stream that may stop half-way, where it
//! ignores ranges and does not say how long the file is.

use super::agent::{agent, bearer, redact, refused, unavailable};
use super::attempt::{FRUITLESS_ATTEMPTS, Interruption, persist};
use super::checksum::Checksum;
use super::listing::{Form, Identity, Listing, Place, RemoteFile};
use super::partial::Partial;
use super::progress::Progress;
use super::storage;
use crate::failure::Failure;
use std::io::Read;
use std::path::Path;
use std::time::Duration;
use tracing::warn;
use ureq::http::{Response, StatusCode, header};
use ureq::typestate::WithoutBody;
use ureq::{Agent, Body, RequestBuilder};
use windlass_engine_contract::termination::Reason;

/// What a file of a web server is called in a folder of its own: no other format is one file.
const FILE: &str = "model.gguf";

/// A URL with what it takes to read it.
pub struct HttpSource {
    agent: Agent,
    url: String,
    authorization: Option<String>,
    first_pause: Duration,
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

    /// The file at a URL, with what its server is told.
    pub fn at(agent: Agent, url: &str, authorization: Option<&str>) -> HttpSource {
        let authorization = authorization.map(str::to_owned);
        HttpSource { agent, url: url.to_owned(), authorization, first_pause: Duration::ZERO }
    }

    /// The file as one of a listing, whose revision is the server's name of this version of it, if it has one.
    pub fn describe(&self) -> Result<(RemoteFile, Option<String>), Failure> {
        let first = || self.part(0, 1).map_err(|failure| Interruption::Retry(failure.message));
        let Part { whole, tag, .. } = persist(&redact(&self.url), self.first_pause, first)?;
        let identity = Identity::Version(tag.clone().unwrap_or_default());
        Ok((self.file(whole, identity, None), tag))
    }

    /// The file as the only one of a listing; `None` where its server hands out no parts, or does not tell its length.
    pub fn in_parts(&self, checksum: &Checksum) -> Result<Option<Listing>, Failure> {
        let probed = persist(&self.name(), self.first_pause, || self.probe())?;
        Ok(probed.map(|(bytes, tag)| {
            let file = self.file(bytes, Identity::Sha256(*checksum), tag);
            Listing { revision: checksum.to_string(), files: vec![file], form: Form::File }
        }))
    }

    /// The file's length and the server's name of its version, by asking for its first byte.
    fn probe(&self) -> Result<Option<(u64, Option<String>)>, Interruption> {
        let response = self.request().header(header::RANGE, "bytes=0-0").call();
        let response = response.map_err(|error| Interruption::Retry(error.to_string()))?;
        match response.status() {
            StatusCode::PARTIAL_CONTENT if range_start(&response) == Some(0) => {
                Ok(whole_length(&response).map(|bytes| (bytes, tag(&response))))
            }
            // An empty file has no first byte.
            StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => Ok(None),
            status => Err(refused(&self.url, status)),
        }
    }

    fn file(&self, bytes: u64, identity: Identity, tag: Option<String>) -> RemoteFile {
        let place = Place::Web { url: self.url.clone(), authorization: self.authorization.clone(), tag };
        RemoteFile { name: FILE.to_owned(), bytes, identity, place, told: None }
    }

    /// The URL without what may be secret in it.
    pub fn name(&self) -> String {
        redact(&self.url)
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
        let tag = tag(&response);
        let mut reader = response.into_body().into_reader();
        let mut bytes = Vec::new();
        let copied = std::io::copy(&mut reader.by_ref().take(skipped), &mut std::io::sink())
            .and_then(|_| reader.take(end - start).read_to_end(&mut bytes));
        copied.map_err(|error| unavailable(error.to_string()))?;
        Ok(Part { bytes, whole, tag })
    }

    /// Length of the file.
    pub fn length(&self) -> Result<u64, Failure> {
        self.describe().map(|(file, _)| file.bytes)
    }

    fn request(&self) -> RequestBuilder<WithoutBody> {
        let request = self.agent.get(&self.url).header(header::ACCEPT_ENCODING, "identity");
        match &self.authorization {
            Some(authorization) => request.header(header::AUTHORIZATION, authorization),
            None => request,
        }
    }

    /// Brings everything into `partial`, at most `max_bytes`: attempts as long as each brings something.
    pub fn download(&self, partial: &mut Partial, max_bytes: u64) -> Result<(), Failure> {
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
            status => return Err(refused(&self.url, status)),
        }
        let expected = content_length(&response).map(|length| partial.len() + length);
        copy(&mut response.into_body().into_reader(), partial, expected, max_bytes)
    }
}

/// Copies until the end, which must be at `expected` if that is known.
pub fn copy(
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

/// The server's name of this version of the file, if it has one.
pub fn tag(response: &Response<Body>) -> Option<String> {
    response.headers().get(header::ETAG).and_then(|tag| Some(tag.to_str().ok()?.to_owned()))
}

/// Bytes of the body, if the server says so.
pub fn content_length(response: &Response<Body>) -> Option<u64> {
    response.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// `7` of `Content-Range: bytes 7-41/42`.
pub fn range_start(response: &Response<Body>) -> Option<u64> {
    let range = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}

/// `42` of `Content-Range: bytes */42`, or of `bytes 7-41/42`.
fn whole_length(response: &Response<Body>) -> Option<u64> {
    response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?.rsplit_once('/')?.1.parse().ok()
}
