//! What an answer is made of, in the order in which it comes.

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// What is thought before the answer.
    Reasoning(String),
    /// Text to be read.
    Text(String),
    /// A call of this function begins; its arguments follow.
    Call(String),
    /// More of the last call's arguments, as JSON text.
    Arguments(String),
}

/// Parts being collected.
///
/// White space around calls separates them and says nothing, so it is held back until text follows it.
#[derive(Debug)]
pub struct Parts {
    found: Vec<Part>,
    /// Functions that may be called.
    names: Vec<String>,
    /// White space that is shown if text follows.
    blank: String,
    most_calls: u32,
    calls: u32,
    thought: bool,
}

impl Parts {
    /// None yet. Calls of other functions than `names` are none; calls after `most_calls` are dropped.
    pub fn new(names: Vec<String>, most_calls: u32) -> Parts {
        Parts { found: Vec::new(), names, blank: String::new(), most_calls, calls: 0, thought: false }
    }

    /// Text to be read.
    pub fn text(&mut self, text: &str) {
        let shown = text.trim_end().len();
        if shown > 0 {
            let more = std::mem::take(&mut self.blank) + &text[..shown];
            match self.found.last_mut() {
                Some(Part::Text(last)) => last.push_str(&more),
                _ => self.found.push(Part::Text(more)),
            }
        }
        self.blank.push_str(&text[shown..]);
    }

    /// Whether this function may be called.
    pub fn knows(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    /// A call begins.
    pub fn call(&mut self, name: &str) {
        self.blank.clear();
        self.calls += 1;
        if self.calls <= self.most_calls {
            self.found.push(Part::Call(name.to_owned()));
        }
    }

    /// More of the last call's arguments.
    pub fn arguments(&mut self, json: &str) {
        if self.calls > self.most_calls || json.is_empty() {
            return;
        }
        match self.found.last_mut() {
            Some(Part::Arguments(last)) => last.push_str(json),
            _ => self.found.push(Part::Arguments(json.to_owned())),
        }
    }

    /// What was thought, which comes before everything else.
    pub fn reasoning(&mut self, text: &str) {
        self.thought |= !text.is_empty();
        match self.found.last_mut() {
            _ if text.is_empty() => (),
            Some(Part::Reasoning(last)) => last.push_str(text),
            _ => self.found.push(Part::Reasoning(text.to_owned())),
        }
    }

    /// Whether anything was thought.
    pub fn thought(&self) -> bool {
        self.thought
    }

    /// Whether anything was called.
    pub fn called(&self) -> bool {
        self.calls > 0
    }

    /// The answer is over: white space at its end belongs to it, unless it follows a call.
    pub fn end(&mut self) {
        let blank = std::mem::take(&mut self.blank);
        if !self.called() && !blank.is_empty() {
            match self.found.last_mut() {
                Some(Part::Text(last)) => last.push_str(&blank),
                _ => self.found.push(Part::Text(blank)),
            }
        }
    }

    /// What was found since the last time.
    pub fn take(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.found)
    }
}
