//! `serve` with an address: the model is loaded while it comes, and served when all of it is right.

use crate::common::{PROGRAM, TestServer, serve_at, start};
use crate::mirror::Mirror;
use crate::sources::names;
use clap::Parser;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::real_model;
use windlass_engine::cli::{Cli, Command};
use windlass_engine::config::Config;
use windlass_engine::failure::Failure;
use windlass_engine::fetch::record::record_path;
use windlass_engine::serve::Server;
use windlass_engine_contract::termination::Reason;

const ADDRESS: &str = "hf://org/name/m.gguf";
/// Room for the header, whose vocabulary takes 1.7 MB, and for no more than a fifth of the file.
const HELD_FROM: u64 = 16 << 20;

/// A mirror with the real model, and a folder.
async fn mirror(change: impl FnOnce(Mirror) -> Mirror) -> Option<(Arc<Mirror>, String, tempfile::TempDir)> {
    let bytes = std::fs::read(real_model()?).unwrap();
    let mirror = Arc::new(change(Mirror::new(&[("m.gguf", bytes)])));
    let endpoint = mirror.serve().await;
    Some((mirror, endpoint, tempfile::tempdir().unwrap()))
}

async fn begin(endpoint: &str, folder: &Path) -> Result<Config, Failure> {
    begin_with(endpoint, folder, "--kv-cache-memory-bytes 100000000").await
}

async fn begin_with(endpoint: &str, folder: &Path, flags: &str) -> Result<Config, Failure> {
    let line = format!(
        "windlass-engine serve {ADDRESS} --hf-endpoint {endpoint} --download-dir {} --host 127.0.0.1 --port 0 \
         --admin-port 0 --device cpu --connections 2 {flags}",
        folder.display()
    );
    let Command::Serve(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else { panic!() };
    let config = tokio::task::spawn_blocking(move || Config::begin(&args, Duration::from_millis(1))).await.unwrap()?;
    Ok(Config { program: PROGRAM.into(), ..config })
}

/// What lies in the folder under the model's name.
fn models(folder: &Path) -> Vec<PathBuf> {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|ending| ending == "gguf")).collect()
}

async fn answer(server: &TestServer, model: &str) -> Value {
    let body = json!({"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0});
    server.post("/v1/completions", &body).await.json()["choices"][0]["text"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_loaded_while_it_comes_and_serves_as_one_that_was_there() {
    let held = |mirror: Mirror| Mirror { sends_before: tokio::sync::watch::Sender::new(HELD_FROM), ..mirror };
    let Some((mirror, endpoint, folder)) = mirror(held).await else { return };
    let config = begin(&endpoint, folder.path()).await.unwrap();
    let incoming = config.incoming.clone().expect("a model on its way");
    // Most of the file is held back, and its tensors are known, and the first ones can be read.
    let read = tokio::task::spawn_blocking(move || {
        let (coming, whole) = (incoming.open().unwrap(), Checkpoint::open(&real_model().unwrap()).unwrap());
        assert_eq!(coming.tensors().map(|tensor| tensor.bytes.len()).sum::<usize>(), whole_bytes(&whole));
        let first = whole.tensors().min_by_key(|tensor| tensor.bytes.address()).unwrap();
        let beginning = 0..1 << 20;
        coming.tensor(first.name).unwrap().bytes.slice(beginning.clone()).get() == first.bytes.slice(beginning).get()
    });
    assert!(read.await.unwrap());
    assert_eq!(models(folder.path()), Vec::<PathBuf>::new(), "nothing has its name before it is verified");
    mirror.sends_before.send_replace(u64::MAX);
    let server = start(config).await;
    let here = serve_at(&real_model().unwrap(), "--device cpu --kv-cache-memory-bytes 100000000").await;
    let name = real_model().unwrap().file_stem().unwrap().to_str().unwrap().to_owned();
    assert_eq!(answer(&server, "m").await, answer(&here, &name).await);
    let [model]: [PathBuf; 1] = models(folder.path()).try_into().unwrap();
    let record = std::fs::File::open(record_path(&model)).unwrap();
    assert!(record.try_lock().is_err(), "what is served cannot be cleared away");
    let hidden = names(folder.path()).into_iter().filter(|name| name.starts_with('.'));
    assert_eq!(hidden.count(), 0, "links to what was on its way are gone");
    // The next start asks for the list alone.
    let requests = mirror.requests();
    assert!(begin(&endpoint, folder.path()).await.unwrap().incoming.is_some_and(|model| model.finish().is_ok()));
    assert_eq!(mirror.requests(), requests + 1);
}

fn whole_bytes(checkpoint: &Checkpoint) -> usize {
    checkpoint.tensors().map(|tensor| tensor.bytes.len()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_is_not_what_it_should_be_is_never_served() {
    let lie = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    let lies = |mirror: Mirror| Mirror { lies: Some(lie), ..mirror };
    let Some((_mirror, endpoint, folder)) = mirror(lies).await else { return };
    let config = begin(&endpoint, folder.path()).await.unwrap();
    let failure = Server::start(config, Default::default()).await.err().expect("a failure");
    assert_eq!(failure.reason, Reason::ChecksumMismatch, "{failure}");
    assert!(failure.message.contains(lie), "{failure}");
    assert_eq!(models(folder.path()), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_cannot_start_does_not_wait_for_the_rest_of_its_model() {
    let held = |mirror: Mirror| Mirror { sends_before: tokio::sync::watch::Sender::new(HELD_FROM), ..mirror };
    let Some((_mirror, endpoint, folder)) = mirror(held).await else { return };
    let config = begin_with(&endpoint, folder.path(), "--kv-cache-memory-bytes 1").await.unwrap();
    let failure = Server::start(config, Default::default()).await.err().expect("a failure");
    assert_ne!(failure.reason, Reason::ModelUnavailable, "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_of_which_the_rest_does_not_come_fails_with_its_cause() {
    let held = |mirror: Mirror| Mirror { sends_before: tokio::sync::watch::Sender::new(HELD_FROM), ..mirror };
    let Some((mirror, endpoint, folder)) = mirror(held).await else { return };
    let config = begin(&endpoint, folder.path()).await.unwrap();
    *mirror.broken.lock().unwrap() = usize::MAX;
    mirror.sends_before.send_replace(u64::MAX);
    let failure = Server::start(config, Default::default()).await.err().expect("a failure");
    assert_eq!(failure.reason, Reason::ModelUnavailable, "{failure}");
    assert!(failure.message.contains("m.gguf") && failure.message.contains("attempts"), "{failure}");
    // What came is kept for the next start.
    *mirror.broken.lock().unwrap() = 0;
    let config = begin(&endpoint, folder.path()).await.unwrap();
    start(config).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn flags_of_addresses_are_refused_with_a_path() {
    for flag in ["--revision main", "--download-dir /tmp/models", "--sha256 00"] {
        let line = format!("windlass-engine serve model.gguf {flag}");
        let Command::Serve(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else { panic!() };
        let failure = Config::begin(&args, Duration::from_millis(1)).unwrap_err();
        assert_eq!(failure.reason, Reason::InvalidConfiguration, "{failure}");
        assert!(failure.message.contains("is for a model at an address"), "{failure}");
    }
}
