//! `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, text around.

use super::call::{JsonCall, Progress};
use super::format::Format;
use super::parts::Parts;
use super::search::{Next, take_next, take_until};

const BEGIN: &str = "<tool_call>";
const END: &str = "</tool_call>";

/// Where the reader is.
#[derive(Debug, Default)]
pub enum Hermes {
    #[default]
    Text,
    Call(JsonCall),
    After,
}

impl Format for Hermes {
    fn step(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        match self {
            Hermes::Text => match take_until(input, BEGIN) {
                Ok(before) => {
                    out.text(&before);
                    *self = Hermes::Call(JsonCall::default());
                    true
                }
                Err(text) => {
                    out.text(&text);
                    false
                }
            },
            Hermes::Call(call) => match call.step(input, ended, out) {
                Progress::More => false,
                Progress::Done => {
                    *self = Hermes::After;
                    true
                }
                Progress::NoCall(raw) => {
                    out.text(BEGIN);
                    *input = raw + input;
                    *self = Hermes::Text;
                    true
                }
            },
            // A model that forgets the end of a call goes on with text or the next one.
            Hermes::After => match take_next(input, END, ended) {
                Next::Unknown => false,
                Next::Taken | Next::Other => {
                    *self = Hermes::Text;
                    true
                }
            },
        }
    }
}
