//! Whose turn it is and who shares what, over HTTP.

use crate::common::{Client, FAST, MODEL, SLOW, TestServer, chat, serve};
use serde_json::{Value, json};

/// Cached tokens of a prompt of a hundred.
async fn cached(server: &TestServer, extra: Value) -> u64 {
    let prompt: Vec<u32> = (1..100).collect();
    let mut body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 1});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", &body).await.json();
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_found_by_the_same_salt_only() {
    let server = serve(FAST).await;
    for salt in [json!({}), json!({"cache_salt": "a"}), json!({"cache_salt": "b"})] {
        assert_eq!(cached(&server, salt.clone()).await, 0, "{salt}");
        assert_eq!(cached(&server, salt.clone()).await, 96, "{salt}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lower_priority_overtakes_those_that_wait() {
    let server = serve(&format!("{SLOW} --max-num-seqs 1 --scheduling-policy priority")).await;
    let ask = async |priority: i32| {
        let body = chat(json!({"max_tokens": 3, "priority": priority}));
        Client::connect(server.api).await.post("/v1/chat/completions", &body).await.json();
        priority
    };
    let mut running = Client::connect(server.api).await;
    let _running = running.open("/v1/chat/completions", &chat(json!({"max_tokens": 30, "stream": true}))).await;
    server.until("one runs", |stats| stats["running"] == 1).await;
    let ends = futures::stream::FuturesUnordered::from_iter([ask(9), ask(1), ask(5)]);
    let order: Vec<i32> = futures::StreamExt::collect(ends).await;
    assert_eq!(order, [1, 5, 9]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_would_wait_too_long_is_429_with_the_time_to_come_back() {
    let server =
        serve("--sim-step-us 1000 --sim-prefill-token-us 2000 --sim-mean-answer-tokens 0 --max-predicted-ttft-ms 100")
            .await;
    let prompt = |first: u32| json!({"model": MODEL, "prompt": vec![first; 400], "max_tokens": 20, "stream": true});
    // It learns how fast it is.
    server.post("/v1/completions", &prompt(1)).await;
    let (mut first, mut refused) = (Client::connect(server.api).await, None);
    let _first = first.open("/v1/completions", &prompt(2)).await;
    for other in 3..20 {
        let body = prompt(other);
        let answer = server.post("/v1/completions", &body);
        let answer = tokio::time::timeout(std::time::Duration::from_millis(300), answer).await;
        refused = refused.or(answer.ok().filter(|answer| answer.status == 429));
    }
    let refused = refused.expect("a refusal");
    assert_eq!(refused.json()["error"]["code"], "too_slow");
    assert!(refused.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    server.metric("windlass:predicted_ttft_seconds").await; // panics where it is not exported
}
