//! One JSON object, taken apart field by field so that every complaint names its field and nothing is overlooked.
//!
//! A field stays text until it is taken, and becomes what it is taken as and nothing else: what nobody takes costs
//! nothing, and lists are counted before they are read.

use crate::body::{Body, Limits, Raw, short_value};
use crate::error::FieldError;
use crate::unsupported::{Rule, Unsupported};
use serde::Deserialize;
use serde::de::{DeserializeOwned, Error, IgnoredAny, MapAccess, Visitor};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Fields of one object.
const MAX_FIELDS: usize = 256;
/// Longest value that a complaint shows.
const MAX_SHOWN_BYTES: usize = 34;

/// The fields of a request, or of an object inside it, that nobody has taken yet.
pub struct Fields<'a> {
    body: &'a Body<'a>,
    path: String,
    left: BTreeMap<Cow<'a, str>, Raw<'a>>,
}

thread_local! {
    /// Fields asked for at the top of requests, while [`asked`] listens.
    static ASKED: RefCell<Option<BTreeSet<String>>> = const { RefCell::new(None) };
}

/// Reads a request from its body.
pub type Parse<T> = fn(&Body<'_>) -> Result<T, FieldError>;

/// The fields that `parse` asks for when it reads `body`: what a description of the API is held against.
pub fn asked<T>(parse: Parse<T>, body: &str) -> BTreeSet<String> {
    ASKED.set(Some(BTreeSet::new()));
    // Only what was asked counts.
    drop(parse(&Body::new(body)));
    ASKED.take().unwrap_or_default()
}

impl<'a> Fields<'a> {
    /// Reads a request body. `null` is the same as absent, in every field.
    pub fn parse(body: &'a Body<'a>) -> Result<Fields<'a>, FieldError> {
        let text = str::from_utf8(body.bytes).map_err(|error| invalid_json(None, &error))?;
        Fields::read(body, String::new(), text)
    }

    /// The object at `path` inside the same request.
    pub fn inside(&self, path: String, raw: Raw<'a>) -> Result<Fields<'a>, FieldError> {
        Fields::read(self.body, path, raw.get())
    }

    fn read(body: &'a Body<'a>, path: String, text: &'a str) -> Result<Fields<'a>, FieldError> {
        let param = || (!path.is_empty()).then(|| path.clone());
        if !text.trim_start().starts_with('{') {
            let other: Raw<'_> = serde_json::from_str(text).map_err(|error| invalid_json(param(), &error))?;
            let message = format!("{} must be a JSON object and is {}", named(&path), kind(other));
            return Err(FieldError { param: param(), message, code: "invalid_type" });
        }
        match serde_json::from_str(text) {
            Ok(Object(left)) => Ok(Fields { body, path, left }),
            Err(error) if error.is_data() => {
                let message = format!("{} has more than {MAX_FIELDS} fields", named(&path));
                Err(FieldError { param: param(), message, code: "invalid_value" })
            }
            Err(error) => Err(invalid_json(param(), &error)),
        }
    }

    /// What the server lets a request hold.
    pub fn limits(&self) -> Limits {
        self.body.limits
    }

    /// Takes a field that may be absent, as it is written.
    pub fn raw(&mut self, name: &str) -> Option<Raw<'a>> {
        self.note(name);
        self.left.remove(name)
    }

    /// Takes a field that may be absent. `expected` says what is right, as in "a number from 0 to 2".
    pub fn optional<T: Deserialize<'a>>(&mut self, name: &str, expected: &str) -> Result<Option<T>, FieldError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        self.read_as(name, raw, expected).map(Some)
    }

    /// Takes a list that may be absent: where it has more items than `most`, none of them is read.
    pub fn list<T: Deserialize<'a>>(
        &mut self,
        name: &str,
        most: usize,
        expected: &str,
    ) -> Result<Option<Vec<T>>, FieldError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        self.check_count(name, raw, most, expected)?;
        self.read_as(name, raw, expected).map(Some)
    }

    /// Takes a text or a list of texts that may be absent.
    pub fn texts(&mut self, name: &str, most: usize, expected: &str) -> Result<Option<Vec<String>>, FieldError> {
        match self.left.get(name) {
            Some(raw) if raw.get().starts_with('"') => {
                self.optional(name, expected).map(|text| text.map(|one| vec![one]))
            }
            _ => self.list(name, most, expected),
        }
    }

    /// Takes a field of free form that may be absent.
    pub fn free<T: Deserialize<'a>>(&mut self, name: &str, expected: &str) -> Result<Option<T>, FieldError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        self.body.count_free(&self.param(name), raw.get())?;
        self.read_as(name, raw, expected).map(Some)
    }

    /// Takes an object that may be absent.
    pub fn object(&mut self, name: &str) -> Result<Option<Fields<'a>>, FieldError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        self.inside(self.param(name), raw).map(Some)
    }

    /// An object without fields, in the place of one that is absent.
    pub(crate) fn none(&self, name: &str) -> Fields<'a> {
        Fields { body: self.body, path: self.param(name), left: BTreeMap::new() }
    }

    /// Reads JSON that is written into a text of the field called `name`.
    pub(crate) fn written<T: DeserializeOwned>(&self, name: &str, text: &str) -> Result<T, FieldError> {
        let param = self.param(name);
        self.body.count_free(&param, text)?;
        serde_json::from_str(text).map_err(|error| {
            let message = format!("`{param}` is a string that is not valid JSON: {error}");
            FieldError::invalid(param, message)
        })
    }

    /// Refuses a list of more than `most` items.
    pub(crate) fn check_count(&self, name: &str, raw: Raw<'a>, most: usize, expected: &str) -> Result<(), FieldError> {
        let count = self.count(name, raw, expected)?;
        if count <= most {
            return Ok(());
        }
        let param = self.param(name);
        let message = format!("`{param}` holds {count} items; at most {most} are read");
        Err(FieldError::invalid(param, message))
    }

    /// How many items a list has that the field called `name` holds.
    pub(crate) fn count(&self, name: &str, raw: Raw<'a>, expected: &str) -> Result<usize, FieldError> {
        Ok(self.read_as::<Vec<IgnoredAny>>(name, raw, expected)?.len())
    }

    /// Reads what the field called `name` holds.
    pub(crate) fn read_as<T: Deserialize<'a>>(
        &self,
        name: &str,
        raw: Raw<'a>,
        expected: &str,
    ) -> Result<T, FieldError> {
        serde_json::from_str(raw.get()).map_err(|error| {
            let param = self.param(name);
            if !error.is_data() {
                return invalid_json(Some(param), &error);
            }
            let message = format!("`{param}` must be {expected}; found {}", kind(raw));
            FieldError { param: Some(param), message, code: "invalid_type" }
        })
    }

    /// Whether a field is there and was not taken.
    pub fn has(&self, name: &str) -> bool {
        self.left.contains_key(name)
    }

    /// Takes a field that must be there.
    pub fn required<T: Deserialize<'a>>(&mut self, name: &str, expected: &str) -> Result<T, FieldError> {
        let taken = self.optional(name, expected)?;
        taken.ok_or_else(|| self.missing(name, expected))
    }

    /// The complaint about a field that must be there.
    pub(crate) fn missing(&self, name: &str, expected: &str) -> FieldError {
        let param = self.param(name);
        let message = format!("`{param}` is required: {expected}");
        FieldError { param: Some(param), message, code: "missing_required_parameter" }
    }

    /// Every field not taken must be one of `known` and hold a value that changes nothing.
    pub fn finish(self, known: &[&[Unsupported]]) -> Result<(), FieldError> {
        self.left.iter().try_for_each(|(name, raw)| {
            match known.iter().copied().flatten().find(|field| field.name == name) {
                Some(field) if accepts(field, raw) => Ok(()),
                Some(field) => Err(refusal(self.param(name), field)),
                None if self.body.limits.ignore_unknown_fields => Ok(()),
                None => Err(unknown(self.param(name))),
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

/// An object of a moderate number of fields, of which the last of a name counts.
struct Object<'a>(BTreeMap<Cow<'a, str>, Raw<'a>>);

/// A name, which is copied only where it is escaped.
#[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Object<'de>, D::Error> {
        deserializer.deserialize_map(ObjectVisitor)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<'de>, A::Error> {
        let mut fields = BTreeMap::new();
        while let Some((Name(name), value)) = map.next_entry::<Name<'de>, Raw<'de>>()? {
            fields.insert(name, value);
            if fields.len() > MAX_FIELDS {
                return Err(A::Error::custom("too many fields"));
            }
        }
        fields.retain(|_, value| value.get() != "null");
        Ok(Object(fields))
    }
}

fn accepts(field: &Unsupported, raw: Raw<'_>) -> bool {
    matches!(field.rule, Rule::Ignored) || short_value(raw).is_some_and(|value| field.accepts(&value))
}

fn invalid_json(param: Option<String>, error: &dyn fmt::Display) -> FieldError {
    let message = format!("{} is not valid JSON: {error}", named(param.as_deref().unwrap_or_default()));
    FieldError { param, message, code: "invalid_json" }
}

fn unknown(param: String) -> FieldError {
    let message = format!("`{param}` is not a field this server knows; remove it");
    FieldError { param: Some(param), message, code: "unknown_parameter" }
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
pub(crate) fn kind(raw: Raw<'_>) -> String {
    let text = raw.get();
    match text.as_bytes().first() {
        Some(b'{') => "an object".to_owned(),
        Some(b'[') => {
            let count = serde_json::from_str::<Vec<IgnoredAny>>(text).map_or(0, |items| items.len());
            format!("a list of {count}")
        }
        _ if text.len() <= MAX_SHOWN_BYTES => text.to_owned(),
        Some(b'"') => "a string".to_owned(),
        _ => "a number".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn a_wrong_type_names_the_field_what_is_right_and_what_was_found() {
        let body = Body::new(r#"{"top_k": "many"}"#);
        let error = Fields::parse(&body).unwrap().optional::<i64>("top_k", "a whole number").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("top_k"));
        assert_eq!(error.message, r#"`top_k` must be a whole number; found "many""#);
    }

    #[test]
    fn null_is_absent() {
        let body = Body::new(r#"{"a": null}"#);
        let mut fields = Fields::parse(&body).unwrap();
        assert_eq!(fields.optional::<u32>("a", "a number").unwrap(), None);
        assert_eq!(fields.required::<u32>("a", "a number").unwrap_err().code, "missing_required_parameter");
    }

    #[test]
    fn what_nobody_took_and_no_table_knows_is_refused_or_passed_over() {
        let body = Body::new(r#"{"temprature": [1], "a.b": 1}"#);
        let error = Fields::parse(&body).unwrap().finish(&[]).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some("a.b"), "unknown_parameter"));
        let body = body.within(Limits { ignore_unknown_fields: true, ..Limits::default() });
        Fields::parse(&body).unwrap().finish(&[]).unwrap();
    }

    #[test]
    fn what_is_known_and_not_served_is_refused_either_way() {
        let body = Body::new(r#"{"best_of": 2}"#).within(Limits { ignore_unknown_fields: true, ..Limits::default() });
        let error = Fields::parse(&body).unwrap().finish(&[crate::unsupported::TGI]).unwrap_err();
        assert_eq!(error.code, "unsupported_parameter");
    }

    #[test]
    fn bodies_that_are_no_objects_are_refused() {
        for body in ["", "[1]", "\"text\"", "{\"a\":", "nul", "{\"a\":1}x"] {
            assert!(Fields::parse(&Body::new(body)).is_err(), "{body}");
        }
        assert!(Fields::parse(&Body::new(b"{\"a\":\"\xff\"}")).is_err());
        let deep = "[".repeat(5000);
        assert!(Fields::parse(&Body::new(&format!("{{\"a\":{deep}"))).is_err());
    }

    #[test]
    fn an_object_has_a_moderate_number_of_names_and_the_last_of_each_counts() {
        let of = |count: usize| (0..count).map(|i| format!("\"f{i}\":0,")).collect::<String>();
        let twice = format!("{{{}{}\"f0\":7}}", of(MAX_FIELDS), of(MAX_FIELDS));
        let body = Body::new(&twice);
        assert_eq!(Fields::parse(&body).unwrap().optional::<u32>("f0", "a number").unwrap(), Some(7));
        let many = format!("{{{}\"x\":0}}", of(MAX_FIELDS));
        assert!(Fields::parse(&Body::new(&many)).err().unwrap().message.contains("256 fields"));
    }

    #[test]
    fn a_list_is_counted_before_it_is_read() {
        let text = format!("{{\"a\":[{}0]}}", "0,".repeat(100));
        let body = Body::new(&text);
        let error = Fields::parse(&body).unwrap().list::<String>("a", 100, "a list of strings").unwrap_err();
        assert_eq!(error.message, "`a` holds 101 items; at most 100 are read");
    }

    #[test]
    fn values_of_free_form_are_counted_together() {
        let text = format!("{{\"a\":[{0}0],\"b\":[{0}0]}}", "0,".repeat(20_000));
        let body = Body::new(&text);
        let mut fields = Fields::parse(&body).unwrap();
        assert!(fields.free::<Value>("a", "a list").unwrap().is_some());
        assert!(body.free_bytes() > 20_000 * 72, "{}", body.free_bytes());
        assert_eq!(fields.free::<Value>("b", "a list").unwrap_err().param.as_deref(), Some("b"));
    }
}
