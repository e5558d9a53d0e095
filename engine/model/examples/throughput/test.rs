//! What is measured: a prefill, or a decode of some sequences at some context.

use std::str::FromStr;

/// One measurement, written `pp512` (prefill of 512 tokens) or `tg64x16@128` (64 tokens of each of 16 sequences, each
/// after 128 tokens of its own; `x1` and `@0` may be left out).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Test {
    pub name: String,
    pub sequences: usize,
    /// Tokens of each sequence that are there before the clock starts.
    pub depth: usize,
    /// Tokens of each sequence that are timed.
    pub tokens: usize,
    /// Whether the timed tokens are known from the start and go through in one step.
    pub prefill: bool,
}

impl Test {
    /// Positions of a sequence.
    pub fn positions(&self) -> usize {
        self.depth + self.tokens
    }
}

impl FromStr for Test {
    type Err = String;

    fn from_str(name: &str) -> Result<Test, String> {
        parse(name).ok_or_else(|| format!("{name:?} is no test; they look like pp512, tg128 or tg64x16@128"))
    }
}

fn parse(name: &str) -> Option<Test> {
    let (rest, depth) = split(name, '@', 0)?;
    let (rest, sequences) = split(rest, 'x', 1)?;
    let (prefill, tokens) = match rest.strip_prefix("pp") {
        Some(tokens) => (true, tokens),
        None => (false, rest.strip_prefix("tg")?),
    };
    let tokens = tokens.parse().ok().filter(|&tokens| tokens > 0)?;
    (sequences > 0).then(|| Test { name: name.to_owned(), sequences, depth, tokens, prefill })
}

/// What stands before `mark`, and the number after it.
fn split(name: &str, mark: char, absent: usize) -> Option<(&str, usize)> {
    match name.split_once(mark) {
        Some((rest, number)) => Some((rest, number.parse().ok()?)),
        None => Some((name, absent)),
    }
}
