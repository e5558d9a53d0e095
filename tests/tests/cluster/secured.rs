//! A client over TLS that trusts what the chart publishes, and may show a certificate of its own.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Secret;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use windlass_tests::cluster::Cluster;
use windlass_tests::operator;

const PATIENCE: Duration = Duration::from_secs(30);

/// The client.
pub struct Secured {
    config: Arc<ClientConfig>,
    service: String,
}

impl Secured {
    /// Trusts the operator's Service of this name, by the authority in the Secret of the same. `shown`: where certificate
    /// and key lie that it shows, without `.crt` and `.key`.
    pub fn trusting(cluster: &Cluster, service: &str, shown: Option<&Path>) -> Result<Secured> {
        let secret: Secret = cluster.kubectl().get(&["get", "secret", service, "-n", operator::NAMESPACE])?;
        let authority = secret.data.and_then(|mut data| data.remove("ca.crt")).context("no authority")?.0;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(&authority)?)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let config = config.with_root_certificates(roots);
        let config = match shown {
            Some(shown) => {
                let chain = CertificateDer::from_pem_file(shown.with_extension("crt"))?;
                config.with_client_auth_cert(vec![chain], PrivateKeyDer::from_pem_file(shown.with_extension("key"))?)?
            }
            None => config.with_no_client_auth(),
        };
        Ok(Secured { config: Arc::new(config), service: service.to_owned() })
    }

    /// The whole answer to a request, its head included.
    pub fn get(&self, address: SocketAddr, path: &str, token: Option<&str>) -> Result<String> {
        let name = ServerName::try_from(format!("{}.{}.svc", self.service, operator::NAMESPACE))?;
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        let connection = ClientConnection::new(self.config.clone(), name)?;
        exchange(StreamOwned::new(connection, stream), &self.service, path, token)
    }
}

/// Asks over a stream that is open.
pub fn exchange(mut stream: impl Read + Write, host: &str, path: &str, token: Option<&str>) -> Result<String> {
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{token}\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
