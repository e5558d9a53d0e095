//! The dialects beside OpenAI's: plain and Text Generation Inference's; and what is the same in all of them.

use crate::common::{FAST, MODEL, chat, get, serve};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn generate_gives_text_counts_and_timings() {
    let server = serve(FAST).await;
    let body = json!({"prompt": "tell me", "max_tokens": 5, "temperature": 0, "top_p": 1});
    let answer = server.post("/v1/generate", &body).await.json();
    assert_eq!((&answer["model"], &answer["finish_reason"]), (&json!(MODEL), &json!("length")));
    assert_eq!(answer["tokens"], json!({"prompt": 2, "cached": 0, "generated": 5}));
    assert_eq!(answer["text"].as_str().unwrap().split_whitespace().count(), 5);
    let ms = |name: &str| answer["timings"][name].as_f64().unwrap();
    assert!(0.0 < ms("time_to_first_token_ms") && ms("time_to_first_token_ms") < ms("total_ms"), "{answer}");
    let unknown = server.post("/v1/generate", &json!({"prompt": "a", "model": "no"})).await;
    assert_eq!((unknown.status.as_u16(), &unknown.json()["error"]["param"]), (404, &json!("model")));
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_go_there_and_back() {
    let server = serve(FAST).await;
    let body = json!({"model": MODEL, "prompt": "the engine of the house", "return_token_strs": true});
    let tokens = server.post("/tokenize", &body).await.json();
    assert_eq!((&tokens["count"], &tokens["max_model_len"]), (&json!(5), &json!(8192)));
    assert_eq!(tokens["token_strs"].as_array().unwrap().len(), 5);
    let text = server.post("/detokenize", &json!({"tokens": tokens["tokens"]})).await.json();
    assert_eq!(text["prompt"].as_str().unwrap().trim(), "the engine of the house");
    // A conversation counts as the chat endpoint counts it.
    let messages = chat(json!({}))["messages"].clone();
    let count = server.post("/tokenize", &json!({"messages": messages})).await.json()["count"].clone();
    let chat = server.chat(json!({"max_tokens": 1})).await.json();
    assert_eq!(count, chat["usage"]["prompt_tokens"]);
    let beyond = server.post("/detokenize", &json!({"tokens": [4_000_000]})).await;
    assert_eq!((beyond.status.as_u16(), &beyond.json()["error"]["param"]), (400, &json!("tokens")));
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_tell_of_the_last_minute() {
    let server = serve(FAST).await;
    let idle = get(server.api, "/v1/metrics").await.json();
    assert_eq!((&idle["time_to_first_token_ms"], &idle["requests_running"]), (&Value::Null, &json!(0)));
    for _ in 0..3 {
        server.chat(json!({"max_tokens": 5})).await;
    }
    let metrics = get(server.api, "/v1/metrics").await.json();
    let number = |value: &Value| value.as_f64().unwrap();
    let generated = number(&metrics["generation_tokens_per_second"]) * number(&metrics["window_seconds"]);
    assert!((generated - 15.0).abs() < 0.01, "{metrics}");
    let first = &metrics["time_to_first_token_ms"];
    assert!(0.0 < number(&first["p50"]) && number(&first["p50"]) <= number(&first["p99"]), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tgi_answers_whole_and_token_by_token() {
    let server = serve(FAST).await;
    let body = json!({"inputs": "tell me", "parameters": {"max_new_tokens": 5, "details": true, "seed": 3}});
    let whole = server.post("/generate", &body).await.json();
    let details = &whole["details"];
    assert_eq!((&details["finish_reason"], &details["generated_tokens"]), (&json!("length"), &json!(5)));
    assert_eq!(details["tokens"].as_array().unwrap().len(), 5);

    let stream = server.post("/generate_stream", &body).await;
    assert_eq!(stream.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let text = stream.text();
    let events: Vec<Value> =
        text.split("\n\n").filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect();
    assert_eq!(events.len(), 5);
    let indices: Vec<u64> = events.iter().map(|event| event["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [1, 2, 3, 4, 5]);
    let pieces: String = events.iter().map(|event| event["token"]["text"].as_str().unwrap()).collect();
    let last = events.last().unwrap();
    assert_eq!((&json!(pieces), &last["generated_text"]), (&whole["generated_text"], &whole["generated_text"]));
    assert_eq!(last["details"]["input_length"], 2);
    assert!(!text.contains("[DONE]"));

    let either = server.post("/", &json!({"inputs": "tell me", "parameters": {"max_new_tokens": 5, "seed": 3}})).await;
    assert_eq!(either.json(), json!([{"generated_text": whole["generated_text"]}]));
}

#[tokio::test(flavor = "multi_thread")]
async fn tgi_stops_cuts_repeats_and_refuses_as_it_does() {
    let server = serve(FAST).await;
    let whole = server.post("/generate", &json!({"inputs": "a", "parameters": {"max_new_tokens": 8}})).await.json();
    let text = whole["generated_text"].as_str().unwrap();
    let stop = text.split_whitespace().nth(3).unwrap();
    let parameters = json!({"max_new_tokens": 8, "stop": [stop], "details": true, "return_full_text": true});
    let stopped = server.post("/generate", &json!({"inputs": "a", "parameters": parameters})).await.json();
    assert_eq!(stopped["details"]["finish_reason"], "stop_sequence");
    let kept = stopped["generated_text"].as_str().unwrap();
    assert!(kept.starts_with('a') && !kept.contains(stop), "{kept}");

    let long = json!({"inputs": "word ".repeat(9000), "parameters": {"max_new_tokens": 1, "truncate": 10}});
    assert_eq!(server.post("/generate", &long).await.status.as_u16(), 200);
    let refused = server.post("/generate", &json!({"inputs": "a", "parameters": {"watermark": true}})).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error_type"]), (422, &json!("validation")));
    assert!(refused.json()["error"].as_str().unwrap().contains("parameters.watermark"));
    assert_eq!(get(server.api, "/info").await.json()["model_id"], MODEL);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_are_ignored_only_where_the_switch_says_so() {
    let server = serve(&format!("{FAST} --unknown-fields ignore")).await;
    assert_eq!(server.chat(json!({"frobnicate": 1, "max_tokens": 1})).await.status.as_u16(), 200);
    let known = server.chat(json!({"frobnicate": 1, "audio": {"voice": "x"}})).await;
    assert_eq!((known.status.as_u16(), &known.json()["error"]["param"]), (400, &json!("audio")));
}
