//! Lines of OpenAI's batch format, indexed once and read again when their turn comes: a file may be larger than memory.

use crate::failure::Failure;
use axum::body::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Longest line, bytes: a server's largest body.
const MAX_LINE_BYTES: u64 = 32 << 20;
/// Paths that a line may ask.
const URLS: &[&str] = &["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];

/// A file of requests.
pub struct Input {
    file: File,
    name: String,
    items: Vec<Item>,
}

/// Where one request is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The client's name for it.
    pub custom_id: String,
    /// Bytes of its line, which tell how long its prompt is.
    pub length: usize,
    offset: u64,
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Path to post to.
    pub url: String,
    /// What to post.
    pub body: Bytes,
}

#[derive(Deserialize)]
struct Named {
    custom_id: String,
}

#[derive(Deserialize)]
struct Request {
    #[serde(default = "post")]
    method: String,
    url: String,
    body: Map<String, Value>,
}

fn post() -> String {
    "POST".to_owned()
}

impl Input {
    /// Indexes the file: every line has a name of its own.
    pub fn read(path: &Path) -> Result<Input, Failure> {
        let name = path.display().to_string();
        let failed = |error: &dyn std::fmt::Display| Failure::configuration(format!("{name}: {error}"));
        let file = File::open(path).map_err(|error| failed(&error))?;
        let (mut lines, mut items, mut names) = (BufReader::new(&file), Vec::new(), HashSet::new());
        let (mut offset, mut line) = (0, Vec::new());
        for number in 1.. {
            line.clear();
            let read =
                lines.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut line).map_err(|error| failed(&error))?;
            if read == 0 {
                break;
            }
            if read as u64 > MAX_LINE_BYTES {
                return Err(failed(&format!("line {number} is longer than {MAX_LINE_BYTES} bytes")));
            }
            if !line.trim_ascii().is_empty() {
                let Named { custom_id } =
                    serde_json::from_slice(&line).map_err(|error| failed(&format!("line {number}: {error}")))?;
                if !names.insert(custom_id.clone()) {
                    return Err(failed(&format!("line {number}: custom_id {custom_id:?} is there already")));
                }
                items.push(Item { custom_id, length: read, offset });
            }
            offset += read as u64;
        }
        Ok(Input { file, name, items })
    }

    /// All requests, in their order.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// One request, asking `model` where it names none; or what is wrong with it.
    pub fn line(&self, item: &Item, model: &str) -> Result<Result<Line, String>, Failure> {
        let mut bytes = vec![0; item.length];
        let read = self.file.read_exact_at(&mut bytes, item.offset);
        read.map_err(|error| Failure::configuration(format!("{}: {error}", self.name)))?;
        Ok(parse(&bytes, model))
    }
}

fn parse(line: &[u8], model: &str) -> Result<Line, String> {
    let Request { method, url, mut body } = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    if method != "POST" {
        return Err(format!("method is {method:?}; it must be POST"));
    }
    if !URLS.contains(&url.as_str()) {
        return Err(format!("url is {url:?}; it must be one of {}", URLS.join(", ")));
    }
    if body.get("stream").is_some_and(|stream| *stream == Value::Bool(true)) {
        return Err("body.stream is true; answers in a file are whole".to_owned());
    }
    body.entry("model").or_insert_with(|| model.into());
    Ok(Line { url, body: Value::Object(body).to_string().into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(text: &str) -> Result<Input, Failure> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Input::read(file.path())
    }

    #[test]
    fn lines_are_found_again_by_name() {
        let text = "{\"custom_id\":\"a\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"x\"}}\n\n\
                    {\"custom_id\":\"b\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"yy\",\"model\":\"other\"}}";
        let input = input(text).unwrap();
        let body = |index: usize| {
            let line = input.line(&input.items()[index], "m").unwrap().unwrap();
            serde_json::from_slice::<Value>(&line.body).unwrap()
        };
        assert_eq!(body(0), serde_json::json!({"prompt": "x", "model": "m"}));
        assert_eq!(body(1), serde_json::json!({"prompt": "yy", "model": "other"}));
    }

    #[test]
    fn a_name_twice_or_none_at_all_is_told_with_its_line() {
        for (text, word) in
            [("{\"custom_id\":\"a\"}\n{\"custom_id\":\"a\"}\n", "line 2"), ("\n{}\n", "line 2"), ("x", "line 1")]
        {
            let failure = input(text).err().unwrap();
            assert!(failure.message.contains(word), "{text}: {failure}");
        }
    }

    #[test]
    fn what_cannot_be_asked_is_said() {
        for (line, word) in [
            (r#"{"url":"/metrics","body":{}}"#, "/metrics"),
            (r#"{"method":"GET","url":"/v1/completions","body":{}}"#, "GET"),
            (r#"{"url":"/v1/completions","body":{"stream":true}}"#, "stream"),
            (r#"{"url":"/v1/completions"}"#, "body"),
        ] {
            let wrong = parse(line.as_bytes(), "m").unwrap_err();
            assert!(wrong.contains(word), "{line}: {wrong}");
        }
    }
}
