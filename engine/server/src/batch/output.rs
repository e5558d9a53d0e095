//! The file of answers: one complete line each, so that a kill costs at most the line being written.

use crate::failure::Failure;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// One line.
#[derive(Debug, Serialize)]
pub struct Answer {
    id: String,
    custom_id: String,
    response: Option<Response>,
    error: Option<LineError>,
}

#[derive(Debug, Serialize)]
struct Response {
    status_code: u16,
    request_id: String,
    body: Value,
}

/// Why a request was never sent.
#[derive(Debug, Serialize)]
struct LineError {
    code: &'static str,
    message: String,
}

impl Answer {
    /// What a server answered.
    pub fn new(custom_id: &str, status: StatusCode, body: Vec<u8>) -> Answer {
        // A body that is no JSON is kept as text.
        let text = || Value::from(String::from_utf8_lossy(&body).into_owned());
        let body: Value = serde_json::from_slice(&body).unwrap_or_else(|_| text());
        let request_id = body["id"].as_str().unwrap_or_default().to_owned();
        let response = Response { status_code: status.as_u16(), request_id, body };
        Answer { response: Some(response), ..Answer::of(custom_id) }
    }

    /// The line cannot be asked.
    pub fn invalid(custom_id: &str, message: &str) -> Answer {
        let error = LineError { code: "invalid_request", message: message.to_owned() };
        Answer { error: Some(error), ..Answer::of(custom_id) }
    }

    fn of(custom_id: &str) -> Answer {
        let id = format!("batch_req_{}", uuid::Uuid::new_v4().simple());
        Answer { id, custom_id: custom_id.to_owned(), response: None, error: None }
    }

    fn is_refusal(&self) -> bool {
        self.response.as_ref().is_none_or(|response| response.status_code >= 400)
    }
}

/// The file, open at its end.
pub struct Output {
    file: File,
    name: String,
    answered: HashSet<String>,
    refused: usize,
}

#[derive(Deserialize)]
struct Named {
    custom_id: String,
}

impl Output {
    /// Opens or makes the file, and cuts off a line that was interrupted.
    pub fn open(path: &Path) -> Result<Output, Failure> {
        let name = path.display().to_string();
        let failed = |error: &dyn std::fmt::Display| Failure::configuration(format!("{name}: {error}"));
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = options.map_err(|error| failed(&error))?;
        let (answered, complete) = read_names(&file).map_err(|error| failed(&error))?;
        file.set_len(complete).and_then(|()| file.seek(SeekFrom::End(0))).map_err(|error| failed(&error))?;
        Ok(Output { file, name, answered, refused: 0 })
    }

    /// Whether this request was answered before.
    pub fn has(&self, custom_id: &str) -> bool {
        self.answered.contains(custom_id)
    }

    /// Requests of this run that the server refused, or that could not be asked.
    pub fn refused(&self) -> usize {
        self.refused
    }

    /// Adds a line.
    pub fn write(&mut self, answer: &Answer) -> Result<(), Failure> {
        self.refused += usize::from(answer.is_refusal());
        let line = serde_json::to_string(answer).map_err(Failure::internal)? + "\n";
        let written = self.file.write_all(line.as_bytes());
        written.map_err(|error| Failure::configuration(format!("cannot write {}: {error}", self.name)))
    }
}

/// Names of complete lines, and where the last of them ends. A line may be longer than memory.
fn read_names(file: &File) -> io::Result<(HashSet<String>, u64)> {
    let (mut lines, mut names, mut complete) = (BufReader::new(file), HashSet::new(), 0);
    loop {
        let mut line = Line { lines: &mut lines, bytes: 0, ended: false };
        let named = serde_json::from_reader::<_, Named>(BufReader::new(&mut line));
        io::copy(&mut line, &mut io::sink())?;
        if !line.ended {
            return Ok((names, complete));
        }
        let Named { custom_id } = named.map_err(|error| {
            io::Error::other(format!("it holds something else than answers, at byte {complete}: {error}"))
        })?;
        names.insert(custom_id);
        complete += line.bytes;
    }
}

/// What is left of one line.
struct Line<'a, R> {
    lines: &'a mut R,
    /// Read so far, with the end.
    bytes: u64,
    /// Its end was read.
    ended: bool,
}

impl<R: BufRead> Read for Line<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.ended || buffer.is_empty() {
            return Ok(0);
        }
        let ahead = self.lines.fill_buf()?;
        let ahead = &ahead[..ahead.len().min(buffer.len())];
        let end = ahead.iter().position(|byte| *byte == b'\n');
        let taken = end.unwrap_or(ahead.len());
        buffer[..taken].copy_from_slice(&ahead[..taken]);
        let read = taken + usize::from(end.is_some());
        self.lines.consume(read);
        self.bytes += read as u64;
        self.ended = end.is_some();
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_line_is_asked_again_and_complete_ones_are_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut output = Output::open(file.path()).unwrap();
        output.write(&Answer::new("a", StatusCode::OK, b"{\"id\":\"x\"}".to_vec())).unwrap();
        output.write(&Answer::new("b", StatusCode::OK, b"{}".to_vec())).unwrap();
        drop(output);
        let length = std::fs::metadata(file.path()).unwrap().len();
        OpenOptions::new().write(true).open(file.path()).unwrap().set_len(length - 5).unwrap();
        let mut output = Output::open(file.path()).unwrap();
        assert!(output.has("a") && !output.has("b"));
        output.write(&Answer::invalid("b", "no")).unwrap();
        assert_eq!(output.refused(), 1);
        let text = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(text.lines().filter(|line| serde_json::from_str::<Value>(line).is_ok()).count(), 2);
    }

    #[test]
    fn a_line_of_any_length_was_answered() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut output = Output::open(file.path()).unwrap();
        let long = format!("{{\"id\":\"{}\"}}", "x".repeat(65 << 20));
        for (name, body) in [("a", "{}"), ("long", &long), ("b", "{}")] {
            output.write(&Answer::new(name, StatusCode::OK, body.into())).unwrap();
        }
        drop(output);
        let before = std::fs::metadata(file.path()).unwrap().len();
        let output = Output::open(file.path()).unwrap();
        assert!(["a", "long", "b"].iter().all(|name| output.has(name)));
        assert_eq!(std::fs::metadata(file.path()).unwrap().len(), before);
    }

    #[test]
    fn a_file_of_something_else_is_not_overwritten() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "my diary\n").unwrap();
        assert!(Output::open(file.path()).is_err());
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "my diary\n");
    }
}
