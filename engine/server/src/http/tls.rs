//! TLS from PEM files that are read again when they change, so that a renewed certificate needs no restart.

use crate::failure::Failure;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, ServerConfig};
use sha2::{Digest, Sha256};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio_rustls::TlsAcceptor;
use tracing::{info, warn};

/// Where certificates are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSource {
    /// The server's certificate chain.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Whether clients show certificates, too.
    pub clients: Option<ClientSource>,
}

/// What clients show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientSource {
    /// Authorities that sign their certificates.
    pub authorities: PathBuf,
    /// A client without a certificate is turned away.
    pub required: bool,
}

/// The certificates that are valid now.
pub struct Tls {
    source: TlsSource,
    refresh_every: Duration,
    current: RwLock<Current>,
}

struct Current {
    config: Arc<ServerConfig>,
    /// Of the files that `config` was made from.
    digest: [u8; 32],
    read_at: Instant,
}

impl Tls {
    /// Reads the files. A connection that finds them older than `refresh_every` reads them again.
    pub fn read(source: TlsSource, refresh_every: Duration) -> Result<Tls, Failure> {
        let failed = |error| Failure::configuration(format!("TLS: {error}"));
        let digest = source.digest().map_err(failed)?;
        let config = source.config().map_err(failed)?;
        Ok(Tls { source, refresh_every, current: RwLock::new(Current { config, digest, read_at: Instant::now() }) })
    }

    /// What the next connection is met with.
    pub fn acceptor(&self) -> TlsAcceptor {
        self.refresh();
        self.current.read().unwrap_or_else(PoisonError::into_inner).config.clone().into()
    }

    /// Files that cannot be used leave the old certificates in place.
    fn refresh(&self) {
        let old = |current: &Current| current.read_at.elapsed() >= self.refresh_every;
        if !old(&self.current.read().unwrap_or_else(PoisonError::into_inner)) {
            return;
        }
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if old(&current) {
            current.read_at = Instant::now();
            if let Err(error) = current.renew(&self.source) {
                warn!("the TLS files could not be read again, the old ones stay: {error}");
            }
        }
    }
}

impl Current {
    fn renew(&mut self, source: &TlsSource) -> io::Result<()> {
        let digest = source.digest()?;
        if digest != self.digest {
            (self.config, self.digest) = (source.config()?, digest);
            info!("TLS certificates were renewed");
        }
        Ok(())
    }
}

impl TlsSource {
    fn digest(&self) -> io::Result<[u8; 32]> {
        let authorities = self.clients.as_ref().map(|clients| &clients.authorities);
        let mut hash = Sha256::new();
        for file in [&self.certificate, &self.key].into_iter().chain(authorities) {
            hash.update(fs::read(file).map_err(|error| named(file, &error))?);
        }
        Ok(hash.finalize().into())
    }

    fn config(&self) -> io::Result<Arc<ServerConfig>> {
        let provider = Arc::new(ring::default_provider());
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| named(&self.key, &error))?;
        let builder = ServerConfig::builder_with_provider(provider.clone());
        let builder = builder.with_safe_default_protocol_versions().map_err(io::Error::other)?;
        let builder = builder.with_client_cert_verifier(self.verifier(provider)?);
        let chain = certificates(&self.certificate)?;
        let mut config = builder.with_single_cert(chain, key).map_err(|error| named(&self.certificate, &error))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    fn verifier(&self, provider: Arc<CryptoProvider>) -> io::Result<Arc<dyn ClientCertVerifier>> {
        let Some(ClientSource { authorities, required }) = &self.clients else {
            return Ok(WebPkiClientVerifier::no_client_auth());
        };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(authorities)? {
            roots.add(certificate).map_err(|error| named(authorities, &error))?;
        }
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        let builder = if *required { builder } else { builder.allow_unauthenticated() };
        builder.build().map_err(|error| named(authorities, &error))
    }
}

/// At least one certificate.
fn certificates(file: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read.map_err(|error| named(file, &error))? {
        none if none.is_empty() => Err(named(file, &"no certificate in it")),
        some => Ok(some),
    }
}

fn named(file: &Path, error: &dyn std::fmt::Display) -> io::Error {
    io::Error::other(format!("{}: {error}", file.display()))
}
