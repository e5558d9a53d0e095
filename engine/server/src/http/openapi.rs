//! `/openapi.json`: the API port described for programs. What it says is held against the server by tests.

use axum::Json;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// The document.
pub async fn show() -> Json<&'static Value> {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(document);
    Json(&*DOCUMENT)
}

fn document() -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Windlass engine",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "One language model. Fields that are not described are refused by name."
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/health": {"get": {"operationId": "health", "security": [{}], "responses": {"200": {"description": "It serves."}}}},
            "/v1/models": get("listModels", "ModelList"),
            "/v1/models/{name}": named(get("showModel", "Model")),
            "/v1/metrics": get("showMetrics", "ServerMetrics"),
            "/info": get("showInfo", "TgiInfo"),
            "/v1/chat/completions": post("chat", "ChatRequest", "ChatCompletion", "Error"),
            "/v1/completions": post("complete", "CompletionRequest", "Completion", "Error"),
            "/v1/generate": post("generate", "GenerateRequest", "GenerateResponse", "Error"),
            "/tokenize": post("tokenize", "TokenizeRequest", "TokenizeResponse", "Error"),
            "/detokenize": post("detokenize", "DetokenizeRequest", "DetokenizeResponse", "Error"),
            "/generate": post("tgiGenerate", "TgiRequest", "TgiResponse", "TgiOrError"),
            "/generate_stream": post("tgiStream", "TgiRequest", "TgiResponse", "TgiOrError"),
        },
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": schemas()}
    })
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// JSON of this schema, or server-sent events where the request asks for them.
fn content(name: &str) -> Value {
    json!({"application/json": {"schema": reference(name)}})
}

fn get(id: &str, answer: &str) -> Value {
    json!({"get": {"operationId": id, "responses": {
        "200": {"description": "The answer.", "content": content(answer)},
        "default": {"description": "A refusal or a failure.", "content": content("Error")}
    }}})
}

fn post(id: &str, request: &str, answer: &str, error: &str) -> Value {
    let mut answers = content(answer);
    answers["text/event-stream"] = json!({"schema": object(&["data"], json!({"data": {"type": "string"}}))});
    json!({"post": {
        "operationId": id,
        "requestBody": {"required": true, "content": content(request)},
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            "default": {"description": "A refusal or a failure.", "content": content(error)}
        }
    }})
}

fn named(mut path: Value) -> Value {
    let name = json!({"name": "name", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}});
    path["parameters"] = json!([name]);
    path
}

