//! The arguments of a function that the client named: all of the answer.

use super::format::Format;
use super::parts::Parts;

/// A call of this function.
#[derive(Debug)]
pub struct Named {
    name: String,
    begun: bool,
}

impl Named {
    /// Nothing was written yet.
    pub fn new(name: &str) -> Named {
        Named { name: name.to_owned(), begun: false }
    }
}

impl Format for Named {
    fn step(&mut self, input: &mut String, _ended: bool, out: &mut Parts) -> bool {
        if input.is_empty() {
            return false;
        }
        if !std::mem::replace(&mut self.begun, true) {
            out.call(&self.name);
        }
        out.arguments(&std::mem::take(input));
        true
    }
}
