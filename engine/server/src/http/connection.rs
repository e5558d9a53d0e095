//! Connections: accepted, bounded, aged and closed without cutting a request.
//!
//! An old connection is ended between requests: on HTTP/1.1 by `Connection: close` on its next response, so that no
//! client can send into a closing connection; on HTTP/2 by GOAWAY. When the server refuses new requests, idle
//! connections close at once and busy ones after their response.

use super::ambiguous;
use super::stall::StallGuard;
use super::strict_lines::StrictLines;
use super::tls::Tls;
use crate::config::Patience;
use crate::lifecycle::{Lifecycle, Stage};
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, Response, Version, header};
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, watch};
use tower::ServiceExt;
use tracing::{debug, warn};

/// Open connections of clients; further ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 8192;
/// Open connections of those who probe, scrape and drain.
pub const MAX_ADMIN_CONNECTIONS: usize = 64;
/// Files that clients' connections leave to everything else: the admin port, models, renderers, keys.
const FILES_KEPT: u64 = 256;
/// What a connection takes: 10 KiB while it says nothing, more once it asks.
const CONNECTION_BYTES: u64 = 16 << 10;
/// There is memory for so many.
const LEAST_CONNECTIONS: u64 = 256;
/// Part of all places that are kept free by ending connections that never asked for anything.
const FREE_PLACES: usize = 16;
/// Largest request header, bytes.
const MAX_HEADER_BYTES: usize = 64 << 10;
/// Requests at once on one HTTP/2 connection.
const MAX_STREAMS: u32 = 1024;
/// Bytes that wait for the window of one HTTP/2 stream.
const MAX_UNSENT_BYTES: usize = 32 << 10;
/// Pings on a silent HTTP/2 connection.
const PING_EVERY: Duration = Duration::from_secs(20);
/// Rest after a failed accept: the usual cause is a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a connection stays open that comes when requests are refused.
const REFUSAL_TIME: Duration = Duration::from_secs(1);
/// Part of the age that chance adds or takes, so that clients do not all reconnect at once.
const AGE_JITTER: f64 = 0.1;

/// Accepts connections of one port and serves them.
pub struct Server {
    router: Router,
    lifecycle: Lifecycle,
    patience: Patience,
    max_age: Option<Duration>,
    stays_open: bool,
    tls: Option<Tls>,
    open: Arc<watch::Sender<usize>>,
    permits: Arc<Semaphore>,
    /// Places that are kept free while there is somebody to end.
    free_places: usize,
    /// Wakes the connection that has waited longest without asking for anything, to end it.
    crowded: Notify,
    /// Connections that have asked for nothing yet.
    silent: AtomicUsize,
}

/// Clients' connections where so many files may be open and so many bytes are free: of these they have a quarter.
pub fn most_connections(files: u64, free_bytes: Option<u64>) -> usize {
    let left = files.saturating_sub(FILES_KEPT).max(files / 2);
    let affordable = free_bytes.map_or(u64::MAX, |free| (free / 4 / CONNECTION_BYTES).max(LEAST_CONNECTIONS));
    usize::try_from(left.min(affordable)).unwrap_or(usize::MAX).clamp(1, MAX_CONNECTIONS)
}

impl Server {
    /// Serves `router` as the life cycle says on at most `most` connections, each for `max_age` or for ever.
    pub fn new(
        router: Router,
        lifecycle: Lifecycle,
        most: usize,
        max_age: Option<Duration>,
        patience: Patience,
    ) -> Server {
        Server {
            router,
            lifecycle,
            patience,
            max_age,
            stays_open: false,
            tls: None,
            open: Arc::new(watch::Sender::new(0)),
            permits: Arc::new(Semaphore::new(most)),
            free_places: most / FREE_PLACES,
            crowded: Notify::new(),
            silent: AtomicUsize::new(0),
        }
    }

