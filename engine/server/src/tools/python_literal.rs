//! Values of Python's literals as JSON: strings, numbers, `True`, `False`, `None`, lists, tuples, dictionaries.

use serde_json::{Map, Number, Value};

/// Deepest nesting that is read.
const MAX_DEPTH: u32 = 64;

/// Where the literal that `text` begins with ends, at a `,` or a closing bracket that is not its own; `None` while it
/// goes on.
pub fn extent(text: &str) -> Option<usize> {
    let (mut depth, mut quote, mut escaped) = (0u32, None, false);
    for (at, byte) in text.bytes().enumerate() {
        match (quote, byte) {
            _ if escaped => escaped = false,
            (Some(_), b'\\') => escaped = true,
            (Some(mark), byte) if byte == mark => quote = None,
            (Some(_), _) => (),
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b',') if depth == 0 => return Some(at),
            (None, b')' | b']' | b'}') if depth == 0 => return Some(at),
            (None, b')' | b']' | b'}') => depth -= 1,
            _ => (),
        }
    }
    None
}

/// The literal as JSON.
pub fn parse(text: &str) -> Option<Value> {
    let mut reader = Reader { rest: text };
    let value = reader.value(0)?;
    reader.rest.trim().is_empty().then_some(value)
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn value(&mut self, depth: u32) -> Option<Value> {
        self.rest = self.rest.trim_start();
        match self.rest.chars().next().filter(|_| depth < MAX_DEPTH)? {
            '\'' | '"' => self.string().map(Value::String),
            '[' => self.sequence(']', depth).map(Value::Array),
            '(' => self.sequence(')', depth).map(Value::Array),
            '{' => self.dictionary(depth).map(Value::Object),
            _ => self.word(),
        }
    }

    fn take(&mut self, wanted: char) -> bool {
        self.rest = self.rest.trim_start();
        let found = self.rest.strip_prefix(wanted);
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    fn sequence(&mut self, end: char, depth: u32) -> Option<Vec<Value>> {
        let mut values = Vec::new();
        self.rest = &self.rest[1..];
        while !self.take(end) {
            values.push(self.value(depth + 1)?);
            if !self.take(',') {
                return self.take(end).then_some(values);
            }
        }
        Some(values)
    }

    fn dictionary(&mut self, depth: u32) -> Option<Map<String, Value>> {
        let mut entries = Map::new();
        self.rest = &self.rest[1..];
        while !self.take('}') {
            let Value::String(key) = self.value(depth + 1)? else { return None };
            if !self.take(':') {
                return None;
            }
            entries.insert(key, self.value(depth + 1)?);
            if !self.take(',') {
                return self.take('}').then_some(entries);
            }
        }
        Some(entries)
    }

    fn string(&mut self) -> Option<String> {
        let mut chars = self.rest.chars();
        let (quote, mut text) = (chars.next()?, String::new());
        loop {
            match chars.next()? {
                '\\' => match chars.next()? {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    '\n' => (),
                    'u' => text.push(unicode(&mut chars, 4)?),
                    'x' => text.push(unicode(&mut chars, 2)?),
                    other @ ('\\' | '\'' | '"') => text.push(other),
                    other => text.extend(['\\', other]),
                },
                c if c == quote => break,
                c => text.push(c),
            }
        }
        self.rest = chars.as_str();
        Some(text)
    }

    fn word(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| ",)]}: \n\t\r".contains(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word {
            "True" | "true" => Some(Value::Bool(true)),
            "False" | "false" => Some(Value::Bool(false)),
            "None" | "null" => Some(Value::Null),
            number => number.parse::<i64>().map(Number::from).ok().or_else(|| float(number)).map(Value::Number),
        }
    }
}

fn float(text: &str) -> Option<Number> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    text.parse().ok().filter(|_| plain).and_then(Number::from_f64)
}

fn unicode(chars: &mut std::str::Chars<'_>, digits: usize) -> Option<char> {
    let hex: String = chars.by_ref().take(digits).collect();
    u32::from_str_radix(&hex, 16).ok().and_then(char::from_u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn literals_are_what_python_says() {
        for (text, expected) in [
            ("'it\\'s'", Some(json!("it's"))),
            ("\"a\\n\\u00e9\\q\"", Some(json!("a\né\\q"))),
            ("-12", Some(json!(-12))),
            ("1e3", Some(json!(1000.0))),
            ("[1, 'a', None, ]", Some(json!([1, "a", null]))),
            ("(True, False)", Some(json!([true, false]))),
            ("{'a': {\"b\": [ ]}, }", Some(json!({"a": {"b": []}}))),
            ("inf", None),
            ("{1: 2}", None),
            ("f(x)", None),
            ("'open", None),
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
        assert_eq!(parse(&("[".repeat(5000) + &"]".repeat(5000))), None);
    }

    #[test]
    fn a_literal_ends_where_its_brackets_are_closed() {
        assert_eq!(extent("[1, ')'], b"), Some(8));
        assert_eq!(extent("'a,b')"), Some(5));
        assert_eq!(extent("[1, "), None);
    }
}
