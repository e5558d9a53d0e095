//! Calls as Python writes them: an answer that is `[name(key=value, …), …]`.

use super::format::Format;
use super::parts::Parts;
use super::python_literal::{extent, parse};
use super::search::{Next, next_char, take_next};
use serde_json::json;

/// Where the reader is.
#[derive(Debug, Default)]
pub enum Pythonic {
    #[default]
    Start,
    /// Before a name; with what stood before it.
    Name(&'static str),
    /// Between arguments; with how many there were.
    Arguments(u32),
    After,
    Text,
    /// A call broke off, and what follows is nobody's.
    Broken,
}

impl Format for Pythonic {
    fn step(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        match self {
            Pythonic::Start => match input.trim_start().chars().next() {
                None => false,
                Some('[') => {
                    take_next(input, "[", ended);
                    self.go(Pythonic::Name("["))
                }
                Some(_) => self.go(Pythonic::Text),
            },
            Pythonic::Name(before) => {
                let before = *before;
                self.name(before, input, ended, out)
            }
            Pythonic::Arguments(count) => {
                let count = *count;
                self.argument(count, input, ended, out)
            }
            Pythonic::After => match next_char(input) {
                None => false,
                Some(',') => {
                    take_next(input, ",", ended);
                    self.go(Pythonic::Name(","))
                }
                Some(_) => {
                    take_next(input, "]", ended);
                    self.go(Pythonic::Text)
                }
            },
            Pythonic::Text => {
                let more = !input.is_empty();
                out.text(&std::mem::take(input));
                more
            }
            Pythonic::Broken => {
                input.clear();
                false
            }
        }
    }
}

impl Pythonic {
    fn go(&mut self, to: Pythonic) -> bool {
        *self = to;
        true
    }

    fn name(&mut self, before: &str, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        let end = input.trim_start().find(|c: char| !c.is_alphanumeric() && !"_-.".contains(c));
        let Some(end) = end.map(|end| end + input.len() - input.trim_start().len()) else {
            return ended && self.no_call(before, out);
        };
        let name = input[..end].trim().to_owned();
        if !input[end..].starts_with('(') || !out.knows(&name) {
            return self.no_call(before, out);
        }
        input.drain(..=end);
        out.call(&name);
        out.arguments("{");
        self.go(Pythonic::Arguments(0))
    }

    /// One argument, or the end of them. What is no literal ends the call, which cannot be taken back.
    fn argument(&mut self, count: u32, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        if take_next(input, ")", true) == Next::Taken {
            out.arguments("}");
            return self.go(Pythonic::After);
        }
        let whole = input.split_once('=').and_then(|(key, value)| Some((key, value, extent(value)?)));
        let Some((key, value, end)) = whole else { return ended && self.break_off(out) };
        let Some(literal) = parse(&value[..end]) else {
            return self.break_off(out);
        };
        let between = if count > 0 { ", " } else { "" };
        out.arguments(&format!("{between}{}: {}", json!(key.trim()), spaced(&literal)));
        let taken = key.len() + 1 + end;
        input.drain(..taken);
        take_next(input, ",", true);
        self.go(Pythonic::Arguments(count + 1))
    }

    /// The call has begun: it ends here.
    fn break_off(&mut self, out: &mut Parts) -> bool {
        out.arguments("}");
        self.go(Pythonic::Broken)
    }

    fn no_call(&mut self, before: &str, out: &mut Parts) -> bool {
        out.text(before);
        self.go(Pythonic::Text)
    }
}

/// JSON with spaces where the other formats' models put them.
fn spaced(value: &serde_json::Value) -> String {
    crate::text::python_json::compact(value)
}
