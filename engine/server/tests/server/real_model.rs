//! The whole way with real weights: a conversation over HTTP, whole and streamed, alone and among others.

use crate::common::{PROGRAM, TestServer, start, within};
use clap::Parser;
use serde_json::{Value, json};
use windlass_checkpoint::testing::real_model;
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

/// A completion of one prompt, and its only choice.
async fn complete(server: &TestServer, extra: Value) -> Value {
    let mut body = json!({"model": "smol", "prompt": PROMPT, "temperature": 0, "max_tokens": 12});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", &body).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    answer.json()["choices"][0].clone()
}

const PROMPT: &str = "The capital of France is a city on the river";

#[tokio::test(flavor = "multi_thread")]
async fn what_the_model_thought_of_its_answer_is_what_it_thinks_of_it_as_a_prompt() {
    let Some(server) = serve("--served-model-name smol --kv-cache-memory-bytes 100000000").await else { return };
    let said = complete(&server, json!({"logprobs": 3})).await;
    let text = format!("{PROMPT}{}", said["text"].as_str().unwrap());
    let scored = complete(&server, json!({"prompt": text, "echo": true, "max_tokens": 0, "logprobs": 3})).await;
    let list = |choice: &Value, name: &str| choice["logprobs"][name].as_array().unwrap().clone();
    let tail = |name: &str| list(&scored, name).split_off(list(&scored, name).len() - 12);
    assert_eq!((tail("tokens"), scored["text"].as_str()), (list(&said, "tokens"), Some(text.as_str())));
    // One by one or all at once, the bits are the same.
    assert_eq!(tail("token_logprobs"), list(&said, "token_logprobs"));
    assert_eq!(tail("top_logprobs"), list(&said, "top_logprobs"));
    let perplexity = -list(&scored, "token_logprobs").iter().filter_map(Value::as_f64).sum::<f64>();
    assert!((5.0..200.0).contains(&perplexity), "{perplexity} nats");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_to_one_prompt_share_it_and_are_what_each_is_alone() {
    let Some(server) = serve("--served-model-name smol --kv-cache-memory-bytes 100000000").await else { return };
    let body = |seed: u64, n: u32| json!({"model": "smol", "prompt": PROMPT, "max_tokens": 10, "seed": seed, "n": n, "temperature": 0.9});
    let together = server.post("/v1/completions", &body(40, 5)).await.json();
    for index in 0..5 {
        let alone = server.post("/v1/completions", &body(40 + index, 1)).await.json();
        assert_eq!(together["choices"][index as usize]["text"], alone["choices"][0]["text"], "choice {index}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_about_tokens_change_the_answer_as_they_say() {
    let Some(server) = serve("--served-model-name smol --kv-cache-memory-bytes 100000000").await else { return };
    let plain = complete(&server, json!({"max_tokens": 60})).await;
    let text = plain["text"].as_str().unwrap().to_owned();
    let word =
        text.split_whitespace().max_by_key(|word| word.len()).unwrap().trim_matches(|c: char| !c.is_alphabetic());
    let kept_out = complete(&server, json!({"max_tokens": 60, "bad_words": [word]})).await;
    assert!(!kept_out["text"].as_str().unwrap().contains(word), "{word:?} in {kept_out}");
    // Of as many tokens, different words: more where repeating costs, fewer where it pays.
    let distinct = async |extra: Value| {
        let mut body = json!({"max_tokens": 60, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let text = complete(&server, body).await["text"].as_str().unwrap().to_owned();
        let words: std::collections::BTreeSet<&str> = text.split_whitespace().collect();
        words.len()
    };
    let plain = distinct(json!({})).await;
    let varied = distinct(json!({"frequency_penalty": 2, "presence_penalty": 2})).await;
    let repetitive = distinct(json!({"repetition_penalty": 0.5})).await;
    assert!(repetitive < plain && plain < varied, "{repetitive}, {plain}, {varied} different words");
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
        let config = Config { program: PROGRAM.into(), ..Config::from_args(&args).unwrap() };
        let started = windlass_engine::serve::Server::start(config, Default::default()).await;
        let failure = started.err().unwrap();
        assert_eq!(failure.reason.exit_code(), code, "{flags}: {failure}");
        assert!(failure.message.contains(word), "{flags}: {failure}");
    }
}
