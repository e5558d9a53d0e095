//! How tokens are found, over HTTP with real weights: guessed ahead, searched with beams, over keys of 8 bits, out of the
//! swap space.

use crate::common::{TestServer, eventually, start};
use clap::Parser;
use serde_json::{Value, json};
use windlass_checkpoint::testing::real_model;
use windlass_engine::cli::{Cli, Command};
use windlass_engine::config::Config;

/// Prose that asks to be gone on with as it began.
const REPEATING: &str = "One, two, three, four, five, six, seven, eight, nine, ten. One, two, three, four, five, six, \
    seven, eight, nine, ten. One, two, three,";

/// The server on the real model, if there is one, with flags of which some hold spaces.
async fn serve(flags: &[&str]) -> Option<TestServer> {
    serve_sized(&[&["--kv-cache-memory-bytes", "100000000"], flags].concat()).await
}

/// The same with flags that say how large its cache is.
async fn serve_sized(flags: &[&str]) -> Option<TestServer> {
    let model = real_model()?;
    let common =
        ["windlass-engine", "serve", model.to_str()?, "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"];
    let line = common.iter().chain(&["--served-model-name", "smol"]).chain(flags);
    let Command::Serve(args) = Cli::try_parse_from(line).unwrap().command else { return None };
    Some(start(Config::from_args(&args).unwrap()).await)
}

