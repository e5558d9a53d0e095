//! A model on several ranks and in several processes, as its users start it.

use crate::common::{Answer, Client, post, within};
use crate::llama::Llama;
use axum::body::Body;
use hyper::StatusCode;
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use windlass_checkpoint::testing::real_model;
use windlass_engine_contract::termination::{Reason, Termination};

/// A process, and where it serves.
struct Engine {
    child: Child,
    api: SocketAddr,
    admin: SocketAddr,
}

fn spawn(model: &Path, flags: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_windlass-engine"))
        .arg("serve")
        .arg(model)
        .args(["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--served-model-name", "smol"])
        .args(["--kv-cache-memory-bytes", "50000000", "--log-format", "json"])
        .args(flags.split_whitespace())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// Waits until it says where it serves.
async fn serving(mut child: Child) -> Engine {
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let address = |line: &Value, port: &str| line[port].as_str().unwrap().parse().unwrap();
    loop {
        let line = within("a log line", lines.next_line()).await.unwrap().expect("it should serve");
        let Ok(line) = serde_json::from_str::<Value>(&line) else { continue };
        if line["message"] == "serving" {
            let (api, admin) = (address(&line, "api"), address(&line, "admin"));
            // What else it says must not block it.
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Engine { child, api, admin };
        }
    }
}

impl Engine {
    async fn ask(&self) -> String {
        let answer = Answer::read(Client::connect(self.api).await.send(question()).await.unwrap()).await;
        answer.json()["choices"][0]["message"]["content"]
            .as_str()
            .unwrap_or_else(|| panic!("{}", answer.text()))
            .to_owned()
    }

    async fn stats(&self) -> Value {
        crate::common::get(self.admin, "/stats").await.json()
    }
}

fn question() -> hyper::Request<Body> {
    let messages = json!([{"role": "user", "content": "List three colours."}]);
    post("/v1/chat/completions", &json!({"model": "smol", "temperature": 0, "max_tokens": 24, "messages": messages}))
}

#[tokio::test(flavor = "multi_thread")]
async fn stats_say_how_many_ranks_were_built() {
    let Some(model) = real_model() else { return };
    let engine = serving(spawn(&model, "--tensor-parallel-size 3")).await;
    let stats = engine.stats().await;
    assert_eq!(stats["effective"]["tensorParallel"], 3);
    assert!(engine.ask().await.split_whitespace().count() > 3);
    let alone = serving(spawn(&model, "")).await.stats().await;
    assert_ne!(stats["fingerprint"], alone["fingerprint"], "sums have another order");
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_that_do_not_divide_the_heads_are_the_last_word() {
    let Some(model) = real_model() else { return };
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("termination-log");
    let mut child = spawn(&model, &format!("--tensor-parallel-size 2 --termination-log {}", log.display()));
    let status = within("it ends", child.wait()).await.unwrap();
    assert_eq!(status.code(), Some(i32::from(Reason::Unsupported.exit_code())));
    let termination = Termination::parse(&std::fs::read_to_string(&log).unwrap()).unwrap();
    assert!(termination.message.contains("9 query heads and 3 key-value heads"), "{termination:?}");
}

/// Two processes give the text of one. They sleep and wake with their weights, and refuse to sleep without: nobody would load them
/// again. When the second is killed, the first ends and names it.
#[tokio::test(flavor = "multi_thread")]
async fn two_processes_share_the_layers() {
    let Some(model) = real_model() else { return };
    let alone = serving(spawn(&model, "--threads 1")).await;
    let text = alone.ask().await;
    drop(alone);

    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("termination-log");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let common = format!("--threads 1 --pipeline-parallel-size 2 --master-port {port}");
    let mut second = spawn(&model, &format!("{common} --node-rank 1 --headless"));
    let guesses = r#"--speculative-config {"method":"ngram","prompt_lookup_min":1}"#;
    let mut first = serving(spawn(&model, &format!("{common} {guesses} --termination-log {}", log.display()))).await;
    assert_eq!(first.ask().await, text);

    let asked = async |path: &str| Client::connect(first.admin).await.post(path, &json!({})).await;
    let refused = asked("/sleep?level=2").await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert!(refused.text().contains("use level=1"), "{}", refused.text());
    assert_eq!(first.ask().await, text, "it is awake");
    for path in ["/sleep?level=1", "/wake_up"] {
        assert_eq!(asked(path).await.status, StatusCode::OK, "{path}");
    }
    assert_eq!(first.ask().await, text);

    second.kill().await.unwrap();
    // The step that needs it fails, where the first has not seen yet that it is gone; whether the answer still arrives is not
    // what this is about.
    if let Ok(mut client) = Client::try_connect(first.api).await {
        let _ = client.send(question()).await;
    }
    let status = within("it ends", first.child.wait()).await.unwrap();
    assert_eq!(status.code(), Some(i32::from(Reason::DeviceFailed.exit_code())));
    let termination = Termination::parse(&std::fs::read_to_string(&log).unwrap()).unwrap();
    assert!(termination.message.contains("node 1 of the pipeline"), "{termination:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn loading_takes_little_more_memory_than_the_weights_do() {
    let Some(model) = real_model() else { return };
    let weights = std::fs::metadata(&model).unwrap().len();
    let engine = serving(spawn(&model, "--max-model-len 2048")).await;
    engine.ask().await;
    check_peak(&engine, weights, 50_000_000, "a file of 4 bits");
}

/// Tables lie in memory whole but once, and what is made of floats beside none of them.
#[tokio::test(flavor = "multi_thread")]
async fn large_tables_take_little_more_memory_than_they_have_to() {
    let folder = tempfile::tempdir().unwrap();
    let llama = Llama { vocabulary: 1 << 18, noise: 0.0 };
    llama.write(folder.path());
    let values = llama.table_values();
    for (flags, weights) in [("", 2 * values), ("--quantization int8", values * 34 / 32)] {
        let flags = format!("{flags} --max-num-seqs 2 --max-num-batched-tokens 64");
        let engine = serving(spawn(folder.path(), &flags)).await;
        // Hardly any of the cache is written.
        check_peak(&engine, weights, 0, &flags);
    }
}

/// The file and what is made of it were never held both.
fn check_peak(engine: &Engine, weights: u64, kv: u64, what: &str) {
    let status = std::fs::read_to_string(format!("/proc/{}/status", engine.child.id().unwrap())).unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let most = 1024 * most.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
    let bound = weights * 11 / 10 + kv + 100_000_000;
    assert!(
        most <= bound,
        "{what}: {most} bytes at most; {bound} for {weights} of weights and {kv} of keys and values"
    );
}
