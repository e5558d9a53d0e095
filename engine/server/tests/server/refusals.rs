//! What the API refuses, and how: always OpenAI's envelope, with the field and the way out.

use crate::common::{Answer, Client, FAST, MODEL, SLOW, chat, get, post, serve};
use axum::body::Body;
use hyper::{Method, Request, StatusCode};
use serde_json::{Value, json};

#[track_caller]
fn assert_refused(answer: &Answer, status: u16, param: Option<&str>, code: &str) {
    let body = answer.json();
    let error = &body["error"];
    assert_eq!(answer.status.as_u16(), status, "{body}");
    assert_eq!((error["param"].as_str(), error["code"].as_str()), (param, Some(code)), "{body}");
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
    assert!(error["type"].as_str().is_some_and(|kind| kind.ends_with("error")), "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_that_is_not_done_is_refused_by_name() {
    let server = serve(FAST).await;
    for (extra, param, code) in [
        (json!({"n": 200}), "n", "invalid_value"),
        (json!({"best_of": 2}), "best_of", "invalid_value"),
        (json!({"top_logprobs": 2}), "top_logprobs", "invalid_value"),
        (json!({"prompt_logprobs": 21}), "prompt_logprobs", "invalid_value"),
        (json!({"logit_bias": {"4000000": 1}}), "logit_bias", "invalid_value"),
        (json!({"use_beam_search": true, "stream": true}), "use_beam_search", "invalid_value"),
        (json!({"length_penalty": 2}), "length_penalty", "invalid_value"),
        (json!({"tools": [{}]}), "tools[0].type", "missing_required_parameter"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type", "invalid_value"),
        (json!({"chat_template": "{{ 1 }}"}), "chat_template", "unsupported_parameter"),
        (json!({"frequency_penalty": 3}), "frequency_penalty", "invalid_value"),
        (json!({"no_such_field": 1}), "no_such_field", "unknown_parameter"),
        (json!({"temperature": -1}), "temperature", "invalid_value"),
        (json!({"temperature": "hot"}), "temperature", "invalid_type"),
        (json!({"top_k": 9_223_372_036_854_775_807_i64}), "top_k", "invalid_value"),
        (json!({"max_tokens": 0}), "max_tokens", "invalid_value"),
        (json!({"stop_token_ids": [4_000_000]}), "stop_token_ids", "invalid_value"),
        (json!({"messages": []}), "messages", "invalid_value"),
        (json!({"max_tokens": 100_000}), "messages", "context_length_exceeded"),
    ] {
        assert_refused(&server.chat(extra).await, 400, Some(param), code);
    }
    let many = json!({"model": MODEL, "prompt": ["a", "b"], "n": 128});
    assert_refused(&server.post("/v1/completions", &many).await, 400, Some("n"), "invalid_value");
    let best = json!({"model": MODEL, "prompt": "a", "best_of": 2, "stream": true});
    assert_refused(&server.post("/v1/completions", &best).await, 400, Some("best_of"), "invalid_value");
    let late = json!({"model": MODEL, "prompt": [4_000_000]});
    assert_refused(&server.post("/v1/completions", &late).await, 400, Some("prompt"), "invalid_value");
    let empty = json!({"model": MODEL, "prompt": ""});
    assert_refused(&server.post("/v1/completions", &empty).await, 400, Some("prompt"), "invalid_value");
    assert_eq!(server.chat(json!({"max_tokens": 1})).await.status, StatusCode::OK, "the server is as it was");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_too_long_is_refused_with_the_numbers() {
    let server = serve(&format!("{FAST} --max-model-len 64")).await;
    let text = "word ".repeat(64);
    let long = json!({"model": MODEL, "prompt": text});
    let answer = server.post("/v1/completions", &long).await;
    assert_refused(&answer, 400, Some("prompt"), "context_length_exceeded");
    assert!(answer.text().contains("64"), "{}", answer.text());
    // Too long by its bytes alone: no time is spent on tokenizing it.
    let huge = json!({"model": MODEL, "prompt": "x".repeat(1 << 20)});
    assert_refused(&server.post("/v1/completions", &huge).await, 400, Some("prompt"), "context_length_exceeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_is_not_served_is_not_found() {
    let server = serve(FAST).await;
    let mut body = chat(json!({}));
    body["model"] = json!("gpt-5");
    assert_refused(&server.post("/v1/chat/completions", &body).await, 404, Some("model"), "model_not_found");
    assert_refused(&get(server.api, "/v1/models/gpt-5").await, 404, Some("model"), "model_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_routes_methods_types_and_bodies_get_the_envelope() {
    let server = serve(FAST).await;
    let send = async |method: Method, path: &str, kind: &str, body: Vec<u8>| {
        let request = Request::builder().method(method).uri(path).header("content-type", kind).body(Body::from(body));
        let mut client = Client::connect(server.api).await;
        Answer::read(client.send(request.unwrap()).await.unwrap()).await
    };
    let (chats, json) = ("/v1/chat/completions", "application/json");
    assert_refused(&send(Method::GET, "/v1/nothing", json, vec![]).await, 404, None, "not_found");
    assert_refused(&send(Method::GET, chats, json, vec![]).await, 405, None, "method_not_allowed");
    assert_refused(&send(Method::POST, chats, "text/plain", vec![]).await, 415, None, "unsupported_media_type");
    assert_refused(&send(Method::POST, chats, json, b"{\"model\":".to_vec()).await, 400, None, "invalid_json");
    assert_refused(&send(Method::POST, chats, json, vec![b'['; 5000]).await, 400, None, "invalid_json");
    assert_refused(&send(Method::POST, chats, json, b"\xff\xfe".to_vec()).await, 400, None, "invalid_json");
    let huge = vec![b' '; (32 << 20) + 1];
    assert_refused(&send(Method::POST, chats, json, huge).await, 413, None, "body_too_large");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_but_health_asks_for_the_key() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("key"), "secret-key\n").unwrap();
    let server = serve(&format!("{FAST} --api-key-dir {}", folder.path().display())).await;
    let send = async |path: &str, key: Option<&str>| {
        let mut request = if path.contains("completions") {
            post(path, &chat(json!({"max_tokens": 1})))
        } else {
            Request::builder().uri(path).body(Body::empty()).unwrap()
        };
        if let Some(key) = key {
            request.headers_mut().insert("authorization", key.parse().unwrap());
        }
        Answer::read(Client::connect(server.api).await.send(request).await.unwrap()).await
    };
    for path in ["/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/nothing"] {
        for key in [None, Some("Bearer secret-ke"), Some("Bearer "), Some("secret-key"), Some("Basic secret-key")] {
            let answer = send(path, key).await;
            assert_refused(&answer, 401, None, "invalid_api_key");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        }
    }
    assert_eq!(send("/v1/chat/completions", Some("Bearer secret-key")).await.status, StatusCode::OK);
    assert_eq!(send("/health", None).await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_429_with_retry_after_and_not_unready() {
    let server = serve(&format!("{SLOW} --max-num-seqs 1 --max-queue-requests 1")).await;
    let body = chat(json!({"max_tokens": 1000, "stream": true}));
    let (mut first, mut second) = (Client::connect(server.api).await, Client::connect(server.api).await);
    let _running = first.open("/v1/chat/completions", &body).await;
    server.until("one runs", |stats| stats["running"] == 1).await;
    let _waiting = second.open("/v1/chat/completions", &body).await;
    server.until("one waits", |stats| stats["waiting"] == 1).await;

    let answer = server.post("/v1/chat/completions", &body).await;
    assert_refused(&answer, 429, None, "queue_full");
    let seconds: u32 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds));
    assert_eq!(get(server.admin, "/readyz").await.status, StatusCode::OK, "overload is not unreadiness");
    assert_eq!(server.stats().await["rejected"], 1);
    let age = server.stats().await["oldestQueueAgeSeconds"].as_f64().unwrap();
    assert!(age > 0.0, "{age}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_with_something_else_than_text_is_refused_with_its_path() {
    let server = serve(FAST).await;
    let image: Value = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]);
    let answer = server.chat(json!({"messages": image})).await;
    assert_refused(&answer, 400, Some("messages[0].content[0].type"), "invalid_value");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_could_never_be_admitted_is_refused_with_the_numbers() {
    let server =
        serve(&format!("{FAST} --max-num-seqs 8 --max-queue-requests 16 --max-queue-tokens 100 --max-model-len 200"))
            .await;
    let ask = async |extra: Value| {
        let mut body = json!({"model": MODEL, "max_tokens": 1});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.post("/v1/completions", &body).await
    };
    for extra in [json!({"prompt": "a", "n": 32}), json!({"prompt": ["a", "b", "c", "d"], "n": 8})] {
        let answer = ask(extra).await;
        assert_refused(&answer, 400, Some("n"), "invalid_value");
        assert!(answer.text().contains("32 answers") && answer.text().contains("takes 24"), "{}", answer.text());
        assert_eq!(answer.header("retry-after"), None);
    }
    assert_refused(&server.chat(json!({"n": 25, "max_tokens": 1})).await, 400, Some("n"), "invalid_value");
    let prompts: Vec<Vec<u32>> = (1..4).map(|first| vec![first; 40]).collect();
    let long = ask(json!({"prompt": prompts})).await;
    assert_refused(&long, 400, Some("prompt"), "invalid_value");
    assert!(long.text().contains("120 tokens") && long.text().contains("at most 100"), "{}", long.text());
    // As much as may wait is served, and one prompt alone may be longer.
    assert_eq!(ask(json!({"prompt": "a", "n": 24})).await.status, StatusCode::OK);
    assert_eq!(ask(json!({"prompt": prompts[..2]})).await.status, StatusCode::OK);
    assert_eq!(ask(json!({"prompt": vec![7; 150]})).await.status, StatusCode::OK);
}
