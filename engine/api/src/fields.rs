//! One JSON object, taken apart field by field so that every complaint names its field and nothing is overlooked.

use crate::error::FieldError;
use crate::unsupported::{Rule, Unsupported};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// The fields of a request, or of an object inside it, that nobody has taken yet.
pub struct Fields {
    path: String,
    left: Map<String, Value>,
}

thread_local! {
    /// Fields asked for at the top of requests, while [`asked`] listens.
    static ASKED: RefCell<Option<BTreeSet<String>>> = const { RefCell::new(None) };
}

/// The fields that `parse` asks for when it reads `body`: what a description of the API is held against.
pub fn asked<T>(parse: fn(&[u8]) -> Result<T, FieldError>, body: &str) -> BTreeSet<String> {
    ASKED.set(Some(BTreeSet::new()));
    // Only what was asked counts.
    drop(parse(body.as_bytes()));
    ASKED.take().unwrap_or_default()
}

impl Fields {
    /// Reads a request body. `null` is the same as absent, in every field.
    pub fn parse(body: &[u8]) -> Result<Fields, FieldError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| FieldError::body(format!("the body is not valid JSON: {error}")))?;
        Fields::of(String::new(), value)
    }

    /// The object at `path` inside a request.
    pub fn of(path: String, value: Value) -> Result<Fields, FieldError> {
        match value {
            Value::Object(mut left) => {
                left.retain(|_, value| !value.is_null());
                Ok(Fields { path, left })
            }
            other => Err(FieldError {
                message: format!("{} must be a JSON object and is {}", named(&path), kind(&other)),
                param: (!path.is_empty()).then_some(path),
                code: "invalid_type",
            }),
        }
    }

    /// Takes a field that may be absent. `expected` says what is right, as in "a number from 0 to 2".
    pub fn optional<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Result<Option<T>, FieldError> {
        self.note(name);
        let Some(value) = self.left.remove(name) else { return Ok(None) };
        let found = kind(&value);
        serde_json::from_value(value).map(Some).map_err(|_| FieldError {
            param: Some(self.param(name)),
            message: format!("`{}` must be {expected}; found {found}", self.param(name)),
            code: "invalid_type",
        })
    }

    /// Whether a field is there and was not taken.
    pub fn has(&self, name: &str) -> bool {
        self.left.contains_key(name)
    }

    /// Takes a field that must be there.
    pub fn required<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Result<T, FieldError> {
        self.optional(name, expected)?.ok_or_else(|| FieldError {
            param: Some(self.param(name)),
            message: format!("`{}` is required: {expected}", self.param(name)),
            code: "missing_required_parameter",
        })
    }

    /// Every field not taken must be one of `known` and hold a value that changes nothing.
    pub fn finish(self, known: &[&[Unsupported]]) -> Result<(), FieldError> {
        let path = &self.path;
        self.left.iter().try_for_each(|(name, value)| {
            let param = join(path, name);
            match known.iter().copied().flatten().find(|field| field.name == name) {
                Some(field) if field.accepts(value) => Ok(()),
                Some(field) => Err(refusal(param, field)),
                None => Err(FieldError {
                    message: format!("`{param}` is not a field this server knows; remove it"),
                    param: Some(param),
                    code: "unknown_parameter",
                }),
            }
        })
    }

    fn note(&self, name: &str) {
        if self.path.is_empty() {
            ASKED.with_borrow_mut(|asked| asked.as_mut().map(|asked| asked.insert(name.to_owned())));
        }
    }

    /// The full path of a field of this object.
    pub fn param(&self, name: &str) -> String {
        join(&self.path, name)
    }
}

fn refusal(param: String, field: &Unsupported) -> FieldError {
    let message = match field.rule {
        Rule::Ignored => format!("`{param}` is not supported"),
        Rule::Absent => format!("`{param}` is not supported: {}; remove it", field.why),
        Rule::Only(values) => {
            format!("`{param}` is supported only as {}: {}", values.join(" or "), field.why)
        }
    };
    FieldError { param: Some(param), message, code: "unsupported_parameter" }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn named(path: &str) -> String {
    if path.is_empty() { "the body".to_owned() } else { format!("`{path}`") }
}

/// What a value is, for people. Short values are shown, long ones only by type.
fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) if text.len() <= 32 => value.to_string(),
        Value::String(_) => "a string".to_owned(),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> Fields {
        Fields::parse(body.as_bytes()).unwrap()
    }

    #[test]
    fn a_wrong_type_names_the_field_what_is_right_and_what_was_found() {
        let error = fields(r#"{"top_k": "many"}"#).optional::<i64>("top_k", "a whole number").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("top_k"));
        assert_eq!(error.message, r#"`top_k` must be a whole number; found "many""#);
    }

    #[test]
    fn null_is_absent() {
        let mut fields = fields(r#"{"a": null}"#);
        assert_eq!(fields.optional::<u32>("a", "a number").unwrap(), None);
        assert_eq!(fields.required::<u32>("a", "a number").unwrap_err().code, "missing_required_parameter");
    }

    #[test]
    fn what_nobody_took_and_no_table_knows_is_refused() {
        let error = fields(r#"{"temprature": 1}"#).finish(&[]).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some("temprature"), "unknown_parameter"));
    }

    #[test]
    fn bodies_that_are_no_objects_are_refused() {
        for body in ["", "[1]", "\"text\"", "{\"a\":", "nul"] {
            assert!(Fields::parse(body.as_bytes()).is_err(), "{body}");
        }
        let deep = "[".repeat(5000);
        assert!(Fields::parse(format!("{{\"a\":{deep}").as_bytes()).is_err());
    }
}
