//! How a server is reached: its address, and TLS where the address says https.

use crate::failure::Failure;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// A connection of either kind.
pub type Connection = Pin<Box<dyn Stream>>;

/// What a connection can do.
pub trait Stream: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Stream for T {}

/// Where a server is and how it is spoken to.
pub struct Transport {
    /// Host and port.
    pub authority: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Transport {
    /// The server at `url`, `http://host:port` or `https://host:port`, whose certificate is signed by one of the
    /// authorities in `ca_file`, or by a public one.
    pub fn new(url: &str, ca_file: Option<&Path>) -> Result<Transport, Failure> {
        let wrong = || Failure::configuration(format!("{url:?} is no address; write http://host:port or https://host"));
        let (scheme, rest) = url.split_once("://").ok_or_else(wrong)?;
        let authority = rest.trim_end_matches('/');
        if authority.is_empty() || authority.contains(['/', '@', ' ']) {
            return Err(wrong());
        }
        let (host, port) = split(authority);
        match scheme {
            "http" => Ok(Transport { authority: format!("{host}:{}", port.unwrap_or("80")), tls: None }),
            "https" => {
                let name = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                let name = ServerName::try_from(name).map_err(|_| wrong())?;
                let connector = TlsConnector::from(Arc::new(config(ca_file)?));
                let authority = format!("{host}:{}", port.unwrap_or("443"));
                Ok(Transport { authority, tls: Some((connector, name)) })
            }
            _ => Err(wrong()),
        }
    }

    /// A new connection.
    pub async fn connect(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect(&self.authority).await?;
        stream.set_nodelay(true)?;
        match &self.tls {
            Some((connector, name)) => Ok(Box::pin(connector.connect(name.clone(), stream).await?)),
            None => Ok(Box::pin(stream)),
        }
    }
}

/// Host and port, if there is one. An IPv6 address stands in brackets.
fn split(authority: &str) -> (&str, Option<&str>) {
    match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (authority, None),
    }
}

fn config(ca_file: Option<&Path>) -> Result<ClientConfig, Failure> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(file) => {
            let wrong = |error: String| Failure::configuration(format!("--ca-file {}: {error}", file.display()));
            let certificates = CertificateDer::pem_file_iter(file).map_err(|error| wrong(error.to_string()))?;
            for certificate in certificates {
                let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
                roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
            }
            if roots.is_empty() {
                return Err(wrong("it holds no certificate".to_owned()));
            }
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(Failure::internal)?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_others_refused() {
        for (url, authority) in [
            ("http://host", "host:80"),
            ("http://host:8000/", "host:8000"),
            ("https://host", "host:443"),
            ("https://[::1]:8443", "[::1]:8443"),
            ("http://[::1]", "[::1]:80"),
        ] {
            assert_eq!(Transport::new(url, None).map(|transport| transport.authority).ok().as_deref(), Some(authority));
        }
        for url in ["host:8000", "ftp://host", "http://", "http://user@host", "https://a b", "http://host/v1"] {
            assert!(Transport::new(url, None).is_err(), "{url}");
        }
    }
}
