//! Mistral: `[TOOL_CALLS]` and a list of calls, or, since its eleventh tokenizer, for each call
//! `[TOOL_CALLS]name[ARGS]{…}`, with or without `[ARGS]` and `[CALL_ID]…`.

use super::call::Arguments;
use super::format::Format;
use super::listed::Listed;
use super::parts::Parts;
use super::search::{next_char, take_until};

const BEGIN: &str = "[TOOL_CALLS]";
const ARGUMENTS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

/// Where the reader is.
#[derive(Debug, Default)]
pub enum Mistral {
    #[default]
    Text,
    Head,
    List(Listed),
    Name,
    Arguments(Arguments),
}

impl Format for Mistral {
    fn step(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        match self {
            Mistral::Text => match take_until(input, BEGIN) {
                Ok(before) => {
                    out.text(&before);
                    self.go(Mistral::Head)
                }
                Err(text) => {
                    out.text(&text);
                    false
                }
            },
            Mistral::Head => match next_char(input) {
                None if !ended => false,
                Some('[') => self.go(Mistral::List(Listed::default())),
                _ => self.go(Mistral::Name),
            },
            Mistral::List(list) if list.ended() => {
                if list.is_no_list() {
                    out.text(BEGIN);
                }
                self.go(Mistral::Text)
            }
            Mistral::List(list) => list.step(input, ended, out),
            Mistral::Name => self.name(input, ended, out),
            Mistral::Arguments(arguments) => match arguments.step(input, out) {
                false => false,
                true => self.go(Mistral::Text),
            },
        }
    }
}

impl Mistral {
    fn go(&mut self, to: Mistral) -> bool {
        *self = to;
        true
    }

    /// Everything before the arguments' brace.
    fn name(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        let Some(brace) = input.find('{') else {
            return ended && self.no_call(out);
        };
        let head = input[..brace].replace(ARGUMENTS, "");
        let name = head.split(CALL_ID).next().unwrap_or_default().trim();
        if !out.knows(name) {
            return self.no_call(out);
        }
        out.call(name);
        input.drain(..brace);
        self.go(Mistral::Arguments(Arguments::default()))
    }

    fn no_call(&mut self, out: &mut Parts) -> bool {
        out.text(BEGIN);
        self.go(Mistral::Text)
    }
}
