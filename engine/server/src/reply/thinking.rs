//! Thoughts between two words, before the answer.

use crate::tools::{Parts, next_word};

/// How a model writes what it thinks before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThoughtFormat {
    /// What thoughts begin with.
    pub begin: &'static str,
    /// What they end with.
    pub end: &'static str,
    /// Answers begin inside a thought, whether the prompt says so or not.
    pub always: bool,
}

impl ThoughtFormat {
    const TAGS: ThoughtFormat = ThoughtFormat { begin: "<think>", end: "</think>", always: false };

    /// What `--reasoning-parser` may name.
    pub const NAMES: &[(&str, ThoughtFormat)] = &[
        ("qwen3", ThoughtFormat::TAGS),
        ("deepseek_r1", ThoughtFormat { always: true, ..ThoughtFormat::TAGS }),
        ("deepseek_v3", ThoughtFormat::TAGS),
        ("glm45", ThoughtFormat::TAGS),
        ("mistral", ThoughtFormat { begin: "[THINK]", end: "[/THINK]", always: false }),
    ];

    /// Whether an answer to `prompt` begins inside a thought.
    pub fn open_after(&self, prompt: &str) -> bool {
        let open = prompt.trim_end().ends_with(self.begin);
        let closed = prompt.trim_end().ends_with(self.end);
        open || (self.always && !closed)
    }
}

/// Finds the thoughts of one answer.
#[derive(Debug)]
pub struct Thinking {
    format: ThoughtFormat,
    place: Place,
    input: String,
    /// White space that is a thought's if more of it follows.
    blank: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nothing was written yet.
    Before,
    /// In a thought; `true` once anything was thought.
    Inside(bool),
    /// After one, before the answer.
    Between,
    Answer,
}

impl Thinking {
    /// At the beginning of an answer, inside a thought or not.
    pub fn new(format: ThoughtFormat, inside: bool) -> Thinking {
        let place = if inside { Place::Inside(false) } else { Place::Before };
        Thinking { format, place, input: String::new(), blank: String::new() }
    }

    /// Takes the next text and tells `out` what is thought; gives the text of the answer.
    pub fn read(&mut self, text: &str, ended: bool, out: &mut Parts) -> String {
        if self.place == Place::Answer {
            return text.to_owned();
        }
        self.input.push_str(text);
        while self.step(ended, out) {}
        match self.place {
            Place::Answer => std::mem::take(&mut self.input),
            _ => String::new(),
        }
    }

    /// Whether there may be more to do.
    fn step(&mut self, ended: bool, out: &mut Parts) -> bool {
        let ThoughtFormat { begin, end, .. } = self.format;
        match self.place {
            Place::Before | Place::Inside(false) if next_word(&self.input, begin) == Some(true) => {
                let taken = self.input.len() - self.input.trim_start().len() + begin.len();
                self.input.drain(..taken);
                self.go(Place::Inside(true))
            }
            Place::Before | Place::Inside(false) if next_word(&self.input, begin).is_none() && !ended => false,
            Place::Before => self.go(Place::Answer),
            Place::Inside(false) => self.go(Place::Inside(true)),
            Place::Inside(true) => match crate::tools::take_until(&mut self.input, end) {
                Ok(thought) => {
                    self.think(&thought, out);
                    self.go(Place::Between)
                }
                Err(thought) => {
                    self.think(&thought, out);
                    if ended {
                        let rest = std::mem::take(&mut self.input);
                        self.think(&rest, out);
                    }
                    false
                }
            },
            Place::Between if self.input.trim_start().is_empty() => {
                self.input.clear();
                false
            }
            Place::Between => {
                self.input = self.input.trim_start().to_owned();
                self.go(Place::Answer)
            }
            Place::Answer => false,
        }
    }

    fn go(&mut self, to: Place) -> bool {
        self.place = to;
        to != Place::Answer
    }

    /// Passes a thought on, without the white space around it.
    fn think(&mut self, text: &str, out: &mut Parts) {
        let shown = text.trim_end().len();
        if shown > 0 {
            let before = std::mem::take(&mut self.blank);
            let text = if out.thought() { before + &text[..shown] } else { text[..shown].trim_start().to_owned() };
            out.reasoning(&text);
        }
        self.blank.push_str(&text[shown..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::Reply;
    use crate::tools::{Part, ToolFormat};
    use proptest::prelude::*;

    const TAGS: ThoughtFormat = ThoughtFormat::TAGS;

    /// Thoughts and text of an answer cut into pieces.
    fn read(inside: bool, pieces: &[&str]) -> (String, String) {
        let mut reply = Reply::new(Some(Thinking::new(TAGS, inside)), None, Parts::new(Vec::new(), 0));
        let mut parts: Vec<Part> = pieces.iter().flat_map(|piece| reply.push(piece)).collect();
        parts.extend(reply.finish());
        parts.into_iter().fold(Default::default(), |(mut thought, mut said), part| {
            match part {
                Part::Reasoning(more) => thought += &more,
                Part::Text(more) => said += &more,
                other => panic!("{other:?}"),
            }
            (thought, said)
        })
    }

    #[test]
    fn thoughts_are_apart_from_answers() {
        for (inside, answer, thought, said) in [
            (false, "<think>\nLet me see. Yes.\n</think>\n\nIt is.\n", "Let me see. Yes.", "It is.\n"),
            (true, "Let me see.\n</think>It is.", "Let me see.", "It is."),
            (true, "<think>Let me see.</think>It is.", "Let me see.", "It is."),
            (false, " It is <think>no</think>.", "", " It is <think>no</think>."),
            (false, "<think>\n\n</think>\n\nIt is.", "", "It is."),
            (true, "no end </thi", "no end </thi", ""),
            (false, "<thi", "", "<thi"),
        ] {
            assert_eq!(read(inside, &[answer]), (thought.to_owned(), said.to_owned()), "{answer:?}");
        }
    }

    #[test]
    fn calls_follow_thoughts() {
        let format = Some(ToolFormat::Hermes.reader());
        let parts = Parts::new(vec!["f".to_owned()], 1);
        let mut reply = Reply::new(Some(Thinking::new(TAGS, false)), format, parts);
        let mut found =
            reply.push("<think>I call <tool_call>.</think>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}");
        found.extend(reply.finish());
        let expected = [
            Part::Reasoning("I call <tool_call>.".to_owned()),
            Part::Call("f".to_owned()),
            Part::Arguments("{}".to_owned()),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_prompt_may_end_inside_a_thought_or_after_one() {
        let r1 = ThoughtFormat { always: true, ..TAGS };
        for (format, prompt, open) in [
            (TAGS, "user\nassistant\n<think>\n", true),
            (TAGS, "user\nassistant\n", false),
            (TAGS, "assistant\n<think>\n\n</think>\n\n", false),
            (r1, "assistant", true),
            (r1, "assistant<think></think>", false),
        ] {
            assert_eq!(format.open_after(prompt), open, "{prompt:?}");
        }
    }

    proptest! {
        #[test]
        fn cuts_change_nothing(
            words in proptest::collection::vec(prop_oneof![
                Just("<think>"), Just("</think>"), Just(" "), Just("\n"), Just("a"), Just("<"), Just("</"), Just("é"),
            ], 0..12),
            cut in 1usize..5,
            inside: bool,
        ) {
            let answer = words.concat();
            let letters: Vec<char> = answer.chars().collect();
            let pieces: Vec<String> = letters.chunks(cut).map(|piece| piece.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(read(inside, &pieces), read(inside, &[&answer]));
        }
    }
}
