//! DeepSeek: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, each
//! `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` (V3.1), or with `function` before the separator and the
//! name and fenced arguments after it (V3, R1).

use super::call::Arguments;
use super::format::Format;
use super::parts::Parts;
use super::search::{Next, take_next, take_until};

const BEGIN: &str = "<｜tool▁calls▁begin｜>";
const END: &str = "<｜tool▁calls▁end｜>";
const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";

/// Where the reader is.
#[derive(Debug, Default)]
pub enum DeepSeek {
    #[default]
    Text,
    /// Between calls; with whether there was one.
    Between {
        called: bool,
    },
    Head,
    Arguments(Arguments),
    Tail,
}

impl Format for DeepSeek {
    fn step(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        match self {
            DeepSeek::Text => match take_until(input, BEGIN) {
                Ok(before) => {
                    out.text(&before);
                    self.go(DeepSeek::Between { called: false })
                }
                Err(text) => {
                    out.text(&text);
                    false
                }
            },
            DeepSeek::Between { called } => {
                let called = *called;
                let call = take_next(input, CALL_BEGIN, ended);
                if call == Next::Taken {
                    return self.go(DeepSeek::Head);
                }
                match (call, take_next(input, END, ended)) {
                    (_, Next::Taken) => self.go(DeepSeek::Text),
                    (Next::Other, Next::Other) => {
                        if !called {
                            out.text(BEGIN);
                        }
                        self.go(DeepSeek::Text)
                    }
                    _ => false,
                }
            }
            DeepSeek::Head => self.head(input, ended, out),
            DeepSeek::Arguments(arguments) => match arguments.step(input, out) {
                false => false,
                true => self.go(DeepSeek::Tail),
            },
            // The fence's end, and whatever else belongs to no argument.
            DeepSeek::Tail => match take_until(input, CALL_END) {
                Ok(_) => self.go(DeepSeek::Between { called: true }),
                Err(_) => false,
            },
        }
    }
}

impl DeepSeek {
    fn go(&mut self, to: DeepSeek) -> bool {
        *self = to;
        true
    }

    /// Everything before the arguments' brace.
    fn head(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> bool {
        let Some(brace) = input.find('{') else {
            return ended && self.no_call(out);
        };
        let (before, after) = input[..brace].split_once(SEPARATOR).unwrap_or_default();
        let name = match before.trim() {
            "function" => after.split("```").next().unwrap_or_default().trim(),
            name => name,
        };
        if !out.knows(name) {
            return self.no_call(out);
        }
        out.call(name);
        input.drain(..brace);
        self.go(DeepSeek::Arguments(Arguments::default()))
    }

    fn no_call(&mut self, out: &mut Parts) -> bool {
        out.text(CALL_BEGIN);
        self.go(DeepSeek::Text)
    }
}
