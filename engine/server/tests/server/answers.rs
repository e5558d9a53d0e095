//! What the API answers: whole and streamed, chats and completions, on the simulator.

use crate::common::{FAST, MODEL, TestServer, chat, get, serve};
use serde_json::{Value, json};

fn content(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_chat_has_text_usage_and_the_reason_it_ended() {
    let server = serve(FAST).await;
    let answer = server.chat(json!({"max_tokens": 7})).await.json();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], MODEL);
    let choice = &answer["choices"][0];
    assert_eq!((&choice["message"]["role"], &choice["finish_reason"]), (&json!("assistant"), &json!("length")));
    assert_eq!(choice["message"]["content"].as_str().unwrap().split_whitespace().count(), 7);
    // "user tell me of the engine"
    assert_eq!(answer["usage"]["prompt_tokens"], 6);
    assert_eq!(answer["usage"]["completion_tokens"], 7);
    assert_eq!(answer["usage"]["total_tokens"], 13);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_says_the_same_as_the_whole() {
    let server = serve(FAST).await;
    let body = json!({"max_tokens": 30, "seed": 5});
    let whole = server.chat(body.clone()).await.json();
    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let response = server.chat(streamed).await;
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let events = response.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(content(&events), whole["choices"][0]["message"]["content"]);
    let [.., last, usage] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &whole["usage"]));
    assert!(events.iter().all(|event| event["id"] == events[0]["id"] && event["object"] == "chat.completion.chunk"));
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_comes_only_when_asked_for() {
    let server = serve(FAST).await;
    let events = server.chat(json!({"max_tokens": 3, "stream": true})).await.events();
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_seed_repeats_and_another_differs() {
    let server = serve(FAST).await;
    let say = async |seed: u64| {
        let answer = server.chat(json!({"max_tokens": 20, "seed": seed})).await.json();
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let first = say(1).await;
    assert_eq!(say(1).await, first);
    assert_ne!(say(2).await, first);
}

/// Words of an undisturbed greedy answer.
async fn greedy_words(server: &TestServer) -> Vec<String> {
    let answer = server.chat(json!({"max_tokens": 12, "temperature": 0})).await.json();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    text.split(' ').map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_over_two_tokens_ends_the_answer_and_is_not_shown() {
    let server = serve(FAST).await;
    let words = greedy_words(&server).await;
    let stop = format!("{} {}", words[5], words[6]);
    let expected = words[..5].join(" ") + " ";
    for stream in [false, true] {
        let body = json!({"max_tokens": 12, "temperature": 0, "stop": [stop], "stream": stream});
        let response = server.chat(body).await;
        let (text, choice) = if stream {
            let events = response.events();
            (content(&events), events.last().unwrap()["choices"][0].clone())
        } else {
            let choice = response.json()["choices"][0].clone();
            (choice["message"]["content"].as_str().unwrap().to_owned(), choice)
        };
        assert_eq!(text, expected);
        assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!(stop)));
    }
    // The engine is told, and counts it as what it is.
    server.until("all have ended", |stats| stats["finished"] == 3).await;
    let stopped = server.metric("vllm:request_success_total{engine=\"0\",finished_reason=\"stop\"").await;
    assert!((stopped - 2.0).abs() < f64::EPSILON, "{stopped}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_ends_by_itself_unless_told_not_to() {
    let server = serve("--sim-step-us 100 --sim-decode-sequence-us 1 --sim-mean-answer-tokens 10").await;
    let answer = server.chat(json!({"seed": 3})).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap();
    let longer = server.chat(json!({"seed": 3, "ignore_eos": true, "max_tokens": tokens + 50})).await.json();
    assert_eq!(longer["choices"][0]["finish_reason"], "length");
    let least = server.chat(json!({"seed": 3, "min_tokens": tokens + 50})).await.json();
    assert!(least["usage"]["completion_tokens"].as_u64().unwrap() > tokens + 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_token_ends_the_answer_and_is_named() {
    let server = serve(FAST).await;
    // Whichever word comes, its token is among these.
    let body = json!({"max_tokens": 50, "stop_token_ids": (1..100).collect::<Vec<u32>>()});
    let answer = server.chat(body).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    // The stop token counts and is not shown.
    let words = choice["message"]["content"].as_str().unwrap().split_whitespace().count();
    assert_eq!(answer["usage"]["completion_tokens"], words + 1);
    assert!((1..100).contains(&choice["stop_reason"].as_u64().unwrap()), "{choice}");
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_take_every_shape_of_prompt() {
    let server = serve(FAST).await;
    let complete = async |prompt: Value| {
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0});
        server.post("/v1/completions", &body).await.json()
    };
    let one = complete(json!("the engine")).await;
    assert_eq!((&one["object"], &one["usage"]["prompt_tokens"]), (&json!("text_completion"), &json!(2)));
    let several = complete(json!(["the engine", "a block"])).await;
    assert_eq!(several["choices"][0]["text"], one["choices"][0]["text"]);
    assert_ne!(several["choices"][1]["text"], one["choices"][0]["text"]);
    assert_eq!((&several["choices"][1]["index"], &several["usage"]["completion_tokens"]), (&json!(1), &json!(8)));
    let tokens = complete(json!([1, 2, 3])).await;
    assert_eq!(tokens["usage"]["prompt_tokens"], 3);
    assert_eq!(complete(json!([[1, 2, 3], [4]])).await["choices"][0]["text"], tokens["choices"][0]["text"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_prompts_keep_their_indices() {
    let server = serve(FAST).await;
    let mut body = json!({"model": MODEL, "prompt": ["the engine", "a block"], "max_tokens": 9, "temperature": 0});
    let whole = server.post("/v1/completions", &body).await.json();
    body["stream"] = json!(true);
    let events = server.post("/v1/completions", &body).await.events();
    for index in [0, 1] {
        let own = events.iter().filter(|event| event["choices"][0]["index"] == index);
        let text: String = own.map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, whole["choices"][index]["text"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_is_short_unless_asked_for_more() {
    let server = serve(FAST).await;
    let body = json!({"model": MODEL, "prompt": "the engine"});
    assert_eq!(server.post("/v1/completions", &body).await.json()["usage"]["completion_tokens"], 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed_under_every_name() {
    let server = serve(&format!("{FAST} --served-model-name org/a b --max-model-len 100")).await;
    let list = get(server.api, "/v1/models").await.json();
    assert_eq!((&list["data"][0]["id"], &list["data"][1]["id"]), (&json!("org/a"), &json!("b")));
    assert_eq!(get(server.api, "/v1/models/org/a").await.json()["max_model_len"], 100);
    let mut body = chat(json!({"max_tokens": 1}));
    body["model"] = json!("b");
    assert_eq!(server.post("/v1/chat/completions", &body).await.json()["model"], "b");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_prompt_is_found_in_the_cache() {
    let server = serve(FAST).await;
    let prompt: Vec<u32> = (1..100).collect();
    let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 1});
    let cached = async || {
        let answer = server.post("/v1/completions", &body).await.json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached().await, 0);
    assert_eq!(cached().await, 96);
}
