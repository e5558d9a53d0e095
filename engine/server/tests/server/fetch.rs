//! `windlass-engine fetch` against servers that resume, ignore ranges, stop half-way, refuse and lie.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode, header};
use axum::routing::get;
use clap::Parser;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use windlass_engine::cli::{Cli, Command};
use windlass_engine::failure::Failure;
use windlass_engine::fetch;
use windlass_engine_contract::termination::Reason;

/// A web server with one file, and a record of what it was asked.
struct Web {
    file: Bytes,
    manner: Manner,
    asked: Mutex<Vec<String>>,
    requests: AtomicUsize,
    has_stopped: AtomicBool,
}

#[derive(Clone, Copy, PartialEq)]
enum Manner {
    /// As it should.
    Proper,
    /// Sends all of it whatever is asked.
    IgnoresRanges,
    /// Stops after half of what it announced, the first time that it is more than a byte.
    StopsOnce,
    /// Has another file from the second part on, and says so.
    Changes,
    /// The same, and gives the first part alone a name.
    ChangesUnnamed,
    /// Names the file so that parts of what has that name may differ.
    NamesWeakly,
    /// Sends the bytes one further on instead of any part but the first.
    SendsOthers,
    /// Answers with this.
    Refuses(StatusCode),
}

impl Web {
    fn new(manner: Manner) -> Arc<Web> {
        Web::of(manner, 1_000_000)
    }

