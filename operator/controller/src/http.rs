//! The operator's own port: `/livez`, `/readyz`, and `/metrics` where that has no port of its own. No request to it
//! changes anything.

use crate::door;
use crate::metrics::{Metrics, ServiceReading};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header::CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// What the port tells about the rest of the program.
pub trait Overview: Send + Sync + 'static {
    /// Kinds of objects whose first list has not arrived; empty on a standby, which watches nothing.
    fn missing(&self) -> Vec<&'static str>;
    /// Every service as it stands.
    fn services(&self) -> Vec<ServiceReading>;
}

#[derive(Clone)]
struct Shared {
    metrics: Metrics,
    overview: Arc<dyn Overview>,
}

/// Listens on every address, both families where the machine has both.
///
/// # Errors
/// The port is taken.
pub async fn listen(port: u16) -> std::io::Result<TcpListener> {
    let any = |address: IpAddr| TcpListener::bind(SocketAddr::new(address, port));
    match any(Ipv6Addr::UNSPECIFIED.into()).await {
        Ok(listener) => Ok(listener),
        Err(_no_ipv6) => any(Ipv4Addr::UNSPECIFIED.into()).await,
    }
}

/// Serves for ever, a bounded number of connections at once.
pub async fn serve_on(listener: TcpListener, router: Router) -> Infallible {
    let room = Arc::new(Semaphore::new(door::CONNECTIONS));
    loop {
        let stream = door::accept(&listener).await;
        let Ok(place) = room.clone().try_acquire_owned() else { continue };
        let router = router.clone();
        tokio::spawn(async move {
            let _place = place;
            door::answer(stream, router).await;
        });
    }
}

/// `/livez` and `/readyz`.
pub fn probes(metrics: Metrics, overview: Arc<dyn Overview>) -> Router {
    let router = Router::new().route("/livez", get(|| async { "ok\n" })).route("/readyz", get(ready));
    router.with_state(Shared { metrics, overview })
}

/// `/metrics`.
pub fn exposition(metrics: Metrics, overview: Arc<dyn Overview>) -> Router {
    Router::new().route("/metrics", get(expose)).with_state(Shared { metrics, overview })
}

async fn ready(State(shared): State<Shared>) -> Response {
    match shared.overview.missing().as_slice() {
        [] if shared.metrics.is_leading() => "ok: leading\n".into_response(),
        [] => "ok: standing by\n".into_response(),
        missing => {
            let text = format!("waiting for the first list of: {}\n", missing.join(", "));
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
    }
}

async fn expose(State(shared): State<Shared>) -> Response {
    match shared.metrics.render(&shared.overview.services()) {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}
