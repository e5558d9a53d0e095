//! `windlass-engine fetch` where what an address means changes, and where it may not.

use crate::mirror::{COMMIT, Mirror, bytes, hex};
use crate::sources::{fetch, names};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{Method, Response, StatusCode, header};
use std::sync::Arc;
use tokio::net::TcpListener;
use windlass_engine_contract::termination::Reason;

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_moved_on_leaves_nothing_of_what_it_was() {
    let mut old = Mirror::model();
    old.files.insert("model.safetensors.index.json".to_owned(), b"{}".to_vec());
    let new = Mirror::new(&[("config.json", b"{\"a\":2}".to_vec()), ("model.safetensors", bytes(3, 9000))]);
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model");
    fetch("hf://org/name", &to, &["--hf-endpoint", &Arc::new(old).serve().await]).await.unwrap();
    assert_eq!(names(&to).len(), 5);
    std::fs::write(to.join("notes.txt"), "somebody's").unwrap();
    fetch("hf://org/name", &to, &["--hf-endpoint", &Arc::new(new).serve().await]).await.unwrap();
    assert_eq!(names(&to), ["config.json", "model.safetensors", "notes.txt"]);
    assert_eq!(std::fs::read(to.join("config.json")).unwrap(), b"{\"a\":2}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_file_of_the_same_commit_is_another_model() {
    let files = [("m.Q4_0.gguf", bytes(3, 5000)), ("m.Q8_0.gguf", bytes(4, 9000))];
    let endpoint = Arc::new(Mirror::new(&files)).serve().await;
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model.gguf");
    for (name, content) in &files {
        let flags = ["--hf-endpoint", &endpoint, "--revision", COMMIT];
        fetch(&format!("hf://org/name/{name}"), &to, &flags).await.unwrap();
        assert!(std::fs::read(&to).unwrap() == *content, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_mean_something_else_in_a_url_are_fetched_as_they_are() {
    let odd = "special tokens #1?ä%20.json";
    let files = [("config.json", b"{}".to_vec()), ("model.safetensors", bytes(1, 100)), (odd, b"[]".to_vec())];
    let endpoint = Arc::new(Mirror::new(&files)).serve().await;
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model");
    fetch("hf://org/name", &to, &["--hf-endpoint", &endpoint]).await.unwrap();
    assert_eq!(names(&to), ["config.json", "model.safetensors", odd]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_that_is_named_by_its_digest_is_that_one() {
    let mirror = Arc::new(Mirror::new(&[("config.json", b"{}".to_vec()), ("model.safetensors", bytes(1, 100))]));
    let endpoint = mirror.serve().await;
    let manifest = format!("{endpoint}/v2/org/name/manifests/v1");
    let ask = move || ureq::get(manifest).call().unwrap().into_body().read_to_vec().unwrap();
    let digest = hex(&tokio::task::spawn_blocking(ask).await.unwrap());
    let image = format!("{}/org/name", endpoint.replace("http://", "oci://"));
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model");
    let other = fetch(&format!("{image}@sha256:{}", "0".repeat(64)), &to, &[]).await.unwrap_err();
    assert_eq!(other.reason, Reason::ChecksumMismatch, "{other}");
    assert!(other.message.contains(&digest), "{other}");
    let unknown = fetch(&format!("{image}@sha512:{}", "0".repeat(128)), &to, &[]).await.unwrap_err();
    assert_eq!(unknown.reason, Reason::Unsupported, "{unknown}");
    fetch(&format!("{image}@sha256:{digest}"), &to, &[]).await.unwrap();
    assert_eq!(names(&to), ["config.json", "model.safetensors"]);
}

const OBJECT_BYTES: usize = 20_000_000;

/// A bucket with one object, which is another one when its second part is asked for.
async fn object(request: Request) -> Response<Body> {
    let asked = |name| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let builder = Response::builder().header(header::LAST_MODIFIED, "Mon, 23 Nov 2026 10:00:00 GMT");
    if request.method() == Method::HEAD {
        let builder = builder.header(header::ETAG, "\"1\"").header(header::CONTENT_LENGTH, OBJECT_BYTES);
        return builder.body(Body::empty()).unwrap();
    }
    let range = asked(header::RANGE).unwrap();
    let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
    let version = if from == 0 { "\"1\"" } else { "\"2\"" };
    if asked(header::IF_MATCH).is_some_and(|wanted| wanted != version) {
        return builder.status(StatusCode::PRECONDITION_FAILED).body(Body::empty()).unwrap();
    }
    let builder = builder.status(StatusCode::PARTIAL_CONTENT).header(header::ETAG, version);
    let builder = builder.header(header::CONTENT_RANGE, format!("bytes {from}-{to}/{OBJECT_BYTES}"));
    builder.body(Body::from(vec![0; to + 1 - from])).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_changes_while_it_comes_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(object)).await });
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("credentials");
    std::fs::create_dir(&settings).unwrap();
    for (name, value) in [("AWS_ENDPOINT", endpoint.as_str()), ("AWS_SKIP_SIGNATURE", "true"), ("AWS_REGION", "here")] {
        std::fs::write(settings.join(name), value).unwrap();
    }
    let flags = ["--credentials-dir", settings.to_str().unwrap()];
    let failure = fetch("s3://models/m.gguf", &folder.path().join("m.gguf"), &flags).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelUnavailable, "{failure}");
    assert!(failure.message.contains("changed while it was fetched"), "{failure}");
}
