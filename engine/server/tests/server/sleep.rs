//! Sleep and wake: memory is given back, streams end first or are told, and who asks takes turns.

use crate::common::{
    Answer, Client, FAST, OpenStream, SLOW, TestServer, chat, endless, eventually, get, serve, serve_at, within,
};
use crate::llama::Llama;
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

const CHAT: &str = "/v1/chat/completions";

/// A server that is asked to sleep while a stream of so many tokens runs on it, once it begins to.
async fn falling_asleep(tokens: u32) -> (TestServer, OpenStream, JoinHandle<Answer>) {
    let server = serve(SLOW).await;
    let mut client = Client::connect(server.api).await;
    let mut stream = client.open(CHAT, &chat(json!({"max_tokens": tokens, "stream": true}))).await;
    assert!(stream.read_until("data").await);
    let admin = server.admin;
    let asking = tokio::spawn(async move { Client::connect(admin).await.post("/sleep", &json!({})).await });
    server.until("it falls asleep", |stats| stats["phase"] == "Asleep").await;
    (server, stream, asking)
}

#[tokio::test(flavor = "multi_thread")]
async fn it_sleeps_after_its_streams_and_answers_the_same_when_it_wakes() {
    for level in [1, 2] {
        let server = serve(SLOW).await;
        let body = chat(json!({"max_tokens": 20, "seed": 7, "stream": true}));
        let mut client = Client::connect(server.api).await;
        let mut stream = client.open(CHAT, &body).await;
        assert!(stream.read_until("data").await);
        let path = format!("/sleep?level={level}");
        let sleep = server.admin_post(&path);
        assert_eq!(within("it sleeps", sleep).await.status, StatusCode::OK);
        assert!(stream.read_until("[DONE]").await, "a stream was cut: {}", stream.text);
        assert_eq!(get(server.admin, "/is_sleeping").await.json(), json!({"is_sleeping": true}));
        assert_eq!(get(server.admin, "/readyz").await.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(get(server.admin, "/livez").await.status, StatusCode::OK);
        assert_eq!(server.stats().await["phase"], "Asleep");
        let refused = server.post(CHAT, &body).await;
        assert_eq!(
            (refused.status, &refused.json()["error"]["code"]),
            (StatusCode::SERVICE_UNAVAILABLE, &json!("asleep"))
        );
        assert!(refused.header("retry-after").is_some());
        let state = if level == 1 { "weights_offloaded" } else { "discard_all" };
        let name = format!("vllm:engine_sleep_state{{engine=\"0\",model_name=\"sim-model\",sleep_state=\"{state}\"}}");
        assert!((server.metric(&name).await - 1.0).abs() < f64::EPSILON);
        let again = server.admin_post("/sleep?level=1").await;
        assert_eq!(again.status, StatusCode::CONFLICT);
        assert_eq!(server.admin_post("/wake_up").await.status, StatusCode::OK);
        assert_eq!(get(server.admin, "/readyz").await.status, StatusCode::OK);
        let after = server.post(CHAT, &body).await;
        let content = |text: &str| -> String {
            let events = text.lines().filter_map(|line| line.strip_prefix("data: {"));
            let events = events.map(|event| serde_json::from_str::<Value>(&format!("{{{event}")).unwrap());
            events.filter_map(|e| e["choices"][0]["delta"]["content"].as_str().map(str::to_owned)).collect()
        };
        assert_eq!(content(&after.text()), content(&stream.text));
    }
    let server = serve(FAST).await;
    assert_eq!(server.admin_post("/sleep?level=3").await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test(flavor = "multi_thread")]
async fn sleep_that_does_not_wait_ends_its_streams_with_an_error() {
    let server = serve(SLOW).await;
    let mut client = Client::connect(server.api).await;
    let mut stream = client.open(CHAT, &endless(true)).await;
    assert!(stream.read_until("data").await);
    assert_eq!(server.admin_post("/sleep?level=2&mode=abort").await.status, StatusCode::OK);
    assert!(stream.read_until("went to sleep").await && stream.text.contains("\"retry\":true"), "{}", stream.text);
    assert_eq!(server.admin_post("/wake_up").await.status, StatusCode::OK);
    assert_eq!(server.chat(json!({"max_tokens": 2})).await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn waking_a_server_that_falls_asleep_keeps_it_awake() {
    let (server, mut stream, sleeping) = falling_asleep(100).await;
    assert_eq!(server.post(CHAT, &chat(json!({"max_tokens": 1}))).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(server.admin_post("/wake_up").await.status, StatusCode::OK);
    assert_eq!(within("the sleeper learns of it", sleeping).await.unwrap().status, StatusCode::CONFLICT);
    assert_eq!(get(server.admin, "/readyz").await.status, StatusCode::OK);
    let answer = within("it answers", server.chat(json!({"max_tokens": 1}))).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(stream.read_until("[DONE]").await, "the stream was cut: {}", stream.text);
    // And it can sleep after that.
    assert_eq!(within("it sleeps", server.admin_post("/sleep")).await.status, StatusCode::OK);
    assert_eq!(server.admin_post("/wake_up").await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_sleeps_though_who_asked_is_gone() {
    let (server, mut stream, asking) = falling_asleep(50).await;
    asking.abort();
    assert!(stream.read_until("[DONE]").await, "the stream was cut: {}", stream.text);
    let name = "vllm:engine_sleep_state{engine=\"0\",model_name=\"sim-model\",sleep_state=\"weights_offloaded\"}";
    eventually("memory is given back", async || server.metric(name).await > 0.5).await;
    assert_eq!(server.admin_post("/wake_up").await.status, StatusCode::OK);
    assert_eq!(server.chat(json!({"max_tokens": 1})).await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_go_on_after_a_sleep() {
    let server = serve(FAST).await;
    const QUERIES: &str = "vllm:prefix_cache_queries_total";
    server.chat(json!({"max_tokens": 1})).await;
    eventually("a query is counted", async || server.metric(QUERIES).await > 1.0).await;
    for level in [1, 2] {
        let before = server.metric(QUERIES).await;
        assert_eq!(server.admin_post(&format!("/sleep?level={level}")).await.status, StatusCode::OK);
        assert!((server.metric(QUERIES).await - before).abs() < f64::EPSILON);
        assert_eq!(server.admin_post("/wake_up").await.status, StatusCode::OK);
        server.chat(json!({"max_tokens": 1})).await;
        // Six tokens of the prompt, and one of the first token's.
        eventually("the next query is counted", async || server.metric(QUERIES).await >= before + 7.0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_given_up_says_that_it_may_be_asked_for_again() {
    let server = serve(SLOW).await;
    let api = server.api;
    let asking = tokio::spawn(async move { Client::connect(api).await.post(CHAT, &endless(false)).await });
    server.until("it runs", |stats| stats["running"] == 1).await;
    assert_eq!(server.admin_post("/sleep?mode=abort").await.status, StatusCode::OK);
    let answer = within("an error", asking).await.unwrap();
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(
        (answer.header("x-should-retry"), &answer.json()["error"]["code"]),
        (Some("true"), &json!("interrupted"))
    );
}

/// The word for what answers depend on was told at the start, and the weights are read from the files.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_changed_while_its_server_slept_is_not_served_under_the_old_ones_name() {
    let folder = tempfile::tempdir().unwrap();
    let written = |noise| Llama { vocabulary: 320, noise }.write(folder.path());
    written(0.0);
    let flags = "--device cpu --threads 1 --max-num-seqs 4 --served-model-name llama";
    let server = serve_at(folder.path(), flags).await;
    let body = json!({"model": "llama", "prompt": "abc", "max_tokens": 8, "temperature": 0, "logprobs": 0});
    let answered = async || server.post("/v1/completions", &body).await.json()["choices"].clone();
    let before = answered().await;
    assert_eq!(server.admin_post("/sleep?level=2").await.status, StatusCode::OK);
    let config = folder.path().join("config.json");
    let of_another_config = || {
        written(0.0);
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, text.replace("0.00001", "0.0001").replace("1e-5", "1e-4")).unwrap();
    };
    for changed in [&(|| written(0.03)) as &(dyn Fn() + Sync), &of_another_config] {
        changed();
        let refused = within("it is told", server.admin_post("/wake_up")).await;
        assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(refused.text().contains("is not the model that was served before the sleep"), "{}", refused.text());
        assert_eq!(get(server.admin, "/is_sleeping").await.json(), json!({"is_sleeping": true}));
        assert_eq!(server.post("/v1/completions", &body).await.status, StatusCode::SERVICE_UNAVAILABLE);
    }
    written(0.0);
    assert_eq!(server.admin_post("/wake_up").await.status, StatusCode::OK);
    assert_eq!(answered().await, before);
}