fn schemas() -> Value {
    let (text, whole, number, truth) =
        (json!({"type": "string"}), json!({"type": "integer"}), json!({"type": "number"}), json!({"type": "boolean"}));
    let maybe = |schema: &Value| json!({"anyOf": [schema, {"type": "null"}]});
    let list = |schema: &Value| json!({"type": "array", "items": schema});
    let share = json!({"type": "number", "minimum": 0, "maximum": 1});
    let tokens = json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": u32::MAX}});
    let reason = json!({"type": "string"});
    let usage = object(
        &["prompt_tokens", "completion_tokens", "total_tokens"],
        json!({"prompt_tokens": whole,
        "completion_tokens": whole, "total_tokens": whole, "prompt_tokens_details": {"type": "object"}}),
    );
    let generation = json!({
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": u32::MAX},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1, "maximum": u32::MAX},
        "min_p": share,
        "seed": {"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX},
        "stop": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "array", "maxItems": 16,
            "items": {"type": "string", "minLength": 1, "maxLength": 256}}]}
    });
    let top = json!({"type": "integer", "minimum": 0, "maximum": 20});
    let penalty = json!({"type": "number", "minimum": -2, "maximum": 2});
    let sampling = json!({
        "n": {"type": "integer", "minimum": 1, "maximum": 128},
        "typical_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "frequency_penalty": penalty, "presence_penalty": penalty,
        "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100},
        "logit_bias": {"type": "object", "maxProperties": 1024, "additionalProperties": {"type": "number"}},
        "min_tokens": whole, "ignore_eos": truth, "include_stop_str_in_output": truth, "skip_special_tokens": truth,
        "prompt_logprobs": top, "priority": {"type": "integer", "minimum": i32::MIN, "maximum": i32::MAX},
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": 256},
        "use_beam_search": truth, "length_penalty": {"type": "number", "minimum": -10, "maximum": 10},
        "response_format": {"type": "object", "required": ["type"]}, "structured_outputs": {"type": "object"}
    });
    let with = |own: Value| merged(own, &generation);
    let with_all = |own: Value| merged(with(own), &sampling);
    let message = object(
        &["role", "content"],
        json!({
        "role": {"enum": ["system", "developer", "user", "assistant"]}, "content": text, "name": text}),
    );
    json!({
        "Error": object(&["error"], json!({"error": object(&["message", "type", "param", "code"], json!({
            "message": text, "type": text, "param": maybe(&text), "code": maybe(&text)}))})),
        "TgiError": object(&["error", "error_type"], json!({"error": text, "error_type": text})),
        // A refusal before the dialect is reached, such as a missing key, is OpenAI's.
        "TgiOrError": {"anyOf": [reference("TgiError"), reference("Error")]},
        "Model": object(&["id", "object", "created", "owned_by", "max_model_len"], json!({
            "id": text, "object": {"const": "model"}, "created": whole, "owned_by": text, "max_model_len": whole})),
        "ModelList": object(&["object", "data"], json!({
            "object": {"const": "list"}, "data": list(&reference("Model"))})),
        "ServerMetrics": object(&["window_seconds", "requests_running", "generation_tokens_per_second"], json!({
            "window_seconds": number, "requests_running": whole, "requests_waiting": whole,
            "requests_per_second": number, "prompt_tokens_per_second": number, "generation_tokens_per_second": number,
            "time_to_first_token_ms": maybe(&reference("Latency")), "inter_token_ms": maybe(&reference("Latency")),
            "end_to_end_ms": maybe(&reference("Latency")), "utilization": maybe(&share), "batch_fill": share,
            "kv_cache_usage": share})),
        "Latency": object(&["p50", "p95", "p99"], json!({"p50": number, "p95": number, "p99": number})),
        "Message": message,
        "ChatRequest": object(&["model", "messages"], with_all(json!({"model": text, "stream": truth,
            "logprobs": truth, "top_logprobs": top, "messages": {"type": "array", "minItems": 1, "items": reference("Message")}}))),
        "ChatCompletion": object(&["id", "object", "created", "model", "choices", "usage"], json!({
            "id": text, "object": {"const": "chat.completion"}, "created": whole, "model": text, "usage": usage,
            "choices": list(&object(&["index", "message", "finish_reason"], json!({"index": whole,
                "message": {"type": "object", "required": ["role", "content"]}, "finish_reason": reason})))})),
        "CompletionRequest": object(&["model", "prompt"], with_all(json!({"model": text, "stream": truth,
            "logprobs": top, "echo": truth, "best_of": {"type": "integer", "minimum": 1, "maximum": 128},
            "prompt": {"anyOf": [text, {"type": "array", "minItems": 1, "maxItems": 64, "items": text}, tokens]}}))),
        "Completion": object(&["id", "object", "created", "model", "choices", "usage"], json!({
            "id": text, "object": {"const": "text_completion"}, "created": whole, "model": text, "usage": usage,
            "choices": list(&object(&["index", "text", "finish_reason"], json!({"index": whole, "text": text,
                "finish_reason": reason})))})),
        "GenerateRequest": object(&["prompt"], with(json!({"model": text, "prompt": text}))),
        "GenerateResponse": object(&["id", "model", "text", "tokens", "finish_reason", "timings"], json!({
            "id": text, "model": text, "text": text, "finish_reason": reason,
            "tokens": object(&["prompt", "cached", "generated"], json!({
                "prompt": whole, "cached": whole, "generated": whole})),
            "timings": object(&["time_to_first_token_ms", "time_per_output_token_ms", "total_ms"], json!({
                "time_to_first_token_ms": number, "time_per_output_token_ms": number, "total_ms": number}))})),
        "TokenizeRequest": object(&["prompt"], json!({"model": text, "prompt": text, "add_special_tokens": truth,
            "return_token_strs": truth})),
        "TokenizeResponse": object(&["count", "max_model_len", "tokens"], json!({"count": whole,
            "max_model_len": whole, "tokens": tokens, "token_strs": maybe(&list(&text))})),
        "DetokenizeRequest": object(&["tokens"], json!({"model": text, "tokens": tokens})),
        "DetokenizeResponse": object(&["prompt"], json!({"prompt": text})),
        "TgiRequest": object(&["inputs"], json!({"inputs": text, "stream": truth,
            "parameters": object(&[], json!({
                "max_new_tokens": {"type": "integer", "minimum": 1, "maximum": u32::MAX}, "do_sample": truth,
                "temperature": {"type": "number", "minimum": 0, "maximum": 2}, "details": truth,
                "return_full_text": truth, "truncate": {"type": "integer", "minimum": 1, "maximum": u32::MAX}}))})),
        "TgiResponse": object(&["generated_text"], json!({"generated_text": text, "details": {"type": "object"}})),
        "TgiInfo": object(&["model_id", "max_total_tokens", "max_input_tokens", "version"], json!({"model_id": text,
            "model_sha": maybe(&text), "max_total_tokens": whole, "max_input_tokens": whole,
            "max_stop_sequences": whole, "version": text}))
    })
}

/// Fields may be added to answers; requests with others are refused by the server, in words that name them.
fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

fn merged(mut own: Value, more: &Value) -> Value {
    if let (Value::Object(own), Value::Object(more)) = (&mut own, more) {
        own.extend(more.clone());
    }
    own
}