    /// Keeps its connections whatever the stage and their age: probes are asked to the end.
    pub fn staying_open(mut self) -> Server {
        (self.stays_open, self.max_age) = (true, None);
        self
    }

    /// Speaks TLS, if there is any.
    pub fn over(mut self, tls: Option<Tls>) -> Server {
        self.tls = tls;
        self
    }

    /// Accepts for ever.
    pub async fn run(self: Arc<Self>, listener: TcpListener) {
        loop {
            self.make_room();
            // The semaphore is never closed.
            let Ok(permit) = self.permits.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let server = self.clone();
                    let counted = OpenConnection::new(&self.open);
                    tokio::spawn(async move {
                        server.until_crowded(stream).await;
                        drop((counted, permit));
                    });
                }
                Err(error) => {
                    warn!("accepting a connection failed: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Where few places are left, one is taken from who never asked for anything.
    fn make_room(&self) {
        if self.permits.available_permits() <= self.free_places && self.silent.load(Ordering::Relaxed) > 0 {
            self.crowded.notify_one();
        }
    }

    /// Serves a new connection, which others may push out before it asks for anything.
    async fn until_crowded(self: &Arc<Server>, stream: TcpStream) {
        let state = Arc::new(ConnectionState::default());
        let pushed_out = async {
            let silent = Silent::new(&self.silent);
            tokio::select! {
                () = self.crowded.notified() => (),
                () = asked_for_something(state.asked.subscribe()) => {
                    drop(silent);
                    std::future::pending().await
                }
            }
        };
        tokio::select! {
            () = self.clone().meet(stream, state.clone()) => (),
            () = pushed_out => debug!("a connection that asked for nothing made room"),
        }
    }

    /// Returns once no connection is open.
    pub async fn no_connections(&self) {
        // The sender lives as long as this value.
        let _ = self.open.subscribe().wait_for(|open| *open == 0).await;
    }

    /// Serves a new connection, after its handshake where there is one.
    async fn meet(self: Arc<Self>, stream: TcpStream, state: Arc<ConnectionState>) {
        // Tokens are small and each matters: none may wait for the next.
        if let Err(error) = stream.set_nodelay(true) {
            debug!("TCP_NODELAY: {error}");
        }
        let stream = StallGuard::new(stream, self.patience.read);
        let Some(tls) = &self.tls else { return self.serve(stream, state).await };
        tokio::select! {
            handshake = tokio::time::timeout(self.patience.header, tls.acceptor().accept(stream)) => match handshake {
                Ok(Ok(stream)) => self.clone().serve(stream, state).await,
                Ok(Err(error)) => debug!("a TLS handshake failed: {error}"),
                Err(_) => debug!("a TLS handshake took too long"),
            },
            () = self.refuses(self.lifecycle.stage()) => (),
        }
    }

    async fn serve<T>(self: Arc<Self>, stream: T, state: Arc<ConnectionState>)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = service_fn(|request| {
            let (server, state) = (self.clone(), state.clone());
            async move { server.answer(&state, request).await }
        });
        let builder = builder(self.patience.header);
        let mut connection = pin!(builder.serve_connection(TokioIo::new(StrictLines::new(stream)), service));
        let mut silent = pin!(tokio::time::sleep(self.patience.header));
        let mut old = pin!(self.grows_old());
        let mut closing = pin!(self.reached(Stage::Closing));
        let mut refusing = pin!(self.refuses(self.lifecycle.stage()));
        let (mut is_silent, mut is_old, mut is_closing, mut is_refusing) = (false, false, false, false);
        loop {
            tokio::select! {
                ended = connection.as_mut() => {
                    return if let Err(error) = ended { debug!("a connection ended: {error}") };
                }
                () = silent.as_mut(), if !is_silent => {
                    is_silent = true;
                    // Neither HTTP version is timed before its first bytes tell which it is.
                    if !*state.asked.borrow() {
                        return debug!("a connection asked for nothing");
                    }
                }
                () = old.as_mut(), if !is_old => {
                    is_old = true;
                    state.last_request.store(true, Ordering::Relaxed);
                }
                () = closing.as_mut(), if !is_closing => is_closing = true,
                () = refusing.as_mut(), if !is_refusing => is_refusing = true,
            }
            let http2 = state.http2.load(Ordering::Relaxed);
            if is_refusing || (http2 && (is_old || is_closing)) {
                connection.as_mut().graceful_shutdown();
            }
        }
    }

    /// Answers one request; the last one of an HTTP/1.1 connection says so.
    async fn answer(&self, state: &ConnectionState, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let http2 = request.version() == Version::HTTP_2;
        state.http2.store(http2, Ordering::Relaxed);
        state.asked.send_if_modified(|asked| !std::mem::replace(asked, true));
        let ambiguous = ambiguous::refusal(request.headers());
        let is_ambiguous = ambiguous.is_some();
        let mut response = match ambiguous {
            Some(error) => error.into_response(),
            None => self.router.clone().oneshot(request.map(Body::new)).await?,
        };
        let closing = !self.stays_open && self.lifecycle.stage() >= Stage::Closing;
        if !http2 && (closing || is_ambiguous || state.last_request.load(Ordering::Relaxed)) {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response)
    }

    /// Returns when this connection is to end. One that comes when requests are refused has time to be told so.
    async fn refuses(&self, accepted_in: Stage) {
        self.reached(Stage::Refusing).await;
        if accepted_in == Stage::Refusing {
            tokio::time::sleep(REFUSAL_TIME).await;
        }
    }

    async fn reached(&self, stage: Stage) {
        match self.stays_open {
            true => std::future::pending().await,
            false => self.lifecycle.reached(stage).await,
        }
    }

    async fn grows_old(&self) {
        match self.max_age {
            Some(age) => tokio::time::sleep(age.mul_f64(1.0 + AGE_JITTER * (2.0 * rand::random::<f64>() - 1.0))).await,
            None => std::future::pending().await,
        }
    }
}

/// What a connection's requests and its timers tell each other.
#[derive(Debug, Default)]
struct ConnectionState {
    asked: watch::Sender<bool>,
    http2: AtomicBool,
    last_request: AtomicBool,
}

/// Returns when a connection has asked for something.
async fn asked_for_something(mut asked: watch::Receiver<bool>) {
    // The sender lives as long as the connection.
    let _ = asked.wait_for(|asked| *asked).await;
}

/// Counts a connection while it has asked for nothing.
struct Silent<'a>(&'a AtomicUsize);

impl Silent<'_> {
    fn new(silent: &AtomicUsize) -> Silent<'_> {
        silent.fetch_add(1, Ordering::Relaxed);
        Silent(silent)
    }
}

impl Drop for Silent<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn builder(header_timeout: Duration) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(header_timeout).max_buf_size(MAX_HEADER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MAX_HEADER_BYTES as u32)
        .max_concurrent_streams(MAX_STREAMS)
        .max_send_buf_size(MAX_UNSENT_BYTES)
        .keep_alive_interval(PING_EVERY);
    builder
}

/// Counts a connection while it lives.
struct OpenConnection(Arc<watch::Sender<usize>>);

impl OpenConnection {
    fn new(open: &Arc<watch::Sender<usize>>) -> OpenConnection {
        open.send_modify(|open| *open += 1);
        OpenConnection(open.clone())
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_as_many_as_files_and_memory_have_room_for() {
        const MANY: u64 = 1 << 20;
        for (files, free_mib, most) in [
            (MANY, None, 8192),
            (MANY, Some(1024), 8192),
            (MANY, Some(64), 1024),
            (MANY, Some(0), 256),
            (1024, None, 768),
            (64, Some(0), 32),
        ] {
            let found = most_connections(files, free_mib.map(|mib: u64| mib << 20));
            assert_eq!(found, most, "{files} files, {free_mib:?} MiB");
        }
    }
}
