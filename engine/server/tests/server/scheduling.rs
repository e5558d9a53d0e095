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

/// Sends a completion and says when it is answered.
async fn in_turn(server: &TestServer, name: &'static str, body: Value) -> &'static str {
    let mut whole = json!({"model": MODEL, "max_tokens": 3});
    whole.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", &whole).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    name
}

/// The order in which requests end that come one after the other while another one runs alone.
async fn order(server: &TestServer, requests: Vec<(&'static str, Value)>) -> Vec<&'static str> {
    let mut running = Client::connect(server.api).await;
    let _running = running.open("/v1/chat/completions", &chat(json!({"max_tokens": 50, "stream": true}))).await;
    server.until("one runs", |stats| stats["running"] == 1).await;
    let mut asked = futures::stream::FuturesUnordered::new();
    for (waiting, (name, body)) in (1..).zip(requests) {
        asked.push(in_turn(server, name, body));
        // Polled together: a request is sent when its answer is waited for.
        tokio::select! {
            () = server.until("it waits", |stats| stats["waiting"] == waiting) => (),
            Some(name) = futures::StreamExt::next(&mut asked) => panic!("{name} did not wait"),
        }
    }
    futures::StreamExt::collect(asked).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_cached_longest_goes_first_where_that_is_the_policy() {
    let cached: Vec<u32> = (1..100).collect();
    let others = || {
        vec![("other", json!({"prompt": vec![7; 99]})), ("cached", json!({"prompt": (1..100).collect::<Vec<u32>>()}))]
    };
    for (policy, expected) in [("fcfs", ["other", "cached"]), ("longest-prefix", ["cached", "other"])] {
        let server = serve(&format!("{SLOW} --max-num-seqs 1 --scheduling-policy {policy}")).await;
        in_turn(&server, "first", json!({"prompt": cached})).await;
        assert_eq!(order(&server, others()).await, expected, "{policy}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_asks_for_much_waits_for_one_that_asks_for_little() {
    use hyper::StatusCode;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "alice key-a\nbob key-b\n").unwrap();
    let keys = file.path().display();
    // A turn is of 2048 tokens.
    for (policy, turns) in [("fcfs", 6..=6), ("fair", 0..=3)] {
        let flags = format!("--max-num-seqs 1 --scheduling-policy {policy} --no-enable-prefix-caching");
        let server = serve(&format!("{SLOW} {flags} --api-key-file {keys}")).await;
        let ask = async |key: &'static str, tokens: usize| {
            let body = json!({"model": MODEL, "prompt": vec![7; tokens], "max_tokens": 2});
            let mut request = crate::common::post("/v1/completions", &body);
            request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
            let answer = Client::connect(server.api).await.send(request).await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK);
            key
        };
        let ends = async {
            let alice = (0..6).map(|_| ask("key-a", 1500));
            let mut ends = futures::stream::FuturesUnordered::from_iter(alice.map(futures::FutureExt::boxed_local));
            tokio::select! {
                () = server.until("alice waits", |stats| stats["waiting"] == 5) => (),
                Some(key) = futures::StreamExt::next(&mut ends) => panic!("{key} did not wait"),
            }
            ends.push(futures::FutureExt::boxed_local(ask("key-b", 10)));
            futures::StreamExt::collect::<Vec<_>>(ends).await
        };
        let ends = ends.await;
        let bob = ends.iter().position(|key| *key == "key-b").unwrap();
        assert!(turns.contains(&bob), "{policy}: {ends:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_preempts_one_whose_priority_is_higher_by_more_than_the_threshold() {
    let flags = "--max-num-seqs 1 --scheduling-policy priority --priority-preemption-threshold 2";
    for (priority, preemptions) in [(3, 0.0), (2, 1.0)] {
        let server = serve(&format!("{SLOW} {flags}")).await;
        let mut running = Client::connect(server.api).await;
        let body = chat(json!({"max_tokens": 40, "stream": true, "priority": 5}));
        let mut running = running.open("/v1/chat/completions", &body).await;
        assert!(running.read_until("content").await);
        let answer = server.chat(json!({"max_tokens": 2, "priority": priority})).await;
        assert_eq!(answer.status.as_u16(), 200);
        let overtook = !running.text.contains("[DONE]");
        assert!(running.read_until("[DONE]").await && overtook, "only what was read is known");
        server.until("all have ended", |stats| stats["running"] == 0 && stats["finished"] == 2).await;
        let counted = server.metric("vllm:num_preemptions_total").await;
        assert!((counted - preemptions).abs() < f64::EPSILON, "{priority}: {counted}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_that_nobody_used_for_so_long_are_forgotten() {
    let server = serve(&format!("{FAST} --prefix-cache-ttl 0.5")).await;
    assert_eq!((cached(&server, json!({})).await, cached(&server, json!({})).await), (0, 96));
    crate::common::eventually("the cache is empty", async || {
        // Steps tell the time to what is cached; this one leaves no full block.
        server.chat(json!({"max_tokens": 1})).await;
        server.stats().await["cachedBlocks"] == 0
    })
    .await;
    assert_eq!(cached(&server, json!({})).await, 0);
}

/// Steps that computed more than so many tokens.
async fn long_steps(server: &TestServer, tokens: u32) -> f64 {
    let within = format!("vllm:iteration_tokens_total_bucket{{engine=\"0\",model_name=\"{MODEL}\",le=\"{tokens}\"}}");
    server.metric("vllm:iteration_tokens_total_count").await - server.metric(&within).await
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_cut_so_that_others_get_their_tokens_in_time() {
    let times = "--sim-step-us 1000 --sim-prefill-token-us 200 --sim-decode-sequence-us 1 --sim-mean-answer-tokens 0";
    for (flag, are_cut) in [("--target-inter-token-ms 1000", false), ("--target-inter-token-ms 10", true), ("", true)] {
        let server = serve(&format!("{times} {flag} --max-num-batched-tokens 512")).await;
        // It learns how long prompts take, in steps of different sizes.
        for tokens in [20, 60, 100, 40, 80] {
            in_turn(&server, "short", json!({"prompt": vec![tokens; tokens as usize]})).await;
        }
        let mut running = Client::connect(server.api).await;
        let body = chat(json!({"max_tokens": 5000, "stream": true}));
        let mut running = running.open("/v1/chat/completions", &body).await;
        assert!(running.read_until("content").await);
        in_turn(&server, "long", json!({"prompt": vec![7; 2000]})).await;
        let long = long_steps(&server, 200).await;
        assert_eq!(long < 0.5, are_cut, "{flag:?}: {long} steps of more than 200 tokens");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deterministic_mode_is_the_default() {
    let text = async |flags: &str| {
        let server = serve(&format!("{FAST} {flags}")).await;
        server.chat(json!({"max_tokens": 20, "seed": 4})).await.json()["choices"].clone()
    };
    assert_eq!(text("").await, text("--deterministic").await);
}
