//! JSON as Python's `json.dumps` writes it, which chat templates were trained with: a space after `:` and `,`, and every
//! character as it is.

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io::{Result, Write};

/// On one line.
pub fn compact(value: &impl Serialize) -> String {
    write(value, Spaced)
}

/// The filter `tojson` of chat templates, with Python's `indent`; what else it takes there changes nothing here.
pub fn filter(value: &Value, options: Kwargs) -> std::result::Result<String, Error> {
    const MAX_INDENT: usize = 16;
    let indent: Option<usize> = options.get("indent")?;
    for ignored in ["ensure_ascii", "sort_keys", "separators"] {
        let _: Option<Value> = options.get(ignored)?;
    }
    options.assert_all_used()?;
    match indent {
        None => Ok(compact(value)),
        Some(indent) if indent <= MAX_INDENT => {
            Ok(write(value, PrettyFormatter::with_indent(" ".repeat(indent).as_bytes())))
        }
        Some(indent) => Err(Error::new(ErrorKind::InvalidOperation, format!("an indent of {indent} is too wide"))),
    }
}

fn write(value: &impl Serialize, formatter: impl Formatter) -> String {
    let mut text = Vec::new();
    // What is written comes from JSON and from templates, and memory takes all of it.
    let _ = value.serialize(&mut Serializer::with_formatter(&mut text, formatter));
    String::from_utf8(text).unwrap_or_default()
}

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn it_is_written_as_python_writes_it() {
        let value = json!({"b": [1, 2.0, "é<"], "a": {}});
        assert_eq!(compact(&value), r#"{"b": [1, 2.0, "é<"], "a": {}}"#);
        assert_eq!(
            write(&json!({"a": [1]}), PrettyFormatter::with_indent(b"    ")),
            "{\n    \"a\": [\n        1\n    ]\n}"
        );
    }
}
