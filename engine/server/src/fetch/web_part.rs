//! One part of a file at a URL, of the version that all its parts are of.

use super::agent::{redact, refused, unavailable};
use super::attempt::Interruption;
use super::blob::Blob;
use super::download::{check_length, keep};
use super::web::{content_length, range_start, tag};
use std::io::Read;
use std::ops::Range;
use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body};

/// Bytes read at a time.
const CHUNK_BYTES: usize = 1 << 18;

/// A part that is asked for.
pub struct WebPart<'a> {
    /// Where the file is.
    pub url: &'a str,
    /// Sent to its server.
    pub authorization: Option<&'a str>,
    /// The server's name of the version that the part must be of, if it has one.
    pub version: Option<&'a str>,
    /// Its bytes in the file.
    pub range: &'a Range<u64>,
}

impl WebPart<'_> {
    /// Brings the part into `blob`, which forgets what it has of a file that is another one by now.
    pub fn fetch(&self, agent: &Agent, blob: &Blob) -> Result<(), Interruption> {
        let response = self.ask(agent)?;
        if !response.status().is_success() {
            return Err(refused(self.url, response.status()));
        }
        if let Some(change) = self.change(&response) {
            blob.forget();
            return Err(self.fatal(&change));
        }
        if !self.is_in(&response) {
            return Err(self.fatal("the server does not send the part of the file that was asked for"));
        }
        self.store(response, blob)
    }

    fn ask(&self, agent: &Agent) -> Result<Response<Body>, Interruption> {
        let WebPart { url, authorization, version, range } = self;
        let mut request = agent.get(*url).header(header::ACCEPT_ENCODING, "identity");
        request = request.header(header::RANGE, format!("bytes={}-{}", range.start, range.end - 1));
        // A weak name cannot be asked for: its versions may differ in bytes.
        if let Some(version) = version.filter(|version| !version.starts_with("W/")) {
            request = request.header(header::IF_RANGE, version);
        }
        if let Some(authorization) = authorization {
            request = request.header(header::AUTHORIZATION, *authorization);
        }
        request.call().map_err(|error| Interruption::Retry(error.to_string()))
    }

    fn change(&self, response: &Response<Body>) -> Option<String> {
        let (version, found) = (self.version?, tag(response)?);
        let changed = || format!("the file changed while it was fetched: its ETag was {version} and is {found}");
        (version != found).then(changed)
    }

    fn is_in(&self, response: &Response<Body>) -> bool {
        match response.status() {
            StatusCode::PARTIAL_CONTENT => range_start(response) == Some(self.range.start),
            // A server without ranges will do for a file of one part.
            StatusCode::OK => self.range.start == 0 && content_length(response) == Some(self.range.end),
            _ => false,
        }
    }

    fn store(&self, response: Response<Body>, blob: &Blob) -> Result<(), Interruption> {
        let mut reader = response.into_body().into_reader().take(self.range.end - self.range.start);
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut at = self.range.start;
        loop {
            let read = reader.read(&mut chunk).map_err(|error| Interruption::Retry(error.to_string()))?;
            if read == 0 {
                return check_length(at - self.range.start, self.range);
            }
            keep(blob.write(&chunk[..read], at))?;
            at += read as u64;
        }
    }

    fn fatal(&self, cause: &str) -> Interruption {
        Interruption::Fatal(unavailable(&redact(self.url), cause))
    }
}
