//! Answers of a given form: on the simulator with its words, and on the real model with JSON.

use crate::common::{Client, FAST, SLOW, TestServer, chat, serve, start};
use clap::Parser;
use serde_json::{Value, json};
use windlass_checkpoint::testing::real_model;
use windlass_engine::cli::{Cli, Command};
use windlass_engine::config::Config;

/// The text of an answer on the simulator.
async fn say(server: &TestServer, extra: Value) -> String {
    let answer = server.chat(extra).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_one_of_the_texts_and_ends_with_it() {
    let server = serve(FAST).await;
    // No text begins with a word that is the beginning of another: this vocabulary has no single letters to go on with.
    let choices = [" the engine of the block", " the engine", " batch block"];
    let mut heard = std::collections::BTreeSet::new();
    for seed in 0..12 {
        let text = say(&server, json!({"guided_choice": choices, "seed": seed})).await;
        assert!(choices.contains(&text.as_str()), "{text:?}");
        heard.insert(text);
    }
    assert!(heard.len() > 1, "{heard:?}");
    let both = server.chat(json!({"guided_choice": choices, "n": 4, "seed": 3})).await.json();
    for choice in both["choices"].as_array().unwrap() {
        assert!(choices.contains(&choice["message"]["content"].as_str().unwrap()), "{choice}");
        assert_eq!(choice["finish_reason"], "stop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_form_is_kept() {
    let server = serve(FAST).await;
    let regex = say(&server, json!({"guided_regex": "( the| of){3} engine"})).await;
    assert!(regex.ends_with(" engine") && regex.split_whitespace().count() == 4, "{regex:?}");
    let grammar = json!({"structured_outputs": {"grammar": "start: word word\nword: \" block\" | \" batch\""}});
    let text = say(&server, grammar).await;
    assert!(text.split_whitespace().all(|word| ["block", "batch"].contains(&word)), "{text:?}");
    assert_eq!(text.split_whitespace().count(), 2);
}

/// Each ends in an error or an answer, soon, and a stream beside them goes on.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_forms_are_refused_and_hurt_nobody() {
    let server = serve(SLOW).await;
    let mut client = Client::connect(server.api).await;
    let mut canary = client.open("/v1/chat/completions", &chat(json!({"max_tokens": 400, "stream": true}))).await;
    let mut deep = json!({"type": "string"});
    for _ in 0..100 {
        deep = json!({"type": "object", "properties": {"a": deep}, "required": ["a"]});
    }
    let hostile = [
        json!({"guided_regex": "("}),
        json!({"guided_regex": "(a{1,1000}){1,1000}"}),
        json!({"guided_regex": "((a{0,100}){0,100}){0,100}"}),
        json!({"guided_grammar": "start: start"}),
        json!({"guided_grammar": "nonsense ::= \"x\""}),
        json!({"guided_json": {"type": "nonsense"}}),
        json!({"guided_json": {"$ref": "#"}}),
        json!({"guided_json": {"$ref": "https://example.com/schema"}}),
        json!({"guided_json": {"type": "array", "items": 7}}),
        json!({"guided_json": deep}),
        json!({"guided_json": 7}),
        json!({"guided_choice": []}),
        json!({"guided_choice": (0..100_000).map(|number| number.to_string()).collect::<Vec<_>>()}),
        json!({"guided_choice": ["x".repeat(300_000)]}),
        json!({"guided_choice": ["a"], "min_tokens": 3}),
    ];
    for mut body in hostile {
        body["max_tokens"] = json!(3);
        let began = std::time::Instant::now();
        let answer = server.chat(body.clone()).await;
        assert!(answer.status.is_client_error() || answer.status.is_success(), "{body}: {}", answer.text());
        assert!(began.elapsed().as_secs() < 5, "{body} took {:?}", began.elapsed());
    }
    let bad = server.chat(json!({"guided_regex": "("})).await;
    assert_eq!((bad.status.as_u16(), bad.json()["error"]["param"].as_str()), (400, Some("guided_regex")));
    assert!(canary.read_until("[DONE]").await, "the stream beside them was cut");
}

/// The server on the real model, if there is one.
async fn serve_real() -> Option<TestServer> {
    let flags = "--served-model-name smol --kv-cache-memory-bytes 100000000";
    let line =
        format!("windlass-engine serve {} --host 127.0.0.1 --port 0 --admin-port 0 {flags}", real_model()?.display());
    let Command::Serve(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else { return None };
    Some(start(Config::from_args(&args).unwrap()).await)
}

/// What the real model answers, and why it ended.
async fn ask(server: &TestServer, question: &str, extra: Value) -> (String, Value) {
    let mut body = json!({"model": "smol", "messages": [{"role": "user", "content": question}], "max_tokens": 120});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let answer = server.post("/v1/chat/completions", &body).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    let choice = answer.json()["choices"][0].clone();
    (choice["message"]["content"].as_str().unwrap().to_owned(), choice["finish_reason"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_real_model_writes_json_of_a_schema_alone_and_in_a_batch() {
    let Some(server) = serve_real().await else { return };
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "colours"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": schema}});
    let server = &server;
    let one = |seed: u64| {
        let format = format.clone();
        async move {
            let extra = json!({"response_format": format, "seed": seed, "temperature": 0.8});
            ask(server, "Describe a person as JSON.", extra).await
        }
    };
    let together = futures::future::join_all((0..6).map(one)).await;
    for (text, reason) in &together {
        println!("{text}");
        let person: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text:?}"));
        assert!((0..=120).contains(&person["age"].as_i64().unwrap()), "{person}");
        assert!(person["name"].as_str().unwrap().chars().count() <= 20, "{person}");
        let colours = person["colours"].as_array().unwrap();
        assert!((1..=3).contains(&colours.len()) && person.as_object().unwrap().len() == 3, "{person}");
        assert_eq!(reason, "stop");
    }
    assert_eq!(one(4).await, together[4], "the same alone as among others");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_real_model_keeps_a_regular_expression_and_an_object() {
    let Some(server) = serve_real().await else { return };
    let (date, _) = ask(&server, "What day is it?", json!({"guided_regex": "20[0-9]{2}-[01][0-9]-[0-3][0-9]"})).await;
    assert!(date.len() == 10 && date.starts_with("20"), "{date:?}");
    let object = json!({"response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 400});
    let (text, reason) = ask(&server, "Write a JSON object with one key.", object).await;
    // A weak model may not find the end; what there is of it is JSON.
    assert!(text.trim_start().starts_with('{'), "{text:?}");
    assert!(
        reason == "length" || serde_json::from_str::<Value>(&text).is_ok_and(|value| value.is_object()),
        "{text:?}"
    );
}

/// Retried, each would fail again: it is the client's to change.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_leaves_no_token_is_the_clients_error() {
    let server = serve(FAST).await;
    for extra in [
        // This vocabulary can begin it, and not go on.
        json!({"guided_choice": [" the zzz"]}),
        json!({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2, "max_tokens": 4}),
    ] {
        let answer = server.chat(extra.clone()).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status.as_u16(), &error["code"]), (400, &json!("unsatisfiable")), "{extra}: {error}");
        assert!(error["message"].as_str().unwrap().contains("nothing to go on with"), "{error}");
        assert_eq!((answer.header("x-should-retry"), answer.header("retry-after")), (None, None));
        let mut streamed = extra.clone();
        streamed["stream"] = json!(true);
        let text = server.chat(streamed).await.text();
        let event =
            text.lines().find_map(|line| line.strip_prefix("data: {\"error\"")).unwrap_or_else(|| panic!("{text}"));
        assert!(event.contains("unsatisfiable") && event.contains("\"retry\":false"), "{event}");
    }
    let inputs = json!({"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": " the zzz"}}});
    let answer = server.post("/generate", &inputs).await;
    assert_eq!(answer.status.as_u16(), 422, "{}", answer.text());
    assert_eq!(server.chat(json!({"max_tokens": 1})).await.status.as_u16(), 200);
}
