//! `/openapi.json`: the API port described for programs. What it says is held against the server by tests: every field
//! that a request type asks for is described, and no other.

mod answers;
mod requests;

use axum::Json;
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// The document of a model that generates.
pub async fn show() -> Json<&'static Value> {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(|| document(generating()));
    Json(&*DOCUMENT)
}

/// The document of an encoder.
pub async fn show_encoder() -> Json<&'static Value> {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(|| document(encoding()));
    Json(&*DOCUMENT)
}

fn document(own: Vec<(&str, Value)>) -> Value {
    let shared = [
        (
            "/health",
            json!({"get": {"operationId": "health", "security": [{}], "responses": {
                "200": {"description": "It serves."}, "503": response(503, "Error")}}}),
        ),
        ("/v1/models", get("listModels", "ModelList")),
        ("/v1/models/{name}", named(get("showModel", "Model"))),
        ("/v1/metrics", get("showMetrics", "ServerMetrics")),
    ];
    let paths: Map<String, Value> =
        shared.into_iter().chain(own).map(|(path, operations)| (path.to_owned(), operations)).collect();
    let schemas: Map<String, Value> = answers::schemas().into_iter().chain(requests::schemas()).collect();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Windlass engine",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "One language model. Fields that are not described are refused by name."
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": schemas}
    })
}

fn generating() -> Vec<(&'static str, Value)> {
    vec![
        ("/info", get("showInfo", "TgiInfo")),
        ("/v1/chat/completions", streaming("chat", "ChatRequest", "ChatCompletion", "Error")),
        ("/v1/completions", streaming("complete", "CompletionRequest", "Completion", "Error")),
        ("/v1/generate", streaming("generate", "GenerateRequest", "GenerateResponse", "Error")),
        ("/tokenize", post("tokenize", "TokenizeRequest", "TokenizeResponse", "Error")),
        ("/detokenize", post("detokenize", "DetokenizeRequest", "DetokenizeResponse", "Error")),
        ("/generate", streaming("tgiGenerate", "TgiRequest", "TgiResponse", "TgiOrError")),
        ("/generate_stream", streaming("tgiStream", "TgiRequest", "TgiResponse", "TgiOrError")),
        ("/", root()),
    ]
}

fn encoding() -> Vec<(&'static str, Value)> {
    vec![
        ("/v1/embeddings", post("embed", "EmbeddingsRequest", "Embeddings", "Error")),
        ("/v1/score", post("score", "ScoreRequest", "Scores", "Error")),
        ("/score", post("scoreByOldPath", "ScoreRequest", "Scores", "Error")),
        ("/v1/rerank", post("rerank", "RerankRequest", "Ranking", "Error")),
        ("/v2/rerank", post("rerankByNewPath", "RerankRequest", "Ranking", "Error")),
        ("/rerank", post("rerankByOldPath", "RerankRequest", "Ranking", "Error")),
    ]
}

