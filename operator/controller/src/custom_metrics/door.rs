//! The port: TLS with the chart's certificate, and with the cluster's front proxy as the only client.

use crate::config::CustomMetricsConfig;
use anyhow::{Context, Result};
use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

/// Where a cluster publishes whom extension servers are asked by.
const AUTHENTICATION: (&str, &str) = ("kube-system", "extension-apiserver-authentication");
const FRONT_PROXY: &str = "requestheader-client-ca-file";
/// A renewed certificate is taken within this time.
const REFRESH: Duration = Duration::from_secs(60);
/// Connections at once: the aggregation layer holds a few.
const CONNECTIONS: usize = 64;
/// Until a client has shown its certificate.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// The open port.
pub struct Door {
    listener: TcpListener,
    certificates: PathBuf,
    clients: RootCertStore,
}

impl Door {
    /// Opens the port and reads whom it lets in.
    pub async fn open(client: &Client, config: &CustomMetricsConfig) -> Result<Door> {
        let (namespace, name) = AUTHENTICATION;
        let published = Api::<ConfigMap>::namespaced(client.clone(), namespace).get(name).await;
        let published = published.with_context(|| format!("read ConfigMap {namespace}/{name}"))?;
        let pem = published.data.unwrap_or_default().remove(FRONT_PROXY);
        let pem =
            pem.with_context(|| format!("ConfigMap {namespace}/{name} has no {FRONT_PROXY}: no aggregation layer"))?;
        let mut clients = RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            clients.add(authority?)?;
        }
        let listener = crate::http::listen(config.port).await.context("--custom-metrics-port")?;
        let door = Door { listener, certificates: config.certificates.clone(), clients };
        // Said at once where the certificate cannot be used, and not with the first client.
        door.acceptor()?;
        Ok(door)
    }

    /// Where it is.
    pub fn address(&self) -> String {
        self.listener.local_addr().map(|address: SocketAddr| address.to_string()).unwrap_or_default()
    }

    /// Lets clients in, for ever.
    pub async fn serve(self, router: Router) -> Result<Infallible> {
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let (mut acceptor, mut read_at) = (self.acceptor()?, Instant::now());
        loop {
            let (stream, _) = self.listener.accept().await?;
            if read_at.elapsed() >= REFRESH {
                // A certificate that cannot be used leaves the old one in place.
                match self.acceptor() {
                    Ok(renewed) => acceptor = renewed,
                    Err(error) => tracing::warn!(%error, "the certificate of custom metrics cannot be read again"),
                }
                read_at = Instant::now();
            }
            let Ok(place) = room.clone().try_acquire_owned() else { continue };
            let (acceptor, router) = (acceptor.clone(), router.clone());
            tokio::spawn(async move {
                let _place = place;
                match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => {
                        let service = TowerToHyperService::new(router);
                        let server = Builder::new(TokioExecutor::new());
                        let served = server.serve_connection(TokioIo::new(stream), service);
                        if let Err(error) = served.await {
                            tracing::debug!(%error, "a connection for custom metrics broke");
                        }
                    }
                    Ok(Err(error)) => tracing::debug!(%error, "a client of custom metrics was turned away"),
                    Err(_elapsed) => tracing::debug!("a client of custom metrics showed no certificate in time"),
                }
            });
        }
    }

    fn acceptor(&self) -> Result<TlsAcceptor> {
        let [chain, key] = ["tls.crt", "tls.key"].map(|name| self.certificates.join(name));
        let named = |path: &PathBuf| format!("--custom-metrics-certificates: {}", path.display());
        let certificates =
            CertificateDer::pem_file_iter(&chain).and_then(Iterator::collect).with_context(|| named(&chain))?;
        let private = PrivateKeyDer::from_pem_file(&key).with_context(|| named(&key))?;
        let provider = Arc::new(ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(self.clients.clone()), provider.clone()).build()?;
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let mut config = config.with_client_cert_verifier(verifier).with_single_cert(certificates, private)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config).into())
    }
}
