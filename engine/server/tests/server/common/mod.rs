//! A server in this process on the simulator, and a client over TCP that controls its connections.

#![allow(missing_docs)]
#![allow(clippy::unwrap_used)] // a helper that fails fails its test

use axum::body::{Body, Bytes};
use clap::Parser;
use futures::StreamExt;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use windlass_engine::cli::{Cli, Command};
use windlass_engine::config::Config;
use windlass_engine::failure::Failure;
use windlass_engine::lifecycle::Lifecycle;
use windlass_engine::serve::Server;

/// The program as it is shipped.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_windlass-engine");
pub const MODEL: &str = "sim-model";
/// Steps of a millisecond and answers that end only at their limit.
pub const FAST: &str =
    "--sim-step-us 1000 --sim-prefill-token-us 1 --sim-decode-sequence-us 1 --sim-mean-answer-tokens 0";
/// Steps slow enough to do something meanwhile.
pub const SLOW: &str =
    "--sim-step-us 20000 --sim-prefill-token-us 1 --sim-decode-sequence-us 1 --sim-mean-answer-tokens 0";

pub struct TestServer {
    pub api: SocketAddr,
    pub admin: SocketAddr,
    pub lifecycle: Lifecycle,
    pub end: JoinHandle<Result<(), Failure>>,
}

pub fn config(flags: &str) -> Config {
    let line = format!("windlass-engine serve {MODEL} --executor sim --host 127.0.0.1 --port 0 --admin-port 0 {flags}");
    match Cli::try_parse_from(line.split_whitespace()).unwrap().command {
        // This process is the tests'.
        Command::Serve(args) => Config { program: PROGRAM.into(), ..Config::from_args(&args).unwrap() },
        other => panic!("{other:?}"),
    }
}

pub async fn serve(flags: &str) -> TestServer {
    start(config(flags)).await
}

/// A server of the model at `path` with these flags.
pub async fn serve_at(path: &Path, flags: &str) -> TestServer {
    let line = format!("windlass-engine serve {} --host 127.0.0.1 --port 0 --admin-port 0 {flags}", path.display());
    match Cli::try_parse_from(line.split_whitespace()).unwrap().command {
        Command::Serve(args) => start(Config::from_args(&args).unwrap()).await,
        other => panic!("{other:?}"),
    }
}

pub async fn start(config: Config) -> TestServer {
    let config = Config { program: PROGRAM.into(), ..config };
    let lifecycle = Lifecycle::default();
    let server = Server::start(config, lifecycle.clone()).await.unwrap();
    let (api, admin) = (server.api_address(), server.admin_address());
    TestServer { api, admin, lifecycle, end: tokio::spawn(server.run()) }
}

impl TestServer {
    pub async fn stats(&self) -> Value {
        get(self.admin, "/stats").await.json()
    }

    /// The value of the first sample of a metric.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = get(self.admin, "/metrics").await.text();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in\n{text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        Client::connect(self.api).await.post(path, body).await
    }

    pub async fn admin_post(&self, path: &str) -> Answer {
        Client::connect(self.admin).await.post(path, &json!({})).await
    }

    pub async fn chat(&self, body: Value) -> Answer {
        self.post("/v1/chat/completions", &chat(body)).await
    }

    /// Returns once `condition` holds of `/stats`.
    pub async fn until(&self, what: &str, condition: impl Fn(&Value) -> bool) {
        eventually(what, async || condition(&self.stats().await)).await;
    }
}

/// A chat request with `extra` fields.
pub fn chat(extra: Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "tell me of the engine"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// One that runs until it is ended.
pub fn endless(stream: bool) -> Value {
    chat(json!({"max_tokens": 5000, "stream": stream}))
}

/// A received response.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: hyper::HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub async fn read(response: Response<Incoming>) -> Answer {
        let (head, body) = response.into_parts();
        let body = axum::body::to_bytes(Body::new(body), usize::MAX).await.unwrap();
        Answer { status: head.status, headers: head.headers, body }
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.text()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// Data of the events of a complete stream, without its end marker.
    pub fn events(&self) -> Vec<Value> {
        let text = self.text();
        let mut data: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

/// One connection.
pub struct Client {
    sender: Sender,
    pub connection: JoinHandle<()>,
}

enum Sender {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Client {
        Client::try_connect(address).await.unwrap()
    }

    /// Fails where nobody listens.
    pub async fn try_connect(address: SocketAddr) -> std::io::Result<Client> {
        let stream = TcpStream::connect(address).await?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        Ok(Client { sender: Sender::Http1(sender), connection: tokio::spawn(async { drop(connection.await) }) })
    }

    pub async fn connect_http2(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).await.unwrap();
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        Client { sender: Sender::Http2(sender), connection: tokio::spawn(async { drop(connection.await) }) }
    }

    /// Sends a request as it is; the host is filled in.
    pub async fn send(&mut self, mut request: Request<Body>) -> hyper::Result<Response<Incoming>> {
        match &mut self.sender {
            Sender::Http1(sender) => {
                request.headers_mut().insert("host", "test".parse().unwrap());
                sender.ready().await?;
                sender.send_request(request).await
            }
            Sender::Http2(sender) => {
                let uri = format!("http://test{}", request.uri());
                *request.uri_mut() = uri.parse().unwrap();
                sender.ready().await?;
                sender.send_request(request).await
            }
        }
    }

    pub async fn get(&mut self, path: &str) -> hyper::Result<Answer> {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        Ok(Answer::read(self.send(request).await?).await)
    }

    pub async fn post(&mut self, path: &str, body: &Value) -> Answer {
        Answer::read(self.send(post(path, body)).await.unwrap()).await
    }

    /// Sends a request and leaves its response open.
    pub async fn open(&mut self, path: &str, body: &Value) -> OpenStream {
        let response = self.send(post(path, body)).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        OpenStream { body: Body::new(response.into_body()).into_data_stream(), text: String::new() }
    }
}

/// A response being read.
pub struct OpenStream {
    body: axum::body::BodyDataStream,
    pub text: String,
}

impl OpenStream {
    /// Reads until `needle` was received or the response ended; whether it was.
    pub async fn read_until(&mut self, needle: &str) -> bool {
        while !self.text.contains(needle) {
            match self.body.next().await {
                Some(bytes) => self.text.push_str(std::str::from_utf8(&bytes.unwrap()).unwrap()),
                None => return false,
            }
        }
        true
    }
}

pub fn post(path: &str, body: &Value) -> Request<Body> {
    let builder = Request::builder().method(Method::POST).uri(path).header("content-type", "application/json");
    builder.body(Body::from(body.to_string())).unwrap()
}

pub async fn get(address: SocketAddr, path: &str) -> Answer {
    Client::connect(address).await.get(path).await.unwrap()
}

/// Returns once `condition` holds; a minute is for ever.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    within(what, async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// What takes a minute does not happen.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.unwrap_or_else(|_| panic!("it never happened: {what}"))
}
