//! Llama 3: an answer that is `{"name": …, "parameters": {…}}`, or several with `;` between, or begins after
//! `<|python_tag|>`.

use super::call::{JsonCall, Progress};
use super::format::Format;
use super::parts::Parts;
use super::search::{Next, next_char, take_next, take_until};

const TAG: &str = "<|python_tag|>";

/// Where the reader is.
#[derive(Debug, Default)]
pub enum Llama {
    #[default]
    Start,
    Text,
    /// With what stood before the call.
    Call(JsonCall, &'static str),
    After,
}

impl Format for Llama {
    fn step(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        match self {
            Llama::Start => match input.trim_start().chars().next() {
                None => false,
                Some('{') => self.go(Llama::Call(JsonCall::default(), "")),
                Some(_) => self.go(Llama::Text),
            },
            Llama::Text => match take_until(input, TAG) {
                Ok(before) => {
                    out.text(&before);
                    self.go(Llama::Call(JsonCall::default(), TAG))
                }
                Err(text) => {
                    out.text(&text);
                    false
                }
            },
            Llama::Call(call, before) => match call.step(input, ended, out) {
                Progress::More => false,
                Progress::Done => self.go(Llama::After),
                Progress::NoCall(raw) => {
                    out.text(before);
                    *input = raw + input;
                    self.go(Llama::Text)
                }
            },
            Llama::After => match take_next(input, ";", ended) {
                Next::Unknown => false,
                Next::Taken => self.go(Llama::Call(JsonCall::default(), "")),
                Next::Other if next_char(input) == Some('{') => self.go(Llama::Call(JsonCall::default(), "")),
                Next::Other => self.go(Llama::Text),
            },
        }
    }
}

impl Llama {
    fn go(&mut self, to: Llama) -> bool {
        *self = to;
        true
    }
}
