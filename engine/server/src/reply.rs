//! One answer taken apart while it is written: what was thought first, what is called, what is said.

mod thinking;

use crate::tools::{Format, Part, Parts};
pub use thinking::{Thinking, ThoughtFormat};

/// An answer being taken apart.
#[derive(Debug)]
pub struct Reply {
    thinking: Option<Thinking>,
    format: Option<Box<dyn Format>>,
    /// Text that is not understood yet.
    input: String,
    parts: Parts,
}

impl Reply {
    /// Nothing was written yet.
    pub fn new(thinking: Option<Thinking>, format: Option<Box<dyn Format>>, parts: Parts) -> Reply {
        Reply { thinking, format, input: String::new(), parts }
    }

    /// Takes the next text; what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.read(text, false);
        self.parts.take()
    }

    /// The answer is over; what is left of it.
    pub fn finish(&mut self) -> Vec<Part> {
        self.read("", true);
        self.parts.text(&std::mem::take(&mut self.input));
        self.parts.end();
        self.parts.take()
    }

    /// Whether anything was called.
    pub fn called(&self) -> bool {
        self.parts.called()
    }

    fn read(&mut self, text: &str, ended: bool) {
        match &mut self.thinking {
            Some(thinking) => self.input.push_str(&thinking.read(text, ended, &mut self.parts)),
            None => self.input.push_str(text),
        }
        match &mut self.format {
            Some(format) => while format.step(&mut self.input, ended, &mut self.parts) {},
            None => self.parts.text(&std::mem::take(&mut self.input)),
        }
    }
}