/// A page for people; and where clients of Text Generation Inference post to that are given an address and nothing else.
fn root() -> Value {
    let mut path = streaming("tgiEither", "TgiRequest", "TgiResponses", "TgiOrError");
    let page = json!({"text/html": {"schema": text()}});
    path["get"] = json!({"operationId": "page", "security": [{}], "responses": {
        "200": {"description": "A page for people.", "content": page}, "503": response(503, "Error")}});
    path
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn content(name: &str) -> Value {
    json!({"application/json": {"schema": reference(name)}})
}

fn get(id: &str, answer: &str) -> Value {
    json!({"get": {"operationId": id, "responses": responses(answer, "Error", &[401, 500, 503])}})
}

/// What an operation may answer with, and nothing else.
fn responses(answer: &str, error: &str, statuses: &[u16]) -> Value {
    let mut responses = Map::new();
    responses.insert("200".to_owned(), json!({"description": "The answer.", "content": content(answer)}));
    responses.extend(statuses.iter().map(|status| (status.to_string(), response(*status, error))));
    responses.into()
}

fn response(status: u16, error: &str) -> Value {
    let description = match status {
        400 => "The request is wrong; the error names the field.",
        401 => "A key is required, or not valid.",
        404 => "The model is not served here.",
        408 => "The body did not come in time.",
        413 => "The body is too large.",
        415 => "The body is no JSON, or is compressed.",
        422 => "What the request asks for is wrong.",
        424 => "The answer was given up.",
        429 => "Too much is asked for at once; `Retry-After` says when to come back.",
        503 => "The server sleeps or is about to stop; `Retry-After` says when to come back.",
        _ => "The server failed; `x-should-retry` says whether to send the request again.",
    };
    json!({"description": description, "content": content(error)})
}

fn post(id: &str, request: &str, answer: &str, error: &str) -> Value {
    let statuses: &[u16] = match error {
        "TgiOrError" => &[400, 401, 408, 413, 415, 422, 424, 429, 500, 503],
        _ => &[400, 401, 404, 408, 413, 415, 429, 500, 503],
    };
    json!({"post": {
        "operationId": id,
        "requestBody": {"required": true, "content": content(request)},
        "responses": responses(answer, error, statuses)
    }})
}

/// JSON, or server-sent events where the request asks for them.
fn streaming(id: &str, request: &str, answer: &str, error: &str) -> Value {
    let mut path = post(id, request, answer, error);
    path["post"]["responses"]["200"]["content"]["text/event-stream"] =
        json!({"schema": object(&["data"], json!({"data": {"type": "string"}}))});
    path
}

fn named(mut path: Value) -> Value {
    path["get"]["responses"]["404"] = response(404, "Error");
    let name = json!({"name": "name", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}});
    path["parameters"] = json!([name]);
    path
}

/// Fields may be added to answers; requests with others are refused by the server, in words that name them.
fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn whole() -> Value {
    json!({"type": "integer"})
}

fn number() -> Value {
    json!({"type": "number"})
}

fn truth() -> Value {
    json!({"type": "boolean"})
}

fn maybe(schema: &Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

fn list(schema: &Value) -> Value {
    json!({"type": "array", "items": schema})
}

fn share() -> Value {
    json!({"type": "number", "minimum": 0, "maximum": 1})
}

fn tokens() -> Value {
    json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": u32::MAX}})
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use windlass_engine_api::chat::ChatRequest;
    use windlass_engine_api::completions::CompletionRequest;
    use windlass_engine_api::encoders::{EmbeddingsRequest, RerankRequest, ScoreRequest};
    use windlass_engine_api::fields::asked;
    use windlass_engine_api::native::{DetokenizeRequest, GenerateRequest, TokenizeRequest};

    #[test]
    fn every_field_that_is_asked_for_is_described_and_no_other() {
        let documents = [document(generating()), document(encoding())];
        let described = |name: &str| -> BTreeSet<String> {
            let schema = &documents[0]["components"]["schemas"][name]["properties"];
            schema.as_object().unwrap().keys().cloned().collect()
        };
        let chat = r#"{"model": "m", "messages": [{"role": "user", "content": "a"}]}"#;
        let of_messages = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
        let mut tokenize = asked(TokenizeRequest::from_body, r#"{"prompt": "a"}"#);
        tokenize.extend(asked(TokenizeRequest::from_body, of_messages));
        for (name, asked) in [
            ("ChatRequest", asked(ChatRequest::from_body, chat)),
            ("CompletionRequest", asked(CompletionRequest::from_body, r#"{"model": "m", "prompt": "a"}"#)),
            ("GenerateRequest", asked(GenerateRequest::from_body, r#"{"prompt": "a"}"#)),
            ("TokenizeRequest", tokenize),
            ("DetokenizeRequest", asked(DetokenizeRequest::from_body, r#"{"tokens": []}"#)),
            ("EmbeddingsRequest", asked(EmbeddingsRequest::from_body, r#"{"model": "m", "input": "a"}"#)),
            ("ScoreRequest", asked(ScoreRequest::from_body, r#"{"model": "m", "text_1": "a", "text_2": "b"}"#)),
            ("RerankRequest", asked(RerankRequest::from_body, r#"{"model": "m", "query": "a", "documents": ["b"]}"#)),
        ] {
            assert_eq!(described(name), asked, "{name}");
        }
    }
}
