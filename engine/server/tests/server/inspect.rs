//! `windlass-engine inspect`: the same of a file and of a URL, of which only the header is fetched.

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode, header};
use axum::routing::get;
use clap::Parser;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use windlass_engine::cli::{Cli, Command};
use windlass_engine::failure::Failure;
use windlass_engine::inspect;
use windlass_engine_contract::inspection::Inspection;
use windlass_engine_contract::termination::{MAX_TERMINATION_BYTES, Reason};

/// A server of one file, with ranges where `has_ranges`, and how much of it was sent.
struct Web {
    file: std::fs::File,
    has_ranges: bool,
    sent: AtomicU64,
}

async fn answer(State(web): State<Arc<Web>>, request: Request) -> Response<Body> {
    let whole = web.file.metadata().unwrap().len();
    let range = request.headers().get(header::RANGE).map(|value| value.to_str().unwrap().to_owned());
    let asked = range.filter(|_| web.has_ranges).map(|range| {
        let (start, end) =
            range.strip_prefix("bytes=").unwrap().split_once('-').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
        (start.parse::<u64>().unwrap(), end.parse::<u64>().unwrap().min(whole - 1))
    });
    let (start, end) = asked.unwrap_or((0, whole - 1));
    let mut bytes = vec![0; (end - start + 1) as usize];
    web.file.read_exact_at(&mut bytes, start).unwrap();
    web.sent.fetch_add(bytes.len() as u64, Ordering::SeqCst);
    let mut builder = Response::builder().header(header::ETAG, "\"v1\"");
    if asked.is_some() {
        builder = builder.status(StatusCode::PARTIAL_CONTENT);
        builder = builder.header(header::CONTENT_RANGE, format!("bytes {start}-{end}/{whole}"));
    }
    builder.header(header::CONTENT_LENGTH, bytes.len()).body(Body::from(bytes)).unwrap()
}

async fn serve(file: &Path, has_ranges: bool) -> (Arc<Web>, String) {
    let web = Arc::new(Web { file: std::fs::File::open(file).unwrap(), has_ranges, sent: AtomicU64::new(0) });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = axum::Router::new().route("/model.gguf", get(answer)).with_state(web.clone());
    tokio::spawn(async move { crate::fetch::axum_serve(listener, router).await });
    (web, format!("http://{address}/model.gguf"))
}

/// The last word of `inspect MODEL --summary`.
async fn inspected(model: &str) -> Result<String, Failure> {
    let log = tempfile::NamedTempFile::new().unwrap();
    let line = ["windlass-engine", "inspect", model, "--summary", "--termination-log", log.path().to_str().unwrap()];
    let Command::Inspect(args) = Cli::try_parse_from(line).unwrap().command else { panic!("another command") };
    tokio::task::spawn_blocking(move || inspect::run(&args, Duration::ZERO)).await.unwrap()?;
    Ok(std::fs::read_to_string(log.path()).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_is_inspected_by_its_header_alone() {
    let Some(model) = windlass_checkpoint::testing::real_model() else { return };
    let local = inspected(model.to_str().unwrap()).await.unwrap();
    assert!(local.len() <= MAX_TERMINATION_BYTES, "{}", local.len());
    let local = Inspection::parse(&local).unwrap();
    assert_eq!((local.weight_type.as_str(), local.revision.as_deref()), ("q4_1", None));
    assert_eq!([local.int8_bytes, local.fp8_bytes, local.int4_bytes], [None; 3], "integers are not converted");
    // Q4_1 in groups of 32: what a GPU adds is the padding of rows and columns.
    assert!(
        local.gpu_bytes.is_some_and(|bytes| (0.95..1.05).contains(&(bytes as f64 / local.shape.weight_bytes as f64)))
    );
    for has_ranges in [true, false] {
        let (web, url) = serve(&model, has_ranges).await;
        let remote = Inspection::parse(&inspected(&url).await.unwrap()).unwrap();
        assert_eq!(remote.revision.as_deref(), Some("\"v1\""));
        assert_eq!(Inspection { revision: None, ..remote }, local);
        let (sent, whole) = (web.sent.load(Ordering::SeqCst), std::fs::metadata(&model).unwrap().len());
        assert!(!has_ranges || sent < whole / 5, "{sent} of {whole} bytes");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_model_and_what_is_not_there_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("noise.gguf");
    std::fs::write(&path, vec![7; 3 << 20]).unwrap();
    let (_web, url) = serve(&path, true).await;
    assert_eq!(inspected(&url).await.unwrap_err().reason, Reason::ModelInvalid);
    assert_eq!(inspected("http://127.0.0.1:9/model.gguf").await.unwrap_err().reason, Reason::ModelUnavailable);
}
