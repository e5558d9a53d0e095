//! A list of calls, `[{"name": …, "parameters": {…}}, …]`: what an answer is held to where calls are required, whatever
//! the model's own format.

use super::call::{JsonCall, Progress};
use super::format::Format;
use super::parts::Parts;
use super::search::{Next, take_next};

/// Where the reader is.
#[derive(Debug, Default)]
pub enum Listed {
    #[default]
    /// Before the list.
    Start,
    /// In a call, with what stood before it.
    Call(JsonCall, &'static str),
    /// After one.
    After,
    /// After the list.
    End,
    /// There is none.
    NoList,
}

impl Format for Listed {
    fn step(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        match self {
            Listed::Start => match take_next(input, "[", ended) {
                Next::Unknown => false,
                Next::Taken => self.go(Listed::Call(JsonCall::default(), "[")),
                Next::Other => self.go(Listed::NoList),
            },
            Listed::Call(call, before) => match call.step(input, ended, out) {
                Progress::More => false,
                Progress::Done => self.go(Listed::After),
                Progress::NoCall(raw) => {
                    *input = format!("{before}{raw}{input}");
                    let first = *before == "[";
                    self.go(if first { Listed::NoList } else { Listed::End })
                }
            },
            Listed::After => match (take_next(input, ",", ended), ended) {
                (Next::Unknown, _) => false,
                (Next::Taken, _) => self.go(Listed::Call(JsonCall::default(), ",")),
                (Next::Other, _) => {
                    take_next(input, "]", ended);
                    self.go(Listed::End)
                }
            },
            Listed::End | Listed::NoList => {
                let more = !input.is_empty();
                out.text(&std::mem::take(input));
                more
            }
        }
    }
}

impl Listed {
    fn go(&mut self, to: Listed) -> bool {
        *self = to;
        true
    }

    /// Whether the list is over.
    pub(super) fn ended(&self) -> bool {
        matches!(self, Listed::End | Listed::NoList)
    }

    /// Whether there was none.
    pub(super) fn is_no_list(&self) -> bool {
        matches!(self, Listed::NoList)
    }
}
