//! What clients may send.

use super::{list, maybe, object, reference, share, text, tokens, truth, whole};
use serde_json::{Map, Value, json};
use windlass_engine_api::encoders::MAX_TEXTS;
use windlass_engine_api::tools::{MAX_NAME_CHARS, MAX_TOOLS};

/// Every schema, by name.
pub fn schemas() -> Map<String, Value> {
    let message = object(
        &["role"],
        json!({
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]}, "content": maybe(&text()), "name": text(),
        "tool_calls": list(&reference("ToolCall")), "tool_call_id": text(), "reasoning": text(),
        "reasoning_content": text()}),
    );
    let function = object(
        &["name"],
        json!({
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS, "pattern": "^[A-Za-z0-9_.-]+$"},
        "description": text(), "parameters": {"type": "object"}, "strict": truth()}),
    );
    let schemas = json!({
        "Message": message,
        "ToolCall": object(&["id", "type", "function"], json!({"id": text(), "type": {"const": "function"},
            "function": object(&["name", "arguments"], json!({"name": text(), "arguments": text()}))})),
        "Tool": object(&["type", "function"], json!({"type": {"const": "function"}, "function": function})),
        "ChatRequest": object(&["model", "messages"], joined([
            json!({"model": text(), "logprobs": truth(), "top_logprobs": top(), "include_reasoning": truth()}),
            conversation(), generation(), sampling()])),
        "CompletionRequest": object(&["model", "prompt"], joined([
            json!({"model": text(), "logprobs": top(), "echo": truth(), "prompt": prompt(64)}),
            generation(), sampling()])),
        "GenerateRequest": object(&["prompt"], joined([json!({"model": text(), "prompt": text()}), generation(), sampling()])),
        "TokenizeRequest": object(&[], joined([json!({"model": text(), "prompt": text(), "add_special_tokens": truth(),
            "return_token_strs": truth()}), conversation()])),
        "DetokenizeRequest": object(&["tokens"], json!({"model": text(), "tokens": tokens()})),
        "TgiRequest": object(&["inputs"], json!({"inputs": text(), "stream": truth(),
            "parameters": object(&[], json!({
                "max_new_tokens": {"type": "integer", "minimum": 1, "maximum": u32::MAX}, "do_sample": truth(),
                "temperature": {"type": "number", "minimum": 0, "maximum": 2}, "details": truth(),
                "return_full_text": truth(), "truncate": {"type": "integer", "minimum": 1, "maximum": u32::MAX}}))})),
        "EmbeddingsRequest": object(&["model", "input"], json!({"model": text(), "input": prompt(MAX_TEXTS),
            "encoding_format": {"enum": ["float", "base64"]}, "dimensions": {"type": "integer", "minimum": 1},
            "truncate_prompt_tokens": cut()})),
        "ScoreRequest": object(&["model", "text_1", "text_2"], json!({"model": text(), "text_1": texts(), "text_2": texts(),
            "truncate_prompt_tokens": cut()})),
        "RerankRequest": object(&["model", "query", "documents"], json!({"model": text(), "query": text(),
            "documents": {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": text()},
            "top_n": {"type": "integer", "minimum": 0, "maximum": u32::MAX}, "return_documents": truth(),
            "truncate_prompt_tokens": cut()})),
    });
    into_map(schemas)
}

fn conversation() -> Value {
    let named = object(
        &["type", "function"],
        json!({"type": {"const": "function"},
        "function": object(&["name"], json!({"name": text()}))}),
    );
    json!({
        "messages": {"type": "array", "minItems": 1, "items": reference("Message")},
        "tools": {"type": "array", "maxItems": MAX_TOOLS, "items": reference("Tool")},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, named]},
        "parallel_tool_calls": truth(), "documents": list(&json!({"type": "object"})),
        "chat_template": text(), "chat_template_kwargs": {"type": "object"}, "add_generation_prompt": truth(), "continue_final_message": truth()
    })
}

fn generation() -> Value {
    let tokens = json!({"type": "integer", "minimum": 1, "maximum": u32::MAX});
    json!({
        "max_tokens": tokens, "max_completion_tokens": tokens, "stream": truth(),
        "stream_options": object(&[], json!({"include_usage": truth(), "continuous_usage_stats": truth()})),
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1, "maximum": u32::MAX},
        "min_p": share(),
        "seed": {"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX},
        "stop": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "array", "maxItems": 16,
            "items": {"type": "string", "minLength": 1, "maxLength": 256}}]}
    })
}

fn sampling() -> Value {
    let penalty = json!({"type": "number", "minimum": -2, "maximum": 2});
    let count = json!({"type": "integer", "minimum": 1, "maximum": 128});
    json!({
        "n": count, "best_of": count,
        "typical_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "frequency_penalty": penalty, "presence_penalty": penalty,
        "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100},
        "logit_bias": {"type": "object", "maxProperties": 1024, "additionalProperties": {"type": "number"}},
        "bad_words": list(&text()), "allowed_token_ids": tokens(), "stop_token_ids": tokens(),
        "min_tokens": whole(), "ignore_eos": truth(), "include_stop_str_in_output": truth(), "skip_special_tokens": truth(),
        "truncate_prompt_tokens": {"type": "integer", "minimum": 1, "maximum": u32::MAX},
        "prompt_logprobs": top(), "priority": {"type": "integer", "minimum": i32::MIN, "maximum": i32::MAX},
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": 256},
        "use_beam_search": truth(), "length_penalty": {"type": "number", "minimum": -10, "maximum": 10},
        "response_format": {"type": "object", "required": ["type"]}, "structured_outputs": {"type": "object"},
        "guided_json": {}, "guided_regex": text(), "guided_choice": list(&text()), "guided_grammar": text()
    })
}

fn top() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": 20})
}

fn cut() -> Value {
    json!({"type": "integer", "minimum": -1, "maximum": u32::MAX})
}

fn texts() -> Value {
    json!({"anyOf": [text(), {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": text()}]})
}

/// Text or tokens, one or several.
fn prompt(most: usize) -> Value {
    let many = |items: Value| json!({"type": "array", "minItems": 1, "maxItems": most, "items": items});
    json!({"anyOf": [text(), many(text()), tokens(), many(tokens())]})
}

fn joined(parts: impl IntoIterator<Item = Value>) -> Value {
    parts.into_iter().flat_map(into_map).collect::<Map<_, _>>().into()
}

fn into_map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
