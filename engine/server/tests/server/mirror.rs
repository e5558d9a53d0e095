//! A server with files: a mirror of the hub, and a registry.

use axum::Router;
use axum::body::Body;
use axum::extract::{Path as Segments, Request, State};
use axum::http::{Response, StatusCode, header};
use axum::routing::get;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::sync::watch;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A server with files that hands out ranges, keeps what it was asked, and breaks off now and then.
pub struct Mirror {
    pub files: BTreeMap<String, Vec<u8>>,
    pub asked: Mutex<Vec<String>>,
    /// Bytes of files.
    pub sent: AtomicUsize,
    /// Answers that still break off half-way.
    pub broken: Mutex<usize>,
    /// Answers that still have half of what was asked for, and say so.
    pub short: Mutex<usize>,
    pub token: Option<&'static str>,
    /// Requests that came with credentials.
    pub credentials: AtomicUsize,
    /// A mirror from which large files are sent; the small ones then come from another path of this one.
    pub storage: Option<String>,
    /// Manifests of this type name another, of one platform, where it is accepted.
    pub list_type: Option<&'static str>,
    /// Of each file, what lies before this is sent, and the rest when this grows.
    pub sends_before: watch::Sender<u64>,
    /// What the descriptions say of a file's checksum, instead of the truth.
    pub lies: Option<&'static str>,
}

pub fn bytes(seed: u32, count: u32) -> Vec<u8> {
    (0..count).map(|n| (n.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 24) as u8).collect()
}

fn accepts(request: &Request, kind: &str) -> bool {
    let accepted = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    accepted.split(", ").any(|accepted| accepted == kind)
}

