//! `--unknown-fields ignore`: a field that nobody knows is taken out of the request, and the rest is read again.
//!
//! Reading is strict everywhere, so that one place decides; only a field unknown to OpenAI's and vLLM's APIs is ever
//! taken out, never one that is known and not served.

use serde_json::Value;
use windlass_engine_api::error::FieldError;

/// Unknown fields of one request, at most; each costs a reading.
const MAX_UNKNOWN: usize = 32;

/// Reads `body` by `parse`, without the fields that `parse` does not know.
pub fn read<T>(body: &[u8], parse: fn(&[u8]) -> Result<T, FieldError>) -> Result<T, FieldError> {
    let mut refused = match parse(body) {
        Err(error) if error.code == UNKNOWN => error,
        other => return other,
    };
    let Ok(mut value) = serde_json::from_slice::<Value>(body) else { return Err(refused) };
    for _ in 0..MAX_UNKNOWN {
        let Some(param) = refused.param.as_deref().filter(|_| refused.code == UNKNOWN) else { break };
        if !remove(&mut value, param) {
            break;
        }
        match parse(value.to_string().as_bytes()) {
            Err(error) => refused = error,
            read => return read,
        }
    }
    Err(refused)
}

const UNKNOWN: &str = "unknown_parameter";

/// Takes out the field at `path`, as in `messages[2].name`. A name may itself hold dots and brackets.
fn remove(value: &mut Value, path: &str) -> bool {
    match value {
        Value::Object(fields) if fields.contains_key(path) => fields.shift_remove(path).is_some(),
        Value::Object(fields) => fields.iter_mut().any(|(name, inner)| {
            path.strip_prefix(name.as_str()).is_some_and(|rest| match rest.strip_prefix('.') {
                Some(rest) => remove(inner, rest),
                None => remove(inner, rest),
            })
        }),
        Value::Array(items) => {
            let Some((index, rest)) = path.strip_prefix('[').and_then(|rest| rest.split_once(']')) else {
                return false;
            };
            let item = index.parse::<usize>().ok().and_then(|index| items.get_mut(index));
            item.is_some_and(|item| remove(item, rest.strip_prefix('.').unwrap_or(rest)))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use windlass_engine_api::chat::ChatRequest;

    #[test]
    fn unknown_fields_go_wherever_they_are_and_known_ones_stay() {
        let body = json!({"model": "m", "frobnicate": [1], "a.b": 1, "max_tokens": 3,
            "messages": [{"role": "user", "content": "hi", "mood": "good"}]});
        let request = read(body.to_string().as_bytes(), ChatRequest::from_body).unwrap();
        assert_eq!(request.generation.max_tokens, Some(3));
        assert_eq!(request.conversation.messages[0].content, "hi");
    }

    #[test]
    fn what_is_known_and_not_served_is_still_refused() {
        let body = json!({"model": "m", "frobnicate": 1, "audio": {"voice": "x"},
            "messages": [{"role": "user", "content": "hi"}]});
        let error = read(body.to_string().as_bytes(), ChatRequest::from_body).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("audio"));
    }

    #[test]
    fn there_is_a_bound() {
        let body: Value = (0..1000).map(|i| (format!("f{i}"), json!(1))).collect::<serde_json::Map<_, _>>().into();
        assert!(read(body.to_string().as_bytes(), |body| ChatRequest::from_body(body).map(drop)).is_err());
    }
}
