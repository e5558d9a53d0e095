//! One reading of one engine: `GET /stats` of its admin port, bounded in time and size.

use axum::body::{Body, Bytes, to_bytes};
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpStream;
use windlass_engine_contract::paths;
use windlass_engine_contract::stats::{Histogram, LATENCY_EDGES_MS, MAX_STATS_BYTES, Stats};

/// Twice what the contract allows: room for an engine that is newer than this operator.
const MAX_BODY_BYTES: usize = 2 * MAX_STATS_BYTES;

/// Why there is no reading.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// Nobody listens, or the connection broke.
    #[error("connection: {0}")]
    Connection(#[from] std::io::Error),
    /// Not HTTP.
    #[error("protocol: {0}")]
    Protocol(#[from] hyper::Error),
    /// The engine refused.
    #[error("answered {0}")]
    Status(StatusCode),
    /// More than any engine sends.
    #[error("the body is longer than {MAX_BODY_BYTES} bytes, or broke off")]
    Body,
    /// Not a reading.
    #[error("not a reading: {0}")]
    Invalid(String),
}

impl Error {
    /// A stable word for metrics.
    pub fn category(&self) -> &'static str {
        match self {
            Error::Timeout(_) => "timeout",
            Error::Connection(_) => "connection",
            Error::Protocol(_) => "protocol",
            Error::Status(_) => "status",
            Error::Body => "body",
            Error::Invalid(_) => "invalid",
        }
    }
}

/// Reads the engine at `address`, connecting included, within `timeout`.
///
/// # Errors
/// See [`Error`]; none of them says anything about the engine's load.
pub async fn stats(address: SocketAddr, timeout: Duration) -> Result<Stats, Error> {
    let body = tokio::time::timeout(timeout, body(address)).await.map_err(|_elapsed| Error::Timeout(timeout))??;
    parse(&body)
}

/// Tells the engine at `address` to drain within `patience`, which `timeout` bounds the telling of.
///
/// # Errors
/// See [`Error`]: the engine drains when its pod is deleted, in the time it was configured with.
pub async fn drain(address: SocketAddr, patience: Duration, timeout: Duration) -> Result<(), Error> {
    let path = format!("{}?{}={}", paths::DRAIN, paths::DRAIN_TIMEOUT_QUERY, patience.as_secs());
    let asked = exchange(address, Method::POST, &path, StatusCode::ACCEPTED);
    tokio::time::timeout(timeout, asked).await.map_err(|_elapsed| Error::Timeout(timeout))?.map(drop)
}

async fn body(address: SocketAddr) -> Result<Bytes, Error> {
    exchange(address, Method::GET, paths::STATS, StatusCode::OK).await
}

/// One request on a connection of its own.
async fn exchange(address: SocketAddr, method: Method, path: &str, wanted: StatusCode) -> Result<Bytes, Error> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, address.to_string())
        .header(CONNECTION, "close")
        .body(Body::empty())
        .map_err(|error| Error::Invalid(error.to_string()))?;
    let exchange = async {
        let answer = sender.send_request(request).await?;
        if answer.status() != wanted {
            return Err(Error::Status(answer.status()));
        }
        to_bytes(Body::new(answer.into_body()), MAX_BODY_BYTES).await.map_err(|_too_long| Error::Body)
    };
    // Driven here and not in a task of its own: giving up on the reading closes the socket.
    let mut exchange = std::pin::pin!(exchange);
    tokio::select! {
        biased;
        read = &mut exchange => read,
        driven = connection => { driven?; exchange.await }
    }
}

/// Reads a body as the contract has it, and refuses numbers that no engine can mean.
fn parse(body: &[u8]) -> Result<Stats, Error> {
    let stats: Stats = serde_json::from_slice(body).map_err(|error| Error::Invalid(error.to_string()))?;
    let histograms = [
        ("timeToFirstToken", &stats.time_to_first_token),
        ("interToken", &stats.inter_token),
        ("endToEnd", &stats.end_to_end),
    ];
    for (name, histogram) in histograms {
        check_histogram(histogram).map_err(|why| Error::Invalid(format!("{name}: {why}")))?;
    }
    let ratios = [("kvUsage", Some(stats.kv_usage)), ("utilization", stats.utilization)];
    for (name, ratio) in ratios {
        if ratio.is_some_and(|ratio| !(0.0..=1.0).contains(&ratio)) {
            return Err(Error::Invalid(format!("{name} is not between 0 and 1")));
        }
    }
    if stats.uptime_seconds < 0.0 || stats.oldest_queue_age_seconds < 0.0 {
        return Err(Error::Invalid("a duration is negative".into()));
    }
    Ok(stats)
}

