//! A TLS port: a certificate that is read again as it is renewed, and the clients that it lets in.

use anyhow::{Context, Result};
use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ConfigBuilder, RootCertStore, ServerConfig, WantsVerifier};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use x509_parser::prelude::{FromDer, X509Certificate};

/// A renewed certificate is taken within this time.
const REFRESH: Duration = Duration::from_secs(60);
/// Connections at once: an aggregation layer holds a few, as does whoever reads metrics.
pub const CONNECTIONS: usize = 64;
/// Between two tries to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Until a client has sent the headers of a request, the next one included; who reads metrics every minute or less comes again.
const HEADERS: Duration = Duration::from_secs(30);
/// Until a client has shown its certificate.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// The open port.
pub struct Door {
    listener: TcpListener,
    /// Folder of `tls.crt` and `tls.key`.
    certificates: PathBuf,
    clients: Arc<Clients>,
}

/// Who is let in.
pub enum Clients {
    /// Everybody: requests say who they are.
    Anybody,
    /// Who shows a certificate of one of the authorities, in one of these names; without names, in any.
    Certified {
        /// The authorities.
        authorities: Arc<RootCertStore>,
        /// Common names.
        names: Vec<String>,
    },
}

impl Door {
    /// Opens `port` with the certificate in the folder `certificates`.
    ///
    /// # Errors
    /// The port is taken, or the certificate cannot be used: said at once, and not with the first client.
    pub async fn open(port: u16, certificates: &Path, clients: Clients) -> Result<Door> {
        let listener = crate::http::listen(port).await.with_context(|| format!("listen on port {port}"))?;
        let door = Door { listener, certificates: certificates.to_owned(), clients: Arc::new(clients) };
        door.acceptor().map(|_| door)
    }

    /// Where it is.
    pub fn address(&self) -> String {
        self.listener.local_addr().map(|address: SocketAddr| address.to_string()).unwrap_or_default()
    }

    /// Lets clients in, for ever.
    ///
    /// # Errors
    /// The certificate cannot be read at first.
    pub async fn serve(self, router: Router) -> Result<Infallible> {
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let (mut acceptor, mut read_at) = (self.acceptor()?, Instant::now());
        loop {
            let stream = accept(&self.listener).await;
            if read_at.elapsed() >= REFRESH {
                // A certificate that cannot be used leaves the old one in place.
                match self.acceptor() {
                    Ok(renewed) => acceptor = renewed,
                    Err(error) => tracing::warn!(%error, "a certificate cannot be read again"),
                }
                read_at = Instant::now();
            }
            let Ok(place) = room.clone().try_acquire_owned() else { continue };
            let (acceptor, clients, router) = (acceptor.clone(), self.clients.clone(), router.clone());
            tokio::spawn(async move {
                let _place = place;
                match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) if clients.welcome(&stream) => answer(stream, router).await,
                    Ok(Ok(_)) => tracing::debug!("a client's certificate has a name that is not allowed"),
                    Ok(Err(error)) => tracing::debug!(%error, "a client was turned away"),
                    Err(_elapsed) => tracing::debug!("a client showed no certificate in time"),
                }
            });
        }
    }

    fn acceptor(&self) -> Result<TlsAcceptor> {
        let [chain, key] = ["tls.crt", "tls.key"].map(|name| self.certificates.join(name));
        let named = |path: &PathBuf| format!("read {}", path.display());
        let certificates =
            CertificateDer::pem_file_iter(&chain).and_then(Iterator::collect).with_context(|| named(&chain))?;
        let private = PrivateKeyDer::from_pem_file(&key).with_context(|| named(&key))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = self.clients.verified(config.with_safe_default_protocol_versions()?)?;
        let mut config = config.with_single_cert(certificates, private)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config).into())
    }
}

/// The next connection. What keeps one from being accepted, such as want of file descriptors, passes.
pub async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => tracing::warn!(%error, "no connection can be accepted; trying again"),
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

type WantsCertificate = ConfigBuilder<ServerConfig, rustls::server::WantsServerCert>;

