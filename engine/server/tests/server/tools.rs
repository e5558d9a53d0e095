//! Calls of tools and thoughts, over HTTP: the simulator with the real model's tokenizer, its answers held to texts that
//! models write.

use crate::common::{Answer, FAST, TestServer, chat, serve_at};
use serde_json::{Value, json};
use windlass_checkpoint::testing::real_model;

/// The simulator that can spell, if the tokenizer's file is there.
async fn spelling(flags: &str) -> Option<TestServer> {
    let model = real_model()?;
    let flags = format!("--executor sim --served-model-name sim-model {FAST} {flags}");
    Some(serve_at(&model, &flags).await)
}

fn weather() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": false});
    json!({"type": "function", "function": {"name": "get_weather", "description": "Tells the weather", "parameters": city}})
}

fn time() -> Value {
    json!({"type": "function", "function": {"name": "get_time", "parameters": {"type": "object",
        "properties": {"zone": {"$ref": "#/$defs/zone"}}, "required": ["zone"], "additionalProperties": false,
        "$defs": {"zone": {"type": "integer", "minimum": 0, "maximum": 11}}}}})
}

const TWO_CALLS: &str = "Let me look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": 3}}\n</tool_call>";

/// A request whose answer is `text`.
fn says(text: &str, extra: Value) -> Value {
    let mut body = chat(json!({"structured_outputs": {"choice": [text]}, "tools": [weather(), time()]}));
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn ask(server: &TestServer, body: &Value) -> Answer {
    let answer = server.post("/v1/chat/completions", body).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    answer
}

/// The message that a stream's events add up to, and how it ended.
fn assembled(events: &[Value]) -> (Value, Value) {
    let (mut content, mut reasoning) = (String::new(), String::new());
    let (mut calls, mut reason): (Vec<Value>, Value) = (Vec::new(), Value::Null);
    for choice in events.iter().map(|event| &event["choices"][0]) {
        content += choice["delta"]["content"].as_str().unwrap_or_default();
        reasoning += choice["delta"]["reasoning_content"].as_str().unwrap_or_default();
        assert_eq!(choice["delta"]["reasoning_content"], choice["delta"]["reasoning"]);
        for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = delta["index"].as_u64().unwrap() as usize;
            if delta.get("id").is_some() {
                assert_eq!((index, &delta["type"]), (calls.len(), &json!("function")), "{delta}");
                calls.push(json!({"name": delta["function"]["name"], "arguments": ""}));
            }
            let more = delta["function"]["arguments"].as_str().unwrap();
            calls[index]["arguments"] = json!(calls[index]["arguments"].as_str().unwrap().to_owned() + more);
        }
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
    }
    (json!({"content": content, "reasoning": reasoning, "calls": calls}), reason)
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_left_to_the_model_are_found_whole_and_streamed() {
    let Some(server) = spelling("--tool-call-parser hermes --enable-auto-tool-choice").await else { return };
    let whole = ask(&server, &says(TWO_CALLS, json!({}))).await.json();
    let choice = &whole["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("Let me look."))
    );
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let functions: Vec<&Value> = calls.iter().map(|call| &call["function"]).collect();
    assert_eq!(functions[0], &json!({"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}));
    assert_eq!(functions[1], &json!({"name": "get_time", "arguments": "{\"zone\": 3}"}));
    assert!(calls[0]["id"] != calls[1]["id"] && calls[0]["type"] == "function");
    let events = ask(&server, &says(TWO_CALLS, json!({"stream": true, "logprobs": true}))).await.events();
    let (message, reason) = assembled(&events);
    assert_eq!(reason, "tool_calls");
    assert_eq!((&message["content"], message["calls"].as_array().unwrap().len()), (&json!("Let me look."), 2));
    assert_eq!(&message["calls"][1], functions[1]);
    let one = ask(&server, &says(TWO_CALLS, json!({"parallel_tool_calls": false}))).await.json();
    assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    let none = ask(&server, &says(TWO_CALLS, json!({"tool_choice": "none"}))).await.json();
    assert_eq!(none["choices"][0]["message"]["content"], TWO_CALLS);
    assert_eq!(none["choices"][0]["finish_reason"], "stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_cut_by_its_length_says_so() {
    let Some(server) = spelling("--tool-call-parser hermes").await else { return };
    let answer = ask(&server, &says(TWO_CALLS, json!({"max_tokens": 12}))).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test(flavor = "multi_thread")]
async fn required_and_named_calls_keep_their_schemas() {
    // A template that knows no tools, and no format: the form needs neither.
    let Some(server) = spelling("--tool-call-parser none").await else { return };
    for seed in 0..8 {
        let body = chat(json!({"tools": [weather(), time()], "tool_choice": "required", "seed": seed, "stream": true}));
        let (message, reason) = assembled(&ask(&server, &body).await.events());
        assert_eq!(reason, "tool_calls");
        let calls = message["calls"].as_array().unwrap();
        assert!((1..=16).contains(&calls.len()) && message["content"] == "", "{message}");
        for call in calls {
            let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
            match call["name"].as_str().unwrap() {
                "get_weather" => assert!(["Paris", "Rome"].contains(&arguments["city"].as_str().unwrap())),
                "get_time" => assert!((0..12).contains(&arguments["zone"].as_i64().unwrap())),
                other => panic!("{other}"),
            }
        }
    }
    let one =
        chat(json!({"tools": [weather(), time()], "tool_choice": "required", "parallel_tool_calls": false, "n": 4}));
    for choice in ask(&server, &one).await.json()["choices"].as_array().unwrap() {
        assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
        assert_eq!(choice["message"]["content"], Value::Null);
    }
    let named = json!({"type": "function", "function": {"name": "get_time"}});
    let answer = ask(&server, &chat(json!({"tools": [weather(), time()], "tool_choice": named}))).await.json();
    let (message, reason) = (&answer["choices"][0]["message"], &answer["choices"][0]["finish_reason"]);
    assert_eq!((&message["tool_calls"][0]["function"]["name"], reason), (&json!("get_time"), &json!("stop")));
}

#[tokio::test(flavor = "multi_thread")]
async fn thoughts_are_apart_unless_nobody_wants_them() {
    const ANSWER: &str = "<think>\nRome is warm.\n</think>\n\nIt is warm.";
    let Some(server) = spelling("--reasoning-parser qwen3").await else { return };
    let body = |extra: Value| {
        let mut body = chat(json!({"structured_outputs": {"choice": [ANSWER]}}));
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let message = ask(&server, &body(json!({}))).await.json()["choices"][0]["message"].clone();
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Rome is warm."), &json!("It is warm.")));
    assert_eq!(message["reasoning"], message["reasoning_content"]);
    let (message, reason) = assembled(&ask(&server, &body(json!({"stream": true}))).await.events());
    let expected = json!({"content": "It is warm.", "reasoning": "Rome is warm.", "calls": []});
    assert_eq!((message, reason), (expected, json!("stop")));
    let quiet = ask(&server, &body(json!({"include_reasoning": false}))).await.json()["choices"][0]["message"].clone();
    assert_eq!((quiet.get("reasoning"), &quiet["content"]), (None, &json!("It is warm.")));
    let Some(plain) = spelling("--reasoning-parser none").await else { return };
    assert_eq!(ask(&plain, &body(json!({}))).await.json()["choices"][0]["message"]["content"], ANSWER);
}

/// The prompt that a conversation becomes.
async fn prompt(server: &TestServer, body: Value) -> String {
    let tokens = server.post("/tokenize", &body).await.json()["tokens"].clone();
    server.post("/detokenize", &json!({"tokens": tokens})).await.json()["prompt"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_calls_and_results_reach_the_model() {
    let call = json!({"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{\"zone\": 3}"}});
    let history = json!([
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]);
    let body = json!({"messages": history, "tools": [time()]});
    // In words, where the template knows no tools.
    let Some(plain) = spelling("--tool-call-parser hermes").await else { return };
    let text = prompt(&plain, body.clone()).await;
    for part in
        ["get_time", "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": 3}}", "<tool_response>\nnoon"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    let template = tempfile::NamedTempFile::new().unwrap();
    let source = "{% for tool in tools %}T:{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}:\
        {% for call in m.tool_calls %}{{ call.function.arguments.zone + 1 }}{% endfor %}{{ m.content }}{{ m.tool_call_id }} \
        {% endfor %}{% if enable_thinking %}think{% endif %}";
    std::fs::write(template.path(), source).unwrap();
    let flags = format!("--tool-call-parser hermes --chat-template {}", template.path().display());
    let Some(server) = spelling(&flags).await else { return };
    let mut thinking = body;
    thinking["chat_template_kwargs"] = json!({"enable_thinking": true});
    let expected = "T:get_time user:What time is it? assistant:4 tool:noonc1 think";
    assert_eq!(prompt(&server, thinking.clone()).await, expected);
    thinking["chat_template_kwargs"] = json!({"frobnicate": true});
    let refused = server.post("/tokenize", &thinking).await;
    assert_eq!(refused.json()["error"]["param"], "chat_template_kwargs.frobnicate", "{}", refused.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_called_is_refused_by_name() {
    let Some(server) = spelling("--tool-call-parser none").await else { return };
    let pattern = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object",
        "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}}});
    for (extra, param) in [
        (json!({"tools": [weather()]}), "tools"),
        (
            json!({"tools": [weather()], "tool_choice": "required", "response_format": {"type": "json_object"}}),
            "tool_choice",
        ),
        (json!({"tools": [pattern], "tool_choice": "required"}), "tools"),
        (json!({"documents": [{"text": "x"}]}), "documents"),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
    ] {
        let answer = server.post("/v1/chat/completions", &chat(extra.clone())).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["error"]["param"]), (400, &json!(param)), "{extra}");
    }
}