/// Cumulative counts over the shared edges, or none at all.
fn check_histogram(histogram: &Histogram) -> Result<(), String> {
    let (length, expected) = (histogram.counts.len(), LATENCY_EDGES_MS.len() + 1);
    if length != 0 && length != expected {
        return Err(format!("{length} buckets, {expected} expected"));
    }
    if histogram.counts.is_sorted() { Ok(()) } else { Err("bucket counts fall".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use windlass_engine_contract::fixture::idle;

    fn json(stats: &Stats) -> Vec<u8> {
        serde_json::to_vec(stats).expect("serializes")
    }

    /// A peer that answers every connection with `bytes`, and then holds it open.
    async fn peer(bytes: Vec<u8>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(&bytes).await;
                std::future::pending::<()>().await;
            }
        });
        address
    }

    fn answer(status: &str, body: &[u8]) -> Vec<u8> {
        [format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(), body].concat()
    }

    #[tokio::test]
    async fn a_reading_arrives_whole() {
        let address = peer(answer("200 OK", &json(&idle()))).await;
        assert_eq!(stats(address, Duration::from_secs(5)).await.expect("a reading"), idle());
    }

    #[tokio::test]
    async fn an_endless_body_is_cut_at_its_bound() {
        let endless = format!("HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n{}", " ".repeat(MAX_BODY_BYTES + 1));
        let address = peer(endless.into_bytes()).await;
        let error = stats(address, Duration::from_secs(5)).await.expect_err("refused");
        assert_eq!(error.category(), "body");
    }

    #[tokio::test]
    async fn a_silent_peer_and_a_closed_port_are_told_apart() {
        let silent = stats(peer(Vec::new()).await, Duration::from_millis(50)).await.expect_err("no answer");
        assert_eq!(silent.category(), "timeout");
        let closed = TcpListener::bind("127.0.0.1:0").await.and_then(|free| free.local_addr()).expect("a free port");
        let refused = stats(closed, Duration::from_secs(5)).await.expect_err("nobody listens");
        assert_eq!(refused.category(), "connection");
    }

    #[tokio::test]
    async fn a_refusal_and_garbage_have_categories_of_their_own() {
        let refusal = stats(peer(answer("503 Busy", b"{}")).await, Duration::from_secs(5)).await;
        assert_eq!(refusal.expect_err("refused").category(), "status");
        let garbage = stats(peer(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()).await, Duration::from_secs(5)).await;
        assert_eq!(garbage.expect_err("not HTTP").category(), "protocol");
    }

    #[test]
    fn histograms_must_have_the_shared_edges_and_never_fall() {
        let mut short = idle();
        short.inter_token.counts = vec![1; 3];
        assert!(matches!(parse(&json(&short)), Err(Error::Invalid(why)) if why.contains("interToken: 3 buckets")));
        let mut falling = idle();
        falling.end_to_end.counts = (0..=LATENCY_EDGES_MS.len() as u64).rev().collect();
        assert!(matches!(parse(&json(&falling)), Err(Error::Invalid(why)) if why.contains("fall")));
    }

    #[test]
    fn a_ratio_beyond_one_is_refused_by_name() {
        let wrong = Stats { utilization: Some(17.0), ..idle() };
        assert!(matches!(parse(&json(&wrong)), Err(Error::Invalid(why)) if why.contains("utilization")));
    }

    #[test]
    fn a_field_of_a_newer_engine_is_ignored() {
        let mut value = serde_json::to_value(idle()).expect("serializes");
        value["tomorrow"] = 1.into();
        assert!(parse(value.to_string().as_bytes()).is_ok());
    }
}