pub fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Mirror {
    pub fn new(files: &[(&str, Vec<u8>)]) -> Mirror {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect();
        Mirror {
            files,
            asked: Mutex::default(),
            sent: AtomicUsize::new(0),
            broken: Mutex::new(0),
            short: Mutex::new(0),
            token: None,
            credentials: AtomicUsize::new(0),
            storage: None,
            list_type: None,
            sends_before: watch::Sender::new(u64::MAX),
            lies: None,
        }
    }

    /// A model of 20 MB in two shards, among files that are none of it.
    pub fn model() -> Mirror {
        Mirror::new(&[
            ("config.json", b"{}".to_vec()),
            ("tokenizer.json", b"{\"a\":1}".to_vec()),
            ("model-00001-of-00002.safetensors", bytes(1, 20_000_000)),
            ("model-00002-of-00002.safetensors", bytes(2, 300_000)),
            ("pytorch_model.bin", b"a pickle".to_vec()),
            ("onnx/model.safetensors", b"another".to_vec()),
        ])
    }

    pub async fn serve(self: &Arc<Mirror>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/api/models/org/name/revision/{revision}", get(Mirror::describe))
            .route("/org/name/resolve/{commit}/{*path}", get(Mirror::file))
            .route("/api/resolve-cache/models/org/name/{commit}/{*path}", get(Mirror::send))
            .route("/v2/org/name/manifests/{reference}", get(Mirror::manifest))
            .route("/v2/org/name/blobs/{digest}", get(Mirror::blob))
            .route("/token", get(Mirror::grant))
            .with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        format!("http://{address}")
    }

    fn allows(&self, request: &Request) -> bool {
        let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        self.asked.lock().unwrap().push(request.uri().path().to_owned());
        self.credentials.fetch_add(usize::from(given.is_some()), Ordering::SeqCst);
        self.token.is_none_or(|token| given == Some(&format!("Bearer {token}")))
    }

    async fn describe(State(mirror): State<Arc<Mirror>>, request: Request) -> Response<Body> {
        if !mirror.allows(&request) {
            return status(StatusCode::UNAUTHORIZED);
        }
        let sibling = |(name, bytes): (&String, &Vec<u8>)| match name.ends_with(".json") {
            true => json!({"rfilename": name, "size": bytes.len(), "blobId": hex(bytes)[..40]}),
            false => {
                let sha256 = mirror.lies.map_or_else(|| hex(bytes), str::to_owned);
                json!({"rfilename": name, "size": bytes.len(), "lfs": {"sha256": sha256, "size": bytes.len()}})
            }
        };
        let siblings: Vec<Value> = mirror.files.iter().map(sibling).collect();
        Response::new(Body::from(json!({"sha": COMMIT, "siblings": siblings}).to_string()))
    }

    async fn file(mirror: State<Arc<Mirror>>, path: Segments<(String, String)>, request: Request) -> Response<Body> {
        let Segments((commit, name)) = &path;
        let (status, location) = match &mirror.storage {
            None => return Mirror::send(mirror, path, request).await,
            Some(_) if !mirror.allows(&request) => return status(StatusCode::UNAUTHORIZED),
            Some(_) if name.ends_with(".json") => {
                let asked = request.uri().path().replace('/', "%2F");
                let path = format!("/api/resolve-cache/models/org/name/{commit}/{name}?{asked}=&etag=%22e%22");
                (StatusCode::TEMPORARY_REDIRECT, path)
            }
            Some(storage) => (StatusCode::FOUND, format!("{storage}/org/name/resolve/{commit}/{name}?signature=s")),
        };
        Response::builder().status(status).header(header::LOCATION, location).body(Body::from("moved")).unwrap()
    }

    async fn send(
        State(mirror): State<Arc<Mirror>>,
        Segments((commit, path)): Segments<(String, String)>,
        request: Request,
    ) -> Response<Body> {
        assert_eq!(commit, COMMIT);
        let allowed = mirror.allows(&request);
        match (allowed, mirror.files.get(&path)) {
            (false, _) => status(StatusCode::UNAUTHORIZED),
            (_, None) => status(StatusCode::NOT_FOUND),
            (_, Some(bytes)) => {
                let start = asked_range(&request)[0] as u64;
                mirror.sends_before.subscribe().wait_for(|before| start < *before).await.unwrap();
                mirror.range(bytes, &request)
            }
        }
    }

    fn range(&self, bytes: &[u8], request: &Request) -> Response<Body> {
        let [from, mut to] = asked_range(request);
        let mut short = self.short.lock().unwrap();
        if *short > 0 && to > from {
            *short -= 1;
            to = from + (to - from) / 2;
        }
        let part = bytes[from..=to].to_vec();
        self.sent.fetch_add(part.len(), Ordering::SeqCst);
        let builder = Response::builder()
            .status(StatusCode::PARTIAL_CONTENT)
            .header(header::CONTENT_LENGTH, part.len())
            .header(header::CONTENT_RANGE, format!("bytes {from}-{to}/{}", bytes.len()));
        let mut broken = self.broken.lock().unwrap();
        if *broken > 0 {
            *broken -= 1;
            let half = bytes::Bytes::from(part[..part.len() / 2].to_vec());
            let cut = futures::stream::iter([Ok(half), Err(std::io::Error::other("the line is cut"))]);
            return builder.body(Body::from_stream(cut)).unwrap();
        }
        builder.body(Body::from(part)).unwrap()
    }

    async fn manifest(State(mirror): State<Arc<Mirror>>, request: Request) -> Response<Body> {
        if !mirror.allows(&request) {
            let host = request.headers()[header::HOST].to_str().unwrap();
            let challenge = format!("Bearer realm=\"http://{host}/token\",service=\"here\"");
            let builder = Response::builder().status(StatusCode::UNAUTHORIZED);
            return builder.header(header::WWW_AUTHENTICATE, challenge).body(Body::empty()).unwrap();
        }
        let layer = |(name, bytes): (&String, &Vec<u8>)| {
            let (kind, title) = match name.split_once('.') {
                Some((layer, "tar")) if layer.starts_with("layer") => ("application/vnd.oci.image.layer.v1.tar", None),
                Some((layer, "tar.gz")) if layer.starts_with("layer") => {
                    ("application/vnd.docker.image.rootfs.diff.tar.gzip", None)
                }
                Some((layer, "tar.zst")) if layer.starts_with("layer") => {
                    ("application/vnd.oci.image.layer.v1.tar+zstd", None)
                }
                // Some tools call every file so.
                _ if name.ends_with("json") => ("application/vnd.oci.image.layer.v1.tar", Some(name)),
                _ => ("application/octet-stream", Some(name)),
            };
            let name = title.map(|title| json!({"org.opencontainers.image.title": title}));
            json!({"mediaType": kind, "digest": format!("sha256:{}", hex(bytes)), "size": bytes.len(),
                "annotations": name})
        };
        let layers: Vec<Value> = mirror.files.iter().map(layer).collect();
        let manifest = json!({"schemaVersion": 2, "layers": layers}).to_string();
        let digest = format!("sha256:{}", hex(manifest.as_bytes()));
        match mirror.list_type.filter(|_| !request.uri().path().ends_with(&digest)) {
            None => Response::new(Body::from(manifest)),
            // A registry has no other form of what was pushed as a list.
            Some(kind) if !accepts(&request, kind) => status(StatusCode::NOT_FOUND),
            Some(kind) => {
                let platform = json!({"mediaType": kind, "digest": digest, "size": manifest.len()});
                Response::new(Body::from(json!({"schemaVersion": 2, "manifests": [platform]}).to_string()))
            }
        }
    }

    async fn grant(State(mirror): State<Arc<Mirror>>, request: Request) -> Response<Body> {
        let wanted = "service=here&scope=repository:org/name:pull";
        assert_eq!(request.uri().query(), Some(wanted));
        Response::new(Body::from(json!({"token": mirror.token}).to_string()))
    }

    async fn blob(
        State(mirror): State<Arc<Mirror>>,
        Segments(digest): Segments<String>,
        request: Request,
    ) -> Response<Body> {
        if !mirror.allows(&request) {
            return status(StatusCode::UNAUTHORIZED);
        }
        let found = mirror.files.values().find(|bytes| digest == format!("sha256:{}", hex(bytes)));
        mirror.range(found.unwrap(), &request)
    }

    pub fn requests(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

/// The first and the last byte that are asked for.
fn asked_range(request: &Request) -> [usize; 2] {
    let range = request.headers()[header::RANGE].to_str().unwrap().strip_prefix("bytes=").unwrap();
    let (from, to) = range.split_once('-').unwrap();
    [from.parse().unwrap(), to.parse().unwrap()]
}

fn status(status: StatusCode) -> Response<Body> {
    Response::builder().status(status).body(Body::empty()).unwrap()
}
