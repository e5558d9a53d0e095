//! What clients write and are answered, in the log: only where the flags ask for it, and no more of it than they allow.

use tracing::info;

/// Which texts are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextLog {
    /// Prompts, as the model gets them.
    pub prompts: bool,
    /// Answers, as the client gets them.
    pub answers: bool,
    /// Of each at most so many characters.
    pub most_chars: usize,
}

/// An answer's text while it is written.
#[derive(Debug)]
pub struct Written {
    text: String,
    room_chars: usize,
}

impl TextLog {
    /// A line with the prompt of `request`.
    pub fn prompt(self, request: &str, text: impl FnOnce() -> String) {
        if self.prompts {
            let (text, most) = (text(), self.most_chars);
            info!(request, text = &text[..end_of(&text, most)], "prompt");
        }
    }

    /// What an answer is written into, if anything.
    pub fn answer(self) -> Option<Written> {
        self.answers.then(|| Written { text: String::new(), room_chars: self.most_chars })
    }
}

impl Written {
    /// Takes more of the answer, as far as there is room.
    pub fn push(&mut self, more: &str) {
        let more = &more[..end_of(more, self.room_chars)];
        self.room_chars -= more.chars().count();
        self.text.push_str(more);
    }

    /// All that was taken.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Where the first `most_chars` characters end.
fn end_of(text: &str, most_chars: usize) -> usize {
    text.char_indices().nth(most_chars).map_or(text.len(), |(end, _)| end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let log = TextLog { answers: true, most_chars: 5, ..TextLog::default() };
        let mut written = log.answer().unwrap();
        ["né", "", "e und", "x"].iter().for_each(|more| written.push(more));
        assert_eq!(written.text(), "née u");
        assert!(TextLog::default().answer().is_none());
        TextLog::default().prompt("r", || unreachable!("nobody asked for prompts"));
    }
}
