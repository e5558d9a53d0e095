//! A request body before it is taken apart, and how much a request may hold.

use crate::error::FieldError;
use serde_json::Value;
use serde_json::value::RawValue;
use std::cell::Cell;

/// JSON as the client wrote it, known to be whole and not yet made into anything.
pub type Raw<'a> = &'a RawValue;

/// Values of free form that one request may hold, all its schemas, tools and documents together.
const MAX_FREE_VALUES: usize = 32 << 10;
/// What a value of free form takes, its name and the room that lists keep included.
const FREE_VALUE_BYTES: usize = 160;

/// The bytes of a request, and what is counted while they are read.
pub struct Body<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) limits: Limits,
    free_values: Cell<usize>,
}

/// What the server that reads a request says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens of a prompt.
    pub prompt_tokens: usize,
    /// Most bytes of a text that is a prompt or becomes part of one.
    pub prompt_bytes: usize,
    /// Fields that nobody knows are passed over instead of refused.
    pub ignore_unknown_fields: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { prompt_tokens: usize::MAX, prompt_bytes: usize::MAX, ignore_unknown_fields: false }
    }
}

impl<'a> Body<'a> {
    /// A body for a server without limits.
    pub fn new(bytes: &'a (impl AsRef<[u8]> + ?Sized)) -> Body<'a> {
        Body { bytes: bytes.as_ref(), limits: Limits::default(), free_values: Cell::new(0) }
    }

    /// The same for a server with these.
    pub fn within(self, limits: Limits) -> Body<'a> {
        Body { limits, ..self }
    }

    /// What was made of its values of free form, bytes.
    pub fn free_bytes(&self) -> usize {
        self.free_values.get() * FREE_VALUE_BYTES
    }

    /// Counts the values in `text`, which `param` holds, before they are made.
    pub(crate) fn count_free(&self, param: &str, text: &str) -> Result<(), FieldError> {
        let sum = self.free_values.get().saturating_add(parts(text));
        if sum > MAX_FREE_VALUES {
            let message = format!(
                "`{param}` has too many parts: a request may have {MAX_FREE_VALUES} values in its \
                                   schemas, tools, documents and template variables together"
            );
            return Err(FieldError::invalid(param, message));
        }
        self.free_values.set(sum);
        Ok(())
    }
}

/// No fewer than the names and values in a JSON text, which stand before or behind one of these.
fn parts(text: &str) -> usize {
    1 + outside_strings(text).filter(|byte| b",:[{".contains(byte)).count()
}

/// The bytes of a JSON text without white space.
pub(crate) fn compact_bytes(raw: Raw<'_>) -> usize {
    raw.get().len() - outside_strings(raw.get()).filter(u8::is_ascii_whitespace).count()
}

fn outside_strings(text: &str) -> impl Iterator<Item = u8> + '_ {
    let (mut inside, mut escaped) = (false, false);
    text.bytes().filter(move |byte| {
        let was_inside = inside;
        match *byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = inside,
            b'"' => inside = !inside,
            _ => (),
        }
        !was_inside
    })
}

/// What a short value says; `None` of a long one.
pub(crate) fn short_value(raw: Raw<'_>) -> Option<Value> {
    const MOST_BYTES: usize = 64;
    (raw.get().len() <= MOST_BYTES).then(|| serde_json::from_str(raw.get()).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_and_name_is_counted_and_no_text_is() {
        for (text, least) in [("1", 1), ("[0,0,0]", 4), (r#"{"a":[],"b":{"c":1}}"#, 7), (r#""[,\",{""#, 1)] {
            assert!((least..=least + 1).contains(&parts(text)), "{text}: {}", parts(text));
        }
    }

    #[test]
    fn white_space_outside_of_texts_is_not_counted() {
        let raw: &RawValue = serde_json::from_str("{ \"a b\" :\n [1, 2] }").unwrap();
        assert_eq!(compact_bytes(raw), r#"{"a b":[1,2]}"#.len());
    }
}
