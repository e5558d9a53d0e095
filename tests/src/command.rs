//! Runs programs: output captured, and quoted when they fail.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::Write;
use std::process::{Command, Output, Stdio};

/// Longest part of a failed program's output that an error quotes, bytes.
const QUOTED_BYTES: usize = 4000;

/// Runs `command` to its end and returns what it wrote to standard output.
///
/// # Errors
/// When it cannot be started or does not exit with 0; the message quotes the end of its output.
pub fn output(command: &mut Command) -> Result<String> {
    said(command, None)
}

/// As [`output`], with `input` on standard input.
///
/// # Errors
/// As [`output`].
pub fn output_with_input(command: &mut Command, input: &str) -> Result<String> {
    said(command, Some(Input::Text(input)))
}

/// As [`output`], with a file on standard input.
///
/// # Errors
/// As [`output`].
pub fn output_with_file(command: &mut Command, file: File) -> Result<String> {
    said(command, Some(Input::File(file)))
}

/// What a program that succeeded wrote.
#[derive(Debug)]
pub struct Said {
    /// To standard output.
    pub output: String,
    /// To standard error: warnings, since it succeeded.
    pub error: String,
}

/// As [`output_with_input`], but keeps the warnings too.
///
/// # Errors
/// As [`output`].
pub fn output_and_error_with_input(command: &mut Command, input: &str) -> Result<Said> {
    let line = command_line(command);
    finish(command, line, Some(Input::Text(input)))
}

enum Input<'a> {
    Text(&'a str),
    File(File),
}

fn said(command: &mut Command, input: Option<Input<'_>>) -> Result<String> {
    let line = command_line(command);
    finish(command, line, input).map(|said| said.output)
}

fn finish(command: &mut Command, line: String, input: Option<Input<'_>>) -> Result<Said> {
    let output = collect(command, input).with_context(|| format!("cannot run `{line}`"))?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        bail!("`{line}` ended with {}:\n{}", output.status, tail(&String::from_utf8_lossy(&said)));
    }
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(Said { output: text(output.stdout), error: text(output.stderr) })
}

fn collect(command: &mut Command, input: Option<Input<'_>>) -> std::io::Result<Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    match input {
        None => command.stdin(Stdio::null()).output(),
        Some(Input::File(file)) => command.stdin(file).output(),
        Some(Input::Text(text)) => {
            let mut child = command.stdin(Stdio::piped()).spawn()?;
            let stdin = child.stdin.take();
            // A program that ends without reading all of its input says why by its exit status.
            stdin.map(|mut pipe| pipe.write_all(text.as_bytes()));
            child.wait_with_output()
        }
    }
}

fn tail(text: &str) -> &str {
    let text = text.trim_end();
    let from = text.len().saturating_sub(QUOTED_BYTES);
    let from = (from..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    &text[from..]
}

fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
