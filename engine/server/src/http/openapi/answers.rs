//! What clients get back.

use super::{list, maybe, number, object, reference, share, text, tokens, whole};
use serde_json::{Map, Value, json};

/// Every schema, by name.
pub fn schemas() -> Map<String, Value> {
    let counted = json!({"prompt_tokens": whole(), "completion_tokens": whole(), "total_tokens": whole(),
        "prompt_tokens_details": {"type": "object"}});
    let usage = object(&["prompt_tokens", "completion_tokens", "total_tokens"], counted);
    let reason = json!({"enum": ["stop", "length", "tool_calls"]});
    let message = object(
        &["role", "content"],
        json!({"role": {"const": "assistant"}, "content": maybe(&text()),
        "refusal": maybe(&text()), "tool_calls": list(&reference("ToolCall")), "reasoning": text(),
        "reasoning_content": text()}),
    );
    let schemas = json!({
        "Error": object(&["error"], json!({"error": object(&["message", "type", "param", "code"], json!({
            "message": text(), "type": text(), "param": maybe(&text()), "code": maybe(&text())}))})),
        "TgiError": object(&["error", "error_type"], json!({"error": text(), "error_type": text()})),
        // A refusal before the dialect is reached, such as a missing key, is OpenAI's.
        "TgiOrError": {"anyOf": [reference("TgiError"), reference("Error")]},
        "Model": object(&["id", "object", "created", "owned_by", "max_model_len"], json!({
            "id": text(), "object": {"const": "model"}, "created": whole(), "owned_by": text(), "max_model_len": whole()})),
        "ModelList": object(&["object", "data"], json!({
            "object": {"const": "list"}, "data": list(&reference("Model"))})),
        "ServerMetrics": object(&["window_seconds", "requests_running", "generation_tokens_per_second"], json!({
            "window_seconds": number(), "requests_running": whole(), "requests_waiting": whole(),
            "requests_per_second": number(), "prompt_tokens_per_second": number(),
            "generation_tokens_per_second": number(), "time_to_first_token_ms": maybe(&reference("Latency")),
            "inter_token_ms": maybe(&reference("Latency")), "end_to_end_ms": maybe(&reference("Latency")),
            "utilization": maybe(&share()), "batch_fill": share(), "kv_cache_usage": share()})),
        "Latency": object(&["p50", "p95", "p99"], json!({"p50": number(), "p95": number(), "p99": number()})),
        "ChatCompletion": object(&["id", "object", "created", "model", "choices", "usage"], json!({
            "id": text(), "object": {"const": "chat.completion"}, "created": whole(), "model": text(), "usage": usage,
            "system_fingerprint": text(),
            "choices": list(&object(&["index", "message", "finish_reason"], json!({"index": whole(),
                "message": message, "finish_reason": reason})))})),
        "Completion": object(&["id", "object", "created", "model", "choices", "usage"], json!({
            "id": text(), "object": {"const": "text_completion"}, "created": whole(), "model": text(), "usage": usage,
            "system_fingerprint": text(),
            "choices": list(&object(&["index", "text", "finish_reason"], json!({"index": whole(), "text": text(),
                "finish_reason": reason})))})),
        "GenerateResponse": object(&["id", "model", "text", "tokens", "finish_reason", "timings"], json!({
            "id": text(), "model": text(), "text": text(), "finish_reason": reason,
            "tokens": object(&["prompt", "cached", "generated"], json!({
                "prompt": whole(), "cached": whole(), "generated": whole()})),
            "timings": object(&["time_to_first_token_ms", "time_per_output_token_ms", "total_ms"], json!({
                "time_to_first_token_ms": number(), "time_per_output_token_ms": number(), "total_ms": number()}))})),
        "TokenizeResponse": object(&["count", "max_model_len", "tokens"], json!({"count": whole(),
            "max_model_len": whole(), "tokens": tokens(), "token_strs": maybe(&list(&text()))})),
        "DetokenizeResponse": object(&["prompt"], json!({"prompt": text()})),
        "TgiResponse": object(&["generated_text"], json!({"generated_text": text(), "details": {"type": "object"}})),
        "TgiResponses": list(&reference("TgiResponse")),
        "TgiInfo": object(&["model_id", "max_total_tokens", "max_input_tokens", "version"], json!({"model_id": text(),
            "model_sha": maybe(&text()), "max_total_tokens": whole(), "max_input_tokens": whole(),
            "max_stop_sequences": whole(), "version": text()})),
        "Embeddings": object(&["id", "object", "created", "model", "data", "usage"], json!({"id": text(),
            "object": {"const": "list"}, "created": whole(), "model": text(), "usage": usage,
            "data": list(&object(&["index", "object", "embedding"], json!({"index": whole(),
                "object": {"const": "embedding"}, "embedding": {"anyOf": [list(&number()), text()]}})))})),
        "Scores": object(&["id", "object", "created", "model", "data", "usage"], json!({"id": text(),
            "object": {"const": "list"}, "created": whole(), "model": text(), "usage": usage,
            "data": list(&object(&["index", "object", "score"], json!({"index": whole(),
                "object": {"const": "score"}, "score": number()})))})),
        "Ranking": object(&["id", "model", "usage", "results"], json!({"id": text(), "model": text(), "usage": usage,
            "results": list(&object(&["index", "relevance_score"], json!({"index": whole(),
                "document": object(&["text"], json!({"text": text()})), "relevance_score": number()})))})),
    });
    match schemas {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
