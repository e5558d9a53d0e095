//! A client of a server like this one, for the commands that ask: connections are kept, answers read event by event.

mod transport;

use crate::failure::Failure;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use futures::StreamExt;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use transport::Transport;
use windlass_engine_contract::termination::Reason;

/// Longest event, and longest whole answer, that is kept, bytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// One server. Cheap to clone.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    transport: Transport,
    authorization: Option<HeaderValue>,
    idle: Mutex<Vec<SendRequest<Body>>>,
}

/// Why there is no answer, or no complete one.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection could not be made or broke.
    #[error("{0}")]
    Connection(String),
    /// The server says no.
    #[error("status {status}: {body}")]
    Status {
        /// Its status.
        status: StatusCode,
        /// When to come back, as it says.
        retry_after_seconds: Option<u64>,
        /// Its words.
        body: String,
    },
    /// What came is not what was asked for.
    #[error("{0}")]
    Answer(String),
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        Failure::new(Reason::ModelUnavailable, error)
    }
}

impl Client {
    /// The server at `url`, `http://host:port` or `https://host:port`; `ca_file` holds authorities instead of the public
    /// ones.
    pub fn new(url: &str, key_file: Option<&Path>, ca_file: Option<&Path>) -> Result<Client, Failure> {
        let transport = Transport::new(url, ca_file)?;
        let authorization = key_file.map(authorization).transpose()?;
        Ok(Client(Arc::new(Inner { transport, authorization, idle: Mutex::default() })))
    }

    /// The first model that the server names.
    pub async fn first_model(&self) -> Result<String, ClientError> {
        let body = self.send(Method::GET, "/v1/models", Bytes::new()).await?.succeeded().await?.whole().await?;
        let models: Value = serde_json::from_slice(&body).map_err(|error| ClientError::Answer(error.to_string()))?;
        let first = models["data"][0]["id"].as_str().map(str::to_owned);
        first.ok_or_else(|| ClientError::Answer("the server names no model".to_owned()))
    }

    /// Posts JSON; whatever the status.
    pub async fn post(&self, path: &str, body: Bytes) -> Result<Reply, ClientError> {
        self.send(Method::POST, path, body).await
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Reply, ClientError> {
        let request = || {
            let mut request =
                Request::builder().method(method.clone()).uri(path).header(header::HOST, &self.0.transport.authority);
            if let Some(authorization) = &self.0.authorization {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            request.header(header::CONTENT_TYPE, "application/json").body(Body::from(body.clone())).map_err(broken)
        };
        // A kept connection may have been closed meanwhile, which shows before anything was sent.
        while let Some(mut sender) = self.take_idle() {
            if sender.ready().await.is_ok() {
                let response = sender.send_request(request()?).await;
                match response {
                    Err(error) if error.is_canceled() => continue,
                    response => return Ok(self.reply(response.map_err(broken)?, sender)),
                }
            }
        }
        let mut sender = self.connect().await?;
        let response = sender.send_request(request()?).await.map_err(broken)?;
        Ok(self.reply(response, sender))
    }

    async fn connect(&self) -> Result<SendRequest<Body>, ClientError> {
        let transport = &self.0.transport;
        let unreachable = |error| ClientError::Connection(format!("{} does not answer: {error}", transport.authority));
        let stream = transport.connect().await.map_err(unreachable)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        // How it ends shows where it is used.
        tokio::spawn(async { drop(connection.await) });
        Ok(sender)
    }

    fn take_idle(&self) -> Option<SendRequest<Body>> {
        self.0.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn reply(&self, response: hyper::Response<hyper::body::Incoming>, sender: SendRequest<Body>) -> Reply {
        let (head, body) = response.into_parts();
        let body = Body::new(body).into_data_stream();
        Reply {
            status: head.status,
            headers: head.headers,
            body,
            buffer: Vec::new(),
            read: 0,
            back: Some((self.clone(), sender)),
        }
    }
}

/// An answer being read.
pub struct Reply {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    body: axum::body::BodyDataStream,
    buffer: Vec<u8>,
    /// Bytes of the buffer that were given out.
    read: usize,
    /// Where the connection goes when the answer is complete.
    back: Option<(Client, SendRequest<Body>)>,
}

impl Reply {
    /// The answer, unless its status says no.
    pub async fn succeeded(self) -> Result<Reply, ClientError> {
        if self.status.is_success() {
            return Ok(self);
        }
        let (status, retry_after) = (self.status, self.headers.get(header::RETRY_AFTER).cloned());
        let body = String::from_utf8_lossy(&self.whole().await?).into_owned();
        let retry_after_seconds = retry_after.and_then(|value| value.to_str().ok()?.parse().ok());
        Err(ClientError::Status { status, retry_after_seconds, body })
    }

    /// All of it.
    pub async fn whole(mut self) -> Result<Vec<u8>, ClientError> {
        while self.more().await? {}
        Ok(self.buffer)
    }

    /// Data of the next event; `None` after the last. Comments are skipped.
    pub async fn next_event(&mut self) -> Result<Option<&[u8]>, ClientError> {
        loop {
            if let Some(length) = self.buffer[self.read..].windows(2).position(|two| two == b"\n\n") {
                let event = self.read..self.read + length;
                self.read = event.end + 2;
                if self.buffer[event.clone()].starts_with(b"data: ") {
                    return Ok(Some(&self.buffer[event.start + 6..event.end]));
                }
                continue;
            }
            self.buffer.drain(..self.read);
            self.read = 0;
            if !self.more().await? {
                return Ok(None);
            }
        }
    }

    /// Reads on; false at the end.
    async fn more(&mut self) -> Result<bool, ClientError> {
        match self.body.next().await {
            Some(Ok(bytes)) if self.buffer.len() + bytes.len() <= MAX_ANSWER_BYTES => {
                self.buffer.extend_from_slice(&bytes);
                Ok(true)
            }
            Some(Ok(_)) => Err(ClientError::Answer(format!("the answer has more than {MAX_ANSWER_BYTES} bytes"))),
            Some(Err(error)) => Err(broken(error)),
            None => {
                if let Some((client, sender)) = self.back.take() {
                    client.0.idle.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
                }
                Ok(false)
            }
        }
    }
}

fn broken(error: impl std::error::Error) -> ClientError {
    let cause = error.source().map(|source| format!(": {source}")).unwrap_or_default();
    ClientError::Connection(format!("the connection broke: {error}{cause}"))
}

fn authorization(file: &Path) -> Result<HeaderValue, Failure> {
    let wrong = |error: String| Failure::configuration(format!("--key-file {}: {error}", file.display()));
    let key = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let mut value =
        HeaderValue::from_str(&format!("Bearer {}", key.trim())).map_err(|error| wrong(error.to_string()))?;
    value.set_sensitive(true);
    Ok(value)
}
