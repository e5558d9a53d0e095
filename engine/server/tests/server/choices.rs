//! Several answers to a prompt, and what the model thought of the tokens, on the simulator.

use crate::common::{FAST, MODEL, TestServer, serve};
use serde_json::{Value, json};

async fn complete(server: &TestServer, extra: Value) -> Value {
    let answer = server.post("/v1/completions", &completion(extra)).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    answer.json()
}

fn completion(extra: Value) -> Value {
    let mut body = json!({"model": MODEL, "prompt": "the engine of a block", "max_tokens": 6});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().unwrap();
    choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn several_answers_are_those_of_consecutive_seeds_and_count_their_prompt_once() {
    let server = serve(FAST).await;
    let together = complete(&server, json!({"n": 3, "seed": 7})).await;
    let mut alone = Vec::new();
    for seed in 7..10 {
        alone.extend(texts(&complete(&server, json!({"seed": seed})).await));
    }
    assert_eq!(texts(&together), alone);
    assert_eq!(together["usage"]["prompt_tokens"], 5);
    assert_eq!(together["usage"]["completion_tokens"], 18);
    let chat = server.chat(json!({"n": 2, "seed": 1, "max_tokens": 3})).await.json();
    let (first, second) = (&chat["choices"][0], &chat["choices"][1]);
    assert_eq!((&first["index"], &second["index"]), (&json!(0), &json!(1)));
    assert_ne!(first["message"]["content"], second["message"]["content"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_several_prompts_has_its_answers() {
    let server = serve(FAST).await;
    let prompts = json!(["the engine", "a block"]);
    let together = complete(&server, json!({"prompt": prompts, "n": 2, "seed": 3})).await;
    let mut alone = Vec::new();
    for prompt in ["the engine", "a block"] {
        alone.extend(texts(&complete(&server, json!({"prompt": prompt, "n": 2, "seed": 3})).await));
    }
    assert_eq!(texts(&together), alone);
    let events = server
        .post("/v1/completions", &completion(json!({"prompt": prompts, "n": 2, "seed": 3, "stream": true})))
        .await
        .events();
    for (index, whole) in alone.iter().enumerate() {
        let own = events.iter().filter(|event| event["choices"][0]["index"] == index);
        assert_eq!(own.map(|event| event["choices"][0]["text"].as_str().unwrap()).collect::<String>(), *whole);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_the_best_only_as_many_as_asked_are_given() {
    let server = serve(FAST).await;
    let answer = complete(&server, json!({"n": 2, "best_of": 5})).await;
    assert_eq!((texts(&answer).len(), &answer["usage"]["completion_tokens"]), (2, &json!(30)));
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chats_log_probabilities_come_with_each_token_whole_and_streamed() {
    let server = serve(FAST).await;
    let asked = json!({"max_tokens": 4, "seed": 1, "logprobs": true, "top_logprobs": 2, "prompt_logprobs": 1});
    let whole = server.chat(asked.clone()).await.json();
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let text: String = content.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
    for token in content {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(token["top_logprobs"][0]["bytes"].as_array().unwrap(), token["bytes"].as_array().unwrap());
        // The simulator thinks a half of what it draws.
        assert!((token["logprob"].as_f64().unwrap() - 0.5f64.ln()).abs() < 1e-6, "{token}");
    }
    let prompt = whole["prompt_logprobs"].as_array().unwrap();
    assert_eq!((prompt.len(), &prompt[0]), (6, &Value::Null));
    assert!(prompt[1].as_object().unwrap().values().all(|token| token["rank"] == 1), "{}", prompt[1]);
    let mut streamed = asked;
    streamed["stream"] = json!(true);
    let events = server.chat(streamed).await.events();
    let parts = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(parts.flatten().cloned().collect::<Vec<_>>(), *content);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completions_log_probabilities_are_lists_that_fit_its_text() {
    let server = serve(FAST).await;
    let answer = complete(&server, json!({"logprobs": 1, "seed": 2})).await;
    check_lists(&answer["choices"][0], 6);
    let mut events =
        server.post("/v1/completions", &completion(json!({"logprobs": 1, "seed": 2, "stream": true}))).await.events();
    events.retain(|event| !event["choices"][0]["logprobs"]["tokens"].as_array().unwrap().is_empty());
    for (index, event) in events.iter().enumerate() {
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(event["choices"][0]["logprobs"][list][0], answer["choices"][0]["logprobs"][list][index]);
        }
    }
    assert_eq!(events.len(), 6);
}

/// Every list has an entry for each token, and the offsets are where the tokens are.
fn check_lists(choice: &Value, tokens: usize) {
    let (logprobs, text) = (&choice["logprobs"], choice["text"].as_str().unwrap());
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), tokens, "{list} in {choice}");
    }
    for index in 0..tokens {
        let (offset, token) = (logprobs["text_offset"][index].as_u64().unwrap(), logprobs["tokens"][index].as_str());
        assert!(text[offset as usize..].starts_with(token.unwrap()), "{choice}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_echo_of_no_tokens_scores_the_prompt() {
    let server = serve(FAST).await;
    let asked = json!({"echo": true, "max_tokens": 0, "logprobs": 0});
    let answer = complete(&server, asked).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(" the engine of a block"), &json!("length")));
    check_lists(choice, 5);
    assert_eq!(choice["logprobs"]["token_logprobs"][0], Value::Null);
    assert!(choice["logprobs"]["token_logprobs"][4].as_f64().unwrap() < 0.0);
    assert_eq!((&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]), (&json!(5), &json!(0)));
    // With tokens behind it, both are shown and scored.
    let longer = complete(&server, json!({"echo": true, "max_tokens": 2, "logprobs": 0})).await;
    check_lists(&longer["choices"][0], 7);
    let silent = complete(&server, json!({"echo": true, "max_tokens": 0})).await;
    assert_eq!((&silent["choices"][0]["text"], &silent["choices"][0]["logprobs"]), (&choice["text"], &Value::Null));
    let refused = server.post("/v1/completions", &completion(json!({"max_tokens": 0}))).await;
    assert_eq!(refused.json()["error"]["param"], "max_tokens");
}

#[tokio::test(flavor = "multi_thread")]
async fn allowed_tokens_stops_and_cuts_are_obeyed() {
    let server = serve(FAST).await;
    let allowed = complete(&server, json!({"allowed_token_ids": [2]})).await;
    assert_eq!(texts(&allowed), [" of of of of of of"]);
    let shown =
        complete(&server, json!({"allowed_token_ids": [2], "stop": "of of", "include_stop_str_in_output": true}));
    assert_eq!(texts(&shown.await), [" of of"]);
    let cut = complete(&server, json!({"truncate_prompt_tokens": 2, "echo": true, "max_tokens": 0})).await;
    assert_eq!((texts(&cut), &cut["usage"]["prompt_tokens"]), (vec![" a block".to_owned()], &json!(2)));
}
