//! What the server shows for programs and people to read: the OpenAPI document and the page.

use crate::common::{Client, FAST, MODEL, get, post, serve};
use serde_json::{Value, json};

/// Follows a reference inside the document.
fn resolve<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(path) => document.pointer(path.trim_start_matches('#')).unwrap_or_else(|| panic!("{path}")),
        None => schema,
    }
}

/// Whether `value` has what `schema` requires, all the way down, as far as this document's schemas go.
fn conforms(document: &Value, schema: &Value, value: &Value) -> bool {
    let schema = resolve(document, schema);
    if let Some(any) = schema["anyOf"].as_array() {
        return any.iter().any(|one| conforms(document, one, value));
    }
    let kind = match schema["type"].as_str() {
        None => true,
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        Some(other) => panic!("{other}"),
    };
    let required = schema["required"].as_array().into_iter().flatten();
    let items = value.as_array().into_iter().flatten();
    let properties = schema["properties"].as_object().into_iter().flatten();
    kind && required.into_iter().all(|name| value.get(name.as_str().unwrap()).is_some())
        && items.into_iter().all(|item| schema["items"].is_null() || conforms(document, &schema["items"], item))
        && properties.into_iter().all(|(name, of)| value.get(name).is_none_or(|found| conforms(document, of, found)))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_path_of_the_document_answers_as_it_says() {
    let server = serve(FAST).await;
    let document = get(server.api, "/openapi.json").await.json();
    let bodies = json!({
        "/v1/chat/completions": crate::common::chat(json!({"max_tokens": 2})),
        "/v1/completions": {"model": MODEL, "prompt": "the", "max_tokens": 2},
        "/v1/generate": {"prompt": "the", "max_tokens": 2},
        "/tokenize": {"prompt": "the", "return_token_strs": true},
        "/detokenize": {"tokens": [1, 2]},
        "/generate": {"inputs": "the", "parameters": {"max_new_tokens": 2, "details": true}},
        "/generate_stream": {"inputs": "the", "parameters": {"max_new_tokens": 2}},
        "/": {"inputs": "the", "parameters": {"max_new_tokens": 2}},
    });
    for (path, operations) in document["paths"].as_object().unwrap() {
        let asked = path.replace("{name}", MODEL);
        let (answer, operation) = match operations.get("post") {
            Some(operation) => (server.post(&asked, &bodies[path]).await, operation),
            None => (get(server.api, &asked).await, &operations["get"]),
        };
        assert_eq!(answer.status.as_u16(), 200, "{path}: {}", answer.text());
        let content = &operation["responses"]["200"]["content"];
        if answer.header("content-type") == Some("application/json") {
            let schema = &content["application/json"]["schema"];
            assert!(conforms(&document, schema, &answer.json()), "{path}: {schema} {}", answer.text());
        } else {
            assert!(content.is_null() || !content["text/event-stream"].is_null(), "{path}");
        }
        if operations.get("post").is_some() {
            let refused = server.post(&asked, &json!({"frobnicate": 1})).await;
            let listed = &operation["responses"][refused.status.as_str()];
            assert!(listed.is_object() && operation["responses"]["default"].is_null(), "{path}: {}", refused.status);
            let schema = &listed["content"]["application/json"]["schema"];
            assert!(refused.status.is_client_error() && conforms(&document, schema, &refused.json()), "{path}");
        }
    }
    assert_eq!(bodies.as_object().unwrap().len() + 5, document["paths"].as_object().unwrap().len());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_loads_nothing_from_elsewhere_and_needs_no_key() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "secret").unwrap();
    let server = serve(&format!("{FAST} --api-key-file {}", file.path().display())).await;
    let page = get(server.api, "/").await;
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    assert!(page.header("content-security-policy").unwrap().contains("default-src 'none'"));
    assert!(!page.text().contains("://") && !page.text().contains("secret"));
    // The same path asks for a key where it would compute.
    let mut client = Client::connect(server.api).await;
    let generated = client.send(post("/", &json!({"inputs": "a"}))).await.unwrap();
    assert_eq!(generated.status().as_u16(), 401);
}