impl Clients {
    fn verified(&self, config: ConfigBuilder<ServerConfig, WantsVerifier>) -> Result<WantsCertificate> {
        let Clients::Certified { authorities, .. } = self else { return Ok(config.with_no_client_auth()) };
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(authorities.clone(), provider).build()?;
        Ok(config.with_client_cert_verifier(verifier))
    }

    /// Whether the name is right of a client whose certificate is.
    fn welcome(&self, stream: &TlsStream<TcpStream>) -> bool {
        let Clients::Certified { names, .. } = self else { return true };
        let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        names.is_empty() || shown.is_some_and(|shown| common_names(shown).iter().any(|name| names.contains(name)))
    }
}

fn common_names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return Vec::new() };
    certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok().map(str::to_owned)).collect()
}

/// Answers a client until it goes away, or sends no request for too long.
pub async fn answer(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, router: Router) {
    let mut server = Builder::new(TokioExecutor::new());
    server.http1().timer(TokioTimer::new()).header_read_timeout(HEADERS);
    server.http2().timer(TokioTimer::new()).keep_alive_interval(HEADERS).keep_alive_timeout(HEADERS);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).await {
        tracing::debug!(%error, "a connection broke");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Authority;
    use axum::routing::get;

    /// An open door with a certificate of this authority.
    async fn open(authority: &Authority, clients: Clients) -> (String, PathBuf) {
        let folder = authority.folder();
        let door = Door::open(0, &folder, clients).await.expect("open");
        let port = door.listener.local_addr().expect("bound").port();
        tokio::spawn(door.serve(Router::new().route("/", get(|| async { "come in" }))));
        (format!("127.0.0.1:{port}"), folder)
    }

    #[tokio::test]
    async fn only_allowed_names_of_the_authority_come_in() {
        let (ours, other) = (Authority::new(), Authority::new());
        let certified = |names: &[&str]| Clients::Certified {
            authorities: ours.store.clone(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
        };
        for (names, client, is_welcome) in [
            (vec!["front-proxy"], Some("front-proxy"), true),
            (vec!["a", "front-proxy"], Some("front-proxy"), true),
            (vec!["front-proxy"], Some("somebody"), false),
            (vec![], Some("somebody"), true),
            (vec![], None, false),
        ] {
            let (address, folder) = open(&ours, certified(&names)).await;
            let heard = ours.asks(&address, "/", client).await;
            assert_eq!(heard.contains("come in"), is_welcome, "{names:?} {client:?}: {heard:?}");
            std::fs::remove_dir_all(folder).expect("removed");
        }
        let (address, folder) = open(&other, certified(&[])).await;
        assert_eq!(other.asks(&address, "/", Some("front-proxy")).await, "", "another authority's");
        std::fs::remove_dir_all(folder).expect("removed");
    }

    /// A socket from which no connection can be accepted, though there is something to read.
    async fn broken() -> TcpListener {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
        socket.send_to(b"?", socket.local_addr().expect("bound")).expect("sent");
        socket.set_nonblocking(true).expect("set");
        TcpListener::from_std(std::os::fd::OwnedFd::from(socket).into()).expect("a listener")
    }

    #[tokio::test]
    async fn a_client_that_cannot_be_accepted_does_not_close_the_door() {
        let folder = Authority::new().folder();
        let door = Door { listener: broken().await, certificates: folder.clone(), clients: Arc::new(Clients::Anybody) };
        assert!(door.listener.accept().await.is_err());
        let served = door.serve(Router::new());
        // Polled once: it meets the error, and is not over.
        assert!(tokio::time::timeout(Duration::ZERO, served).await.is_err());
        std::fs::remove_dir_all(folder).expect("removed");
    }

    #[tokio::test]
    async fn a_certificate_that_is_not_there_is_named() {
        let error = Door::open(0, Path::new("/nowhere"), Clients::Anybody).await.err().expect("refused");
        assert!(format!("{error:#}").contains("/nowhere/tls.crt"), "{error:#}");
    }
}
