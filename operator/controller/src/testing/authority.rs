//! An authority with the certificates that it gives, and clients that show them.

use rcgen::{BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// The authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Who trusts it.
    pub store: Arc<RootCertStore>,
    /// Its own certificate.
    pub pem: String,
}

impl Authority {
    /// One of its own.
    pub fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("signed");
        let mut store = RootCertStore::empty();
        store.add(certificate.der().clone()).expect("an authority");
        Authority { issuer: Issuer::new(params, key), store: Arc::new(store), pem: certificate.pem() }
    }

    fn gives(&self, name: &str) -> (Certificate, KeyPair) {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        (params.signed_by(&key, &self.issuer).expect("signed"), key)
    }

    /// A new folder with a server's certificate: whoever asks for it removes it.
    pub fn folder(&self) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("windlass-door-{:08x}", rand::random::<u32>()));
        std::fs::create_dir(&folder).expect("a folder");
        let (certificate, key) = self.gives("server");
        std::fs::write(folder.join("tls.crt"), certificate.pem()).expect("written");
        std::fs::write(folder.join("tls.key"), key.serialize_pem()).expect("written");
        folder
    }

    /// What a client gets at `path` that shows a certificate of this name, or none.
    pub async fn asks(&self, address: &str, path: &str, name: Option<&str>) -> String {
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.expect("versions").with_root_certificates(self.store.clone());
        let config = match name.map(|name| self.gives(name)) {
            Some((certificate, key)) => {
                let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
                config.with_client_auth_cert(vec![certificate.der().clone()], key).expect("a pair")
            }
            None => config.with_no_client_auth(),
        };
        let stream = TcpStream::connect(address).await.expect("listens");
        let localhost = ServerName::try_from("localhost").expect("a name");
        let mut heard = Vec::new();
        // Whether it is turned away in the handshake or after it is no matter.
        if let Ok(mut stream) = TlsConnector::from(Arc::new(config)).connect(localhost, stream).await {
            let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
            let _ = stream.write_all(request.as_bytes()).await;
            let _ = stream.read_to_end(&mut heard).await;
        }
        String::from_utf8_lossy(&heard).into_owned()
    }
}