async fn complete(server: &TestServer, extra: Value) -> Value {
    let mut body = json!({"model": "smol", "prompt": REPEATING, "temperature": 0, "max_tokens": 40});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", &body).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    answer.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn guesses_change_no_byte_and_are_counted_under_vllms_names() {
    let Some(plain) = serve(&[]).await else { return };
    let config = r#"{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1, "prompt_lookup_max": 4}"#;
    let guessing = serve(&["--speculative-config", config]).await.unwrap();
    let schema = json!({"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 6, "maxItems": 6});
    for extra in [
        json!({"logprobs": 2}),
        json!({"temperature": 0.8, "seed": 5, "n": 2}),
        json!({"stop": ["nine"], "frequency_penalty": 0.1}),
        json!({"structured_outputs": {"json": schema}, "max_tokens": 60}),
    ] {
        let [expected, found] = [&plain, &guessing].map(|server| complete(server, extra.clone()));
        let (expected, found) = (expected.await, found.await);
        assert_eq!((&found["choices"], &found["usage"]), (&expected["choices"], &expected["usage"]), "{extra}");
    }
    guessing.until("the last step is published", |stats| stats["running"] == json!(0)).await;
    let drafts = guessing.metric("vllm:spec_decode_num_drafts_total").await;
    let guessed = guessing.metric("vllm:spec_decode_num_draft_tokens_total").await;
    let accepted = guessing.metric("vllm:spec_decode_num_accepted_tokens_total").await;
    let first = guessing.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total").await;
    println!("{drafts} drafts of {guessed} guesses, {accepted} held");
    assert!(drafts > 0.0 && guessed >= drafts && accepted > 20.0 && first > 0.0 && first <= drafts);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_search_gives_different_answers_the_most_likely_first() {
    let Some(server) = serve(&[]).await else { return };
    let body = json!({"prompt": "The old harbour", "use_beam_search": true, "n": 4, "max_tokens": 12, "logprobs": 0});
    let found = complete(&server, body).await;
    let choices = found["choices"].as_array().unwrap();
    let likelihood = |choice: &Value| -> f64 {
        choice["logprobs"]["token_logprobs"].as_array().unwrap().iter().filter_map(Value::as_f64).sum()
    };
    let texts: std::collections::BTreeSet<&str> = choices.iter().filter_map(|choice| choice["text"].as_str()).collect();
    assert_eq!((choices.len(), texts.len()), (4, 4), "{found}");
    assert!(choices.iter().map(likelihood).is_sorted_by(|a, b| a >= b), "{found}");
    let greedy = complete(&server, json!({"prompt": "The old harbour", "max_tokens": 12, "logprobs": 0})).await;
    assert!(likelihood(&choices[0]) >= likelihood(&greedy["choices"][0]), "{found} and {greedy}");
    assert_eq!(found["usage"]["completion_tokens"], json!(48));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_and_values_of_8_bits_serve_and_say_so() {
    let Some(server) = serve(&["--kv-cache-dtype", "int8"]).await else { return };
    let answer = complete(&server, json!({})).await;
    assert!(answer["choices"][0]["text"].as_str().unwrap().contains("six"), "{answer}");
    let stats = server.stats().await;
    assert_eq!(stats["effective"]["kvCacheDataType"], json!("int8"), "{stats}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_had_to_go_comes_back_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--num-gpu-blocks-override", "24", "--max-model-len", "350", "--swap-space", "0.1", "--swap-dir"];
    let flags: Vec<&str> = flags.into_iter().chain(folder.path().to_str()).collect();
    let Some(model) = real_model() else { return };
    let line = ["windlass-engine", "serve", model.to_str().unwrap(), "--host", "127.0.0.1", "--port", "0"];
    let line = line.iter().chain(&["--admin-port", "0", "--served-model-name", "smol"]).chain(&flags);
    let Command::Serve(args) = Cli::try_parse_from(line).unwrap().command else { return };
    let server = start(Config::from_args(&args).unwrap()).await;
    let [one, other] = ["One, two, three. ", "Red, green, blue. "].map(|text| text.repeat(50));
    let ask = |prompt: &str| complete(&server, json!({"prompt": prompt, "max_tokens": 4}));
    let first = ask(&one).await;
    ask(&other).await;
    let again = ask(&one).await;
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!((cached(&first), first["choices"] == again["choices"]), (0, true));
    assert!(cached(&again) >= 272, "{again}");
    // The state is published behind the answer.
    eventually("both prompts are in the file", async || server.metric("windlass:kv_blocks_swapped").await >= 17.0)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_method_guesses_and_changes_no_byte() {
    let Some(plain) = serve(&[]).await else { return };
    let model = real_model().unwrap();
    let suffix = json!({"method": "suffix", "num_speculative_tokens": 6}).to_string();
    let draft = json!({"method": "draft_model", "model": model, "num_speculative_tokens": 3}).to_string();
    let extra = json!({"max_tokens": 30});
    let expected = complete(&plain, extra.clone()).await;
    for config in [suffix, draft] {
        let guessing = serve(&["--speculative-config", &config]).await.unwrap();
        let found = complete(&guessing, extra.clone()).await;
        assert_eq!((&found["choices"], &found["usage"]), (&expected["choices"], &expected["usage"]), "{config}");
        guessing.until("the last step is published", |stats| stats["running"] == json!(0)).await;
        let accepted = guessing.metric("vllm:spec_decode_num_accepted_tokens_total").await;
        assert!(accepted > 5.0, "{config}: {accepted} guesses held");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn real_weights_sleep_and_answer_the_same_when_they_wake() {
    let flags = ["--num-gpu-blocks-override", "24", "--max-model-len", "350", "--swap-space", "0.1"];
    let Some(server) = serve_sized(&flags).await else { return };
    let [one, other] = ["One, two, three. ", "Red, green, blue. "].map(|text| text.repeat(50));
    let ask = |prompt: &str| complete(&server, json!({"prompt": prompt, "max_tokens": 8, "logprobs": 2}));
    let first = ask(&one).await;
    ask(&other).await;
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached(&ask(&one).await) >= 272, "out of the swap space");
    eventually("they are counted", async || {
        let hits = server.metric("vllm:external_prefix_cache_hits_total").await;
        hits >= 16.0 && server.metric("vllm:external_prefix_cache_queries_total").await >= hits
    })
    .await;
    for level in [1, 2] {
        assert_eq!(server.admin_post(&format!("/sleep?level={level}")).await.status.as_u16(), 200, "level {level}");
        assert_eq!(server.admin_post("/wake_up").await.status.as_u16(), 200, "level {level}");
        let again = ask(&one).await;
        assert_eq!((cached(&again), &again["choices"]), (0, &first["choices"]), "level {level}");
        assert!(server.metric("windlass:kv_blocks_swapped").await < 17.0);
        ask(&other).await;
        assert_eq!(ask(&one).await["choices"], first["choices"], "level {level}, out of the swap space");
    }
}