    fn of(manner: Manner, bytes: u32) -> Arc<Web> {
        let file: Vec<u8> = (0..bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        Arc::new(Web {
            file: file.into(),
            manner,
            asked: Mutex::default(),
            requests: AtomicUsize::new(0),
            has_stopped: AtomicBool::new(false),
        })
    }

    fn sha256(&self) -> String {
        Sha256::digest(&self.file).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn router(self: &Arc<Web>) -> Router {
        Router::new().route("/file", get(Web::answer)).with_state(self.clone())
    }

    async fn serve(self: &Arc<Web>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = self.router();
        tokio::spawn(async move { axum_serve(listener, router).await });
        format!("http://{address}/file")
    }

    async fn answer(State(web): State<Arc<Web>>, request: Request) -> Response<Body> {
        web.requests.fetch_add(1, Ordering::SeqCst);
        let header = |name| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        let range = header(header::RANGE);
        web.asked.lock().unwrap().push(format!("{range:?} {:?}", header(header::AUTHORIZATION)));
        let total = web.file.len();
        let last = || total.saturating_sub(1);
        let (from, to) = match (&range, web.manner) {
            (_, Manner::Refuses(status)) => return Response::builder().status(status).body(Body::empty()).unwrap(),
            (_, Manner::IgnoresRanges) | (None, _) => (0, last()),
            (Some(range), _) => {
                let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
                (from.parse().unwrap(), to.parse().map_or_else(|_| last(), |to: usize| to.min(last())))
            }
        };
        if range.is_some() && from >= total {
            let builder = Response::builder().status(StatusCode::RANGE_NOT_SATISFIABLE);
            return builder.header(header::CONTENT_RANGE, format!("bytes */{total}")).body(Body::empty()).unwrap();
        }
        let (from, to) = if web.manner == Manner::SendsOthers && from > 0 { (from + 1, last()) } else { (from, to) };
        let rest = web.file.slice(from..(to + 1).min(total));
        let version = match web.manner {
            Manner::Changes | Manner::ChangesUnnamed if from > 0 => "\"2\"",
            Manner::NamesWeakly => "W/\"1\"",
            _ => "\"1\"",
        };
        // Weak names are never the same here.
        if header(header::IF_RANGE).is_some_and(|asked| asked != version || asked.starts_with("W/")) {
            let builder = Response::builder().header(header::CONTENT_LENGTH, total).header(header::ETAG, version);
            return builder.body(Body::from(web.file.clone())).unwrap();
        }
        let mut builder = Response::builder().header(header::CONTENT_LENGTH, rest.len());
        if web.manner != Manner::ChangesUnnamed || from == 0 {
            builder = builder.header(header::ETAG, version);
        }
        if range.is_some() && web.manner != Manner::IgnoresRanges {
            let range = format!("bytes {from}-{to}/{total}");
            builder = builder.status(StatusCode::PARTIAL_CONTENT).header(header::CONTENT_RANGE, range);
        }
        if web.manner == Manner::StopsOnce && rest.len() > 1 && !web.has_stopped.swap(true, Ordering::SeqCst) {
            let half = rest.slice(..rest.len() / 2);
            let broken = futures::stream::iter([Ok(half), Err(std::io::Error::other("the line is cut"))]);
            return builder.body(Body::from_stream(broken)).unwrap();
        }
        builder.body(Body::from(rest)).unwrap()
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

pub async fn axum_serve(listener: TcpListener, router: Router) {
    while let Ok((stream, _)) = listener.accept().await {
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            drop(Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

async fn fetch(url: &str, to: &Path, sha256: &str, flags: &[&str]) -> Result<(), Failure> {
    let line = ["windlass-engine", "fetch", url, "--to", to.to_str().unwrap(), "--sha256", sha256];
    let Command::Fetch(args) = Cli::try_parse_from(line.iter().chain(flags)).unwrap().command else { panic!() };
    tokio::task::spawn_blocking(move || fetch::run(&args, Duration::from_millis(1))).await.unwrap()
}

struct Target {
    _folder: tempfile::TempDir,
    file: PathBuf,
}

impl Target {
    fn new() -> Target {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a/b/model.gguf");
        Target { _folder: folder, file }
    }

    fn part(&self) -> PathBuf {
        self.file.with_extension("gguf.part")
    }

    fn begin_with(&self, bytes: &[u8]) {
        std::fs::create_dir_all(self.file.parent().unwrap()).unwrap();
        std::fs::write(self.part(), bytes).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_fetched_once_and_then_found() {
    let (web, target) = (Web::new(Manner::Proper), Target::new());
    let url = web.serve().await;
    fetch(&url, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
    fetch(&url, &target.file, &web.sha256().to_uppercase(), &[]).await.unwrap();
    assert_eq!(web.requests(), 2, "the length and one part: a verified file is not fetched again");
    let record = std::fs::read(fetch::record::record_path(&target.file)).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    assert!(record["seconds"].as_f64() > Some(0.0), "how long the download took stays: {record}");
    assert!(!target.part().exists());
    // Somebody changes the file: the record no longer counts, and it is fetched again.
    std::fs::write(&target.file, b"something else").unwrap();
    fetch(&url, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_is_continued_where_it_ends() {
    let (web, target) = (Web::new(Manner::Proper), Target::new());
    target.begin_with(&web.file[..123_456]);
    fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
    assert_eq!(web.asked.lock().unwrap().as_slice(), [r#"Some("bytes=123456-") None"#]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_part_needs_nothing_more() {
    let (web, target) = (Web::new(Manner::Proper), Target::new());
    target.begin_with(&web.file);
    fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_ignores_ranges_sends_all_of_it_again() {
    let (web, target) = (Web::new(Manner::IgnoresRanges), Target::new());
    target.begin_with(&web.file[..1000]);
    fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_connection_is_resumed() {
    let (web, target) = (Web::new(Manner::StopsOnce), Target::new());
    fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
    let asked = web.asked.lock().unwrap();
    assert!(asked.len() == 3 && asked[2].starts_with("Some(\"bytes=0-999999"), "{asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_stream_is_resumed() {
    let (web, target) = (Web::new(Manner::StopsOnce), Target::new());
    target.begin_with(&web.file[..1000]);
    fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
    let asked = web.asked.lock().unwrap();
    assert!(asked.len() == 2 && asked[1].starts_with("Some(\"bytes=50"), "{asked:?}");
}

/// The ranges that were asked for, in their order in the file.
fn ranges(web: &Web) -> Vec<String> {
    let asked = web.asked.lock().unwrap();
    let mut ranges: Vec<String> = asked.iter().map(|asked| asked.split('"').nth(1).unwrap().to_owned()).collect();
    ranges
        .sort_by_key(|range| range["bytes=".len()..].split('-').map(|end| end.parse().unwrap()).collect::<Vec<u64>>());
    ranges
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_comes_in_parts_and_only_those_that_are_missing() {
    let parts = ["bytes=0-0", "bytes=0-8388607", "bytes=8388608-16777215", "bytes=16777216-19999999"];
    let (web, target) = (Web::of(Manner::Proper, 20_000_000), Target::new());
    let url = web.serve().await;
    fetch(&url, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
    assert_eq!(ranges(&web), parts);
    assert!(!target.part().exists());
    // What another fetch left of it is not fetched again.
    let (web, target) = (Web::of(Manner::Proper, 20_000_000), Target::new());
    let blobs = target.file.parent().unwrap().join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join(format!("sha256-{}.part", web.sha256())), &web.file).unwrap();
    std::fs::write(blobs.join(format!("sha256-{}.parts", web.sha256())), "0\n16777216\n").unwrap();
    fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
    assert_eq!(ranges(&web), [parts[0], parts[2]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_of_a_server_without_ranges_comes_as_one_stream() {
    let (web, target) = (Web::of(Manner::IgnoresRanges, 20_000_000), Target::new());
    fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
    assert_eq!(web.requests(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changes_while_it_comes_is_refused_and_forgotten() {
    for manner in [Manner::Changes, Manner::ChangesUnnamed] {
        let (web, target) = (Web::of(manner, 20_000_000), Target::new());
        let failure = fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap_err();
        assert_eq!(failure.reason, Reason::ModelUnavailable, "{failure}");
        let change = "the file changed while it was fetched: its ETag was \"1\" and is \"2\"";
        assert!(failure.message.contains(change), "{failure}");
        let blobs = std::fs::read_dir(target.file.parent().unwrap().join("blobs")).unwrap();
        assert_eq!(blobs.count(), 0, "nothing is left of a mixture");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_name_is_a_weak_one_comes_in_parts() {
    let (web, target) = (Web::of(Manner::NamesWeakly, 20_000_000), Target::new());
    fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_part_than_was_asked_for_is_refused() {
    let (web, target) = (Web::of(Manner::SendsOthers, 20_000_000), Target::new());
    let failure = fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap_err();
    assert!(failure.message.contains("does not send the part of the file that was asked for"), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_file_is_fetched() {
    let (web, target) = (Web::of(Manner::Proper, 0), Target::new());
    fetch(&web.serve().await, &target.file, &web.sha256(), &[]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_file_than_the_checksums_is_refused_and_not_kept() {
    let (web, target) = (Web::new(Manner::Proper), Target::new());
    let url = web.serve().await;
    let failure = fetch(&url, &target.file, &"00".repeat(32), &[]).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ChecksumMismatch);
    assert!(failure.message.contains(&web.sha256()), "{failure}");
    assert!(!target.file.exists());
    assert_eq!(std::fs::metadata(target.part()).unwrap().len(), 0, "the next attempt begins anew");
    // A part of another file is found out, and the attempt after that is whole.
    target.begin_with(b"wrong");
    assert!(fetch(&url, &target.file, &web.sha256(), &[]).await.is_err());
    fetch(&url, &target.file, &web.sha256(), &[]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_had_is_said_with_its_cause() {
    for (manner, requests, word) in [
        (Manner::Refuses(StatusCode::NOT_FOUND), 1, "404"),
        (Manner::Refuses(StatusCode::FORBIDDEN), 1, "403"),
        (Manner::Refuses(StatusCode::BAD_GATEWAY), 4, "502"),
    ] {
        let (web, target) = (Web::new(manner), Target::new());
        let url = format!("{}?token=hunter2", web.serve().await);
        let failure = fetch(&url, &target.file, &web.sha256(), &[]).await.unwrap_err();
        assert_eq!((failure.reason, web.requests()), (Reason::ModelUnavailable, requests), "{failure}");
        assert!(failure.message.contains(word) && !failure.message.contains("hunter2"), "{failure}");
    }
    let target = Target::new();
    let nobody = fetch("http://127.0.0.1:1/file", &target.file, &"00".repeat(32), &[]).await.unwrap_err();
    assert_eq!(nobody.reason, Reason::ModelUnavailable, "{nobody}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_larger_than_allowed_is_refused_before_it_is_stored() {
    for manner in [Manner::Proper, Manner::IgnoresRanges] {
        let (web, target) = (Web::new(manner), Target::new());
        let url = web.serve().await;
        let failure = fetch(&url, &target.file, &web.sha256(), &["--max-bytes", "999999"]).await.unwrap_err();
        assert!(failure.message.contains("999999"), "{failure}");
        assert_eq!(std::fs::metadata(target.part()).unwrap().len(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_sent_as_bearer() {
    let (web, target) = (Web::new(Manner::Proper), Target::new());
    let token = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(token.path(), "a-token\n").unwrap();
    let flags = ["--token-file", token.path().to_str().unwrap()];
    fetch(&web.serve().await, &target.file, &web.sha256(), &flags).await.unwrap();
    let asked = web.asked.lock().unwrap();
    assert!(asked.len() == 2 && asked.iter().all(|asked| asked.ends_with(r#"Some("Bearer a-token")"#)), "{asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_fetch_it_once() {
    let (web, target) = (Web::new(Manner::Proper), Target::new());
    let (url, sha256) = (web.serve().await, web.sha256());
    let (one, two) = tokio::join!(fetch(&url, &target.file, &sha256, &[]), fetch(&url, &target.file, &sha256, &[]));
    one.unwrap();
    two.unwrap();
    assert_eq!((web.requests(), std::fs::read(&target.file).unwrap().len()), (2, web.file.len()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_authority_is_trusted_only_when_given() {
    let (web, target) = (Web::new(Manner::Proper), Target::new());
    let certified = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://localhost:{}/file", listener.local_addr().unwrap().port());
    let router = web.router();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, service) = (acceptor.clone(), TowerToHyperService::new(router.clone()));
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                drop(Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await);
            });
        }
    });
    let untrusted = fetch(&url, &target.file, &web.sha256(), &[]).await.unwrap_err();
    assert_eq!(untrusted.reason, Reason::ModelUnavailable, "{untrusted}");
    let authority = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(authority.path(), certified.cert.pem()).unwrap();
    fetch(&url, &target.file, &web.sha256(), &["--ca-file", authority.path().to_str().unwrap()]).await.unwrap();
    assert_eq!(std::fs::read(&target.file).unwrap(), web.file);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_nobody_serves_makes_room_for_one_that_is_fetched() {
    let (web, other, target) = (Web::new(Manner::Proper), Web::of(Manner::Proper, 1_000_001), Target::new());
    let (url, sha256) = (web.serve().await, web.sha256());
    let (other_url, other_sha256) = (other.serve().await, other.sha256());
    let folder = target.file.parent().unwrap();
    let [first, second] = ["first.gguf", "second.gguf"].map(|name| folder.join(name));
    let bounded = ["--cache-max-bytes", "1600000"];
    fetch(&url, &first, &sha256, &bounded).await.unwrap();

    let failure = fetch(&other_url, &second, &other_sha256, &bounded).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelUnavailable, "one that was fetched just now is about to be served");
    assert!(failure.message.contains("may hold 1600000 bytes"), "{failure}");

    let record = std::fs::File::options().write(true).open(folder.join("first.gguf.fetched.json")).unwrap();
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(100_000);
    record.set_modified(long_ago).unwrap();
    fetch(&url, &first, &sha256, &bounded).await.unwrap();
    fetch(&other_url, &second, &other_sha256, &bounded).await.expect_err("what a pod has asked for again is used");

    record.set_modified(long_ago).unwrap();
    fetch(&other_url, &second, &other_sha256, &bounded).await.unwrap();
    assert!(!first.exists() && second.exists());
}
