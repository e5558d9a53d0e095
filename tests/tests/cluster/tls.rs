//! An https server of one file, with ranges, that cuts one answer short.

use anyhow::{Context, Result, anyhow};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// The server; its threads end with the test.
pub struct Server {
    address: SocketAddr,
    authority: String,
    answers: Answers,
}

/// Bytes of the file that answers so far had, or were to have.
type Answers = Arc<Mutex<Vec<Range<u64>>>>;

impl Server {
    /// Serves `file` at `address` on a free port under a new authority; the first answer that has
    /// its byte `cut` ends before it.
    pub fn start(address: IpAddr, file: &Path, cut: u64) -> Result<Server> {
        let (config, authority) = certificates(address)?;
        let listener = TcpListener::bind((address, 0)).with_context(|| format!("cannot listen on {address}"))?;
        let server = Server { address: listener.local_addr()?, authority, answers: Arc::default() };
        let (file, answers) = (file.to_owned(), server.answers.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (config, file, answers) = (config.clone(), file.clone(), answers.clone());
                // A client that goes away ends its thread; what matters is what the client then does.
                std::thread::spawn(move || answer(stream, config, &file, cut, &answers));
            }
        });
        Ok(server)
    }

    pub fn url(&self) -> String {
        format!("https://{}/model.gguf", self.address)
    }

    /// The authority's certificate, PEM.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// How many answers so far had a byte of the file.
    pub fn times(&self, byte: u64) -> usize {
        self.answers.lock().map_or(0, |answers| times(&answers, byte))
    }

    /// Bytes of the file in all answers so far.
    pub fn sent(&self) -> u64 {
        self.answers.lock().map_or(0, |answers| answers.iter().map(|answer| answer.end - answer.start).sum())
    }
}

fn times(answers: &[Range<u64>], byte: u64) -> usize {
    answers.iter().filter(|answer| answer.contains(&byte)).count()
}

fn certificates(address: IpAddr) -> Result<(Arc<ServerConfig>, String)> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate()?;
    let authority = params.self_signed(&key)?.pem();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(vec![address.to_string()])?.signed_by(&key, &issuer)?;
    let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(|error| anyhow!(error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let config = config.with_no_client_auth().with_single_cert(vec![certificate.der().clone()], key)?;
    Ok((Arc::new(config), authority))
}

/// One request a connection.
fn answer(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    file: &PathBuf,
    cut: u64,
    answers: &Mutex<Vec<Range<u64>>>,
) -> Result<()> {
    let mut tls = BufReader::new(StreamOwned::new(ServerConnection::new(config)?, stream));
    let (start, end) = range(&mut tls)?;
    let mut file = File::open(file)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(start))?;
    let is_whole = start == 0 && end.is_none();
    let end = end.map_or(length, |last| (last + 1).min(length));
    let status = if is_whole {
        "200 OK".to_owned()
    } else {
        format!("206 Partial Content\r\nContent-Range: bytes {start}-{}/{length}", end - 1)
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nAccept-Ranges: bytes\r\nETag: \"1\"\r\nConnection: close\r\n\r\n",
        end - start
    );
    let is_cut = (start..end).contains(&cut) && {
        let answers = answers.lock().map_err(|_| anyhow!("another thread panicked"))?;
        times(&answers, cut) == 0
    };
    answers.lock().map_err(|_| anyhow!("another thread panicked"))?.push(start..end);
    let tls = tls.get_mut();
    tls.write_all(head.as_bytes())?;
    std::io::copy(&mut file.take(if is_cut { cut - start } else { end - start }), tls)?;
    if !is_cut {
        tls.conn.send_close_notify();
    }
    Ok(tls.flush()?)
}

/// Reads a request's head; the first byte that its `Range` asks for, and the last where it names one.
fn range(reader: &mut impl BufRead) -> Result<(u64, Option<u64>)> {
    let mut range = (0, None);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            return Ok(range);
        }
        if let Some((first, last)) = line.strip_prefix("range: bytes=").and_then(|text| text.split_once('-')) {
            range = (first.parse()?, last.parse().ok());
        }
    }
}
