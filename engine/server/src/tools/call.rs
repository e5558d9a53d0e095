//! A call written as a JSON object, `{"name": …, "arguments": {…}}`, read while it is written.
//!
//! Arguments are passed on as the model writes them; nothing is kept but keys and the name, and depth is a number, so
//! that no nesting costs more than its bytes.

use super::parts::Parts;
use super::search::next_char;

/// How far a reader came.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// It needs more text.
    More,
    /// The call is complete.
    Done,
    /// It is no call; this is what it was made of.
    NoCall(String),
}

/// Where a JSON value ends.
#[derive(Debug, Default)]
pub struct Extent {
    depth: u32,
    in_string: bool,
    escaped: bool,
    scalar: bool,
}

/// Reads one call.
#[derive(Debug)]
pub struct JsonCall {
    place: Place,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    begun: bool,
    /// Everything since the beginning, as long as it may turn out to be no call.
    raw: String,
}

#[derive(Debug)]
enum Place {
    Open,
    Key,
    Colon(String),
    Value(String),
    Name,
    Arguments(Extent),
    Encoded,
    Other(Extent),
    AfterValue,
}

/// The arguments alone, an object.
#[derive(Debug, Default)]
pub struct Arguments(Extent);

impl Extent {
    /// Bytes of `text` that belong to the value, and whether it ends there.
    pub fn advance(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => {
                    self.in_string = !self.in_string;
                    if !self.in_string && self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                _ if self.in_string => (),
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' | b',' if self.depth == 0 => return (at, true),
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                _ if byte.is_ascii_whitespace() && self.scalar && self.depth == 0 => return (at, true),
                _ => self.scalar |= self.depth == 0,
            }
        }
        (text.len(), false)
    }
}

impl Arguments {
    /// Passes on what belongs to them; whether they are complete.
    pub fn step(&mut self, input: &mut String, out: &mut Parts) -> bool {
        let (bytes, done) = self.0.advance(input);
        out.arguments(&input[..bytes]);
        input.drain(..bytes);
        done
    }
}

impl Default for JsonCall {
    fn default() -> JsonCall {
        JsonCall { place: Place::Open, name: None, early: None, begun: false, raw: String::new() }
    }
}

impl JsonCall {
    /// Reads on; `ended` where no more text will come.
    pub fn step(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> Progress {
        loop {
            match self.advance(input, out) {
                Some(Progress::More) if ended => return self.broken(input),
                Some(progress) => return progress,
                None => (),
            }
        }
    }

    /// One token of JSON, or a piece of a value. `None`: there may be more to do.
    fn advance(&mut self, input: &mut String, out: &mut Parts) -> Option<Progress> {
        if !matches!(self.place, Place::Arguments(_) | Place::Other(_)) && self.skip_blank(input).is_none() {
            return Some(Progress::More);
        }
        match &mut self.place {
            Place::Open => self.expect(input, '{', Place::Key),
            Place::Key if input.starts_with('}') => self.close(input, out),
            Place::Key => match take_string(input) {
                Taken::Whole(key, bytes) => {
                    self.take(input, bytes);
                    self.place = Place::Colon(key);
                    None
                }
                Taken::Partly => Some(Progress::More),
                Taken::No => Some(self.broken(input)),
            },
            Place::Colon(key) => {
                let key = std::mem::take(key);
                self.expect(input, ':', Place::Value(key))
            }
            Place::Value(key) => {
                self.place = match key.as_str() {
                    "name" => Place::Name,
                    "arguments" | "parameters" if input.starts_with('"') => Place::Encoded,
                    "arguments" | "parameters" => Place::Arguments(Extent::default()),
                    _ => Place::Other(Extent::default()),
                };
                None
            }
            Place::Name => match take_string(input) {
                Taken::Whole(name, bytes) => {
                    self.take(input, bytes);
                    self.named(name, input, out)
                }
                Taken::Partly => Some(Progress::More),
                Taken::No => Some(self.broken(input)),
            },
            Place::Encoded => match take_string(input) {
                Taken::Whole(json, bytes) => {
                    self.take(input, bytes);
                    self.arguments(&json, out);
                    self.place = Place::AfterValue;
                    None
                }
                Taken::Partly => Some(Progress::More),
                Taken::No => Some(self.broken(input)),
            },
            Place::Arguments(extent) => {
                let (bytes, done) = extent.advance(input);
                let json = self.take(input, bytes);
                self.arguments(&json, out);
                self.after(done)
            }
            Place::Other(extent) => {
                let (bytes, done) = extent.advance(input);
                self.take(input, bytes);
                self.after(done)
            }
            Place::AfterValue if input.starts_with('}') => self.close(input, out),
            Place::AfterValue => self.expect(input, ',', Place::Key),
        }
    }

    fn after(&mut self, done: bool) -> Option<Progress> {
        if done {
            self.place = Place::AfterValue;
            return None;
        }
        Some(Progress::More)
    }

    fn named(&mut self, name: String, input: &mut String, out: &mut Parts) -> Option<Progress> {
        if !out.knows(&name) {
            return Some(self.broken(input));
        }
        self.place = Place::AfterValue;
        self.name = Some(name);
        if let Some(early) = self.early.take() {
            self.arguments(&early, out);
        }
        None
    }

    /// Arguments wait for the name, and the call begins with the first of them.
    fn arguments(&mut self, json: &str, out: &mut Parts) {
        match &self.name {
            None => self.early.get_or_insert_default().push_str(json),
            Some(name) => {
                if !self.begun {
                    self.begun = true;
                    self.raw.clear();
                    out.call(name);
                }
                out.arguments(json);
            }
        }
    }

    fn close(&mut self, input: &mut String, out: &mut Parts) -> Option<Progress> {
        if self.name.is_none() {
            return Some(self.broken(input));
        }
        self.take(input, 1);
        if !self.begun {
            self.arguments("{}", out);
        }
        Some(Progress::Done)
    }

    fn expect(&mut self, input: &mut String, wanted: char, then: Place) -> Option<Progress> {
        if input.starts_with(wanted) {
            self.take(input, 1);
            self.place = then;
            return None;
        }
        Some(self.broken(input))
    }

    fn skip_blank(&mut self, input: &mut String) -> Option<char> {
        let blank = input.len() - input.trim_start().len();
        self.take(input, blank);
        next_char(input)
    }

    fn take(&mut self, input: &mut String, bytes: usize) -> String {
        let taken: String = input.drain(..bytes).collect();
        if !self.begun {
            self.raw.push_str(&taken);
        }
        taken
    }

    /// A call that has begun cannot be taken back: it ends where it breaks.
    fn broken(&mut self, input: &mut String) -> Progress {
        if self.begun {
            return Progress::Done;
        }
        self.raw.push_str(&std::mem::take(input));
        Progress::NoCall(std::mem::take(&mut self.raw))
    }
}

enum Taken {
    /// The string, and the bytes that it is written with.
    Whole(String, usize),
    Partly,
    No,
}

/// A JSON string at the beginning of `input`, which it leaves there.
fn take_string(input: &str) -> Taken {
    if !input.starts_with('"') {
        return Taken::No;
    }
    match Extent::default().advance(input) {
        (bytes, true) => match serde_json::from_str(&input[..bytes]) {
            Ok(text) => Taken::Whole(text, bytes),
            Err(_) => Taken::No,
        },
        (_, false) => Taken::Partly,
    }
}
