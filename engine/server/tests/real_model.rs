//! The whole way with real weights: a conversation over HTTP, whole and streamed, alone and among others.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use clap::Parser;
use common::{TestServer, real_model, start, within};
use serde_json::{Value, json};
use windlass_engine::cli::{Cli, Command};
use windlass_engine::config::Config;

/// The server on the real model, if there is one.
async fn serve(flags: &str) -> Option<TestServer> {
    let model = real_model()?;
    let line = format!("windlass-engine serve {} --host 127.0.0.1 --port 0 --admin-port 0 {flags}", model.display());
    let Command::Serve(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else { return None };
    Some(start(Config::from_args(&args).unwrap()).await)
}

fn question(extra: Value) -> Value {
    let mut body = json!({
        "model": "smol",
        "messages": [{"role": "user", "content": "List three colours."}],
        "temperature": 0,
        "max_tokens": 24,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn ask(server: &TestServer, extra: Value) -> Value {
    let answer = server.post("/v1/chat/completions", &question(extra)).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    answer.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_is_answered_and_streams_the_same_text() {
    let Some(server) = serve("--served-model-name smol --kv-cache-memory-bytes 100000000").await else { return };
    let whole = ask(&server, json!({})).await;
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    println!("the model says: {text}");
    assert!(text.split_whitespace().count() > 3, "{whole}");
    let events = server.post("/v1/chat/completions", &question(json!({"stream": true}))).await.events();
    let streamed: String = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, text);

    let stats = server.stats().await;
    assert_eq!((&stats["simulated"], &stats["effective"]["quantization"]), (&json!(false), &json!("q4_1")));
    println!("start: {}", stats["start"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn greedy_text_is_the_same_alone_and_among_sixteen() {
    let Some(server) = serve("--served-model-name smol --kv-cache-memory-bytes 100000000").await else { return };
    let alone = ask(&server, json!({})).await["choices"].clone();
    let other = |index: usize| {
        let content = format!("Tell me about the number {index}.");
        ask(&server, json!({"messages": [{"role": "user", "content": content}]}))
    };
    let among = futures::future::join(ask(&server, json!({})), futures::future::join_all((0..15).map(other)));
    let (answer, _) = within("all are answered", among).await;
    assert_eq!(answer["choices"], alone);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_file_does_not_hold_is_refused_with_its_reason() {
    let Some(model) = real_model() else { return };
    for (flags, code, word) in [
        ("--quantization q8_0", 13, "q4_1"),
        ("--max-model-len 100000", 2, "8192"),
        ("--max-model-len 8192 --kv-cache-memory-bytes 1000000", 14, "KV cache"),
    ] {
        let line =
            format!("windlass-engine serve {} --host 127.0.0.1 --port 0 --admin-port 0 {flags}", model.display());
        let Command::Serve(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else { return };
        let config = Config::from_args(&args).unwrap();
        let started = windlass_engine::serve::Server::start(config, Default::default()).await;
        let failure = started.err().unwrap();
        assert_eq!(failure.reason.exit_code(), code, "{flags}: {failure}");
        assert!(failure.message.contains(word), "{flags}: {failure}");
    }
}
