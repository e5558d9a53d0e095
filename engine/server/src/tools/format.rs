//! The formats in which models write calls, by vLLM's names, and which of them a model uses.

use super::deepseek::DeepSeek;
use super::hermes::Hermes;
use super::llama::Llama;
use super::mistral::Mistral;
use super::parts::Parts;
use super::pythonic::Pythonic;
use std::fmt;

/// Reads one format.
pub trait Format: fmt::Debug + Send {
    /// Takes what it can from `input`, the text that is not understood yet, and puts it into `out`. Whether anything
    /// was taken or understood: then it is to be called again. `ended`: no more text will come.
    fn step(&mut self, input: &mut String, ended: bool, out: &mut Parts) -> bool;
}

/// A format of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen, SmolLM3.
    Hermes,
    /// `{"name": …, "parameters": …}`, after `<|python_tag|>` or not: Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS]` and a list, or names with arguments: Mistral.
    Mistral,
    /// `[name(key=value), …]`: Llama 3.2 and 4, others.
    Pythonic,
    /// `<｜tool▁calls▁begin｜>…`: DeepSeek V3, R1 and V3.1.
    DeepSeek,
}

impl ToolFormat {
    /// What `--tool-call-parser` may name.
    pub const NAMES: &[(&str, ToolFormat)] = &[
        ("hermes", ToolFormat::Hermes),
        ("qwen25", ToolFormat::Hermes),
        ("llama3_json", ToolFormat::Llama3Json),
        ("llama4_json", ToolFormat::Llama3Json),
        ("mistral", ToolFormat::Mistral),
        ("pythonic", ToolFormat::Pythonic),
        ("llama4_pythonic", ToolFormat::Pythonic),
        ("deepseek_v3", ToolFormat::DeepSeek),
        ("deepseek_v31", ToolFormat::DeepSeek),
    ];

    /// The format that a chat template writes earlier calls in; `None` where it does not tell surely.
    pub fn of_template(source: &str) -> Option<ToolFormat> {
        match () {
            // Calls as XML, which is another format between the same tags.
            () if source.contains("<function=") => None,
            () if source.contains("<tool_call>") => Some(ToolFormat::Hermes),
            () if source.contains("[TOOL_CALLS]") => Some(ToolFormat::Mistral),
            () if source.contains("<｜tool▁calls▁begin｜>") => Some(ToolFormat::DeepSeek),
            () if source.contains("<|python_tag|>") => Some(ToolFormat::Llama3Json),
            () => None,
        }
    }

    /// A reader at the beginning of an answer.
    pub fn reader(self) -> Box<dyn Format> {
        match self {
            ToolFormat::Hermes => Box::new(Hermes::default()),
            ToolFormat::Llama3Json => Box::new(Llama::default()),
            ToolFormat::Mistral => Box::new(Mistral::default()),
            ToolFormat::Pythonic => Box::new(Pythonic::default()),
            ToolFormat::DeepSeek => Box::new(DeepSeek::default()),
        }
    }

    /// Words of the format that may be control tokens, which texts leave out otherwise.
    pub fn marks(self) -> &'static [&'static str] {
        match self {
            ToolFormat::Hermes => &["<tool_call>", "</tool_call>"],
            ToolFormat::Llama3Json => &["<|python_tag|>"],
            ToolFormat::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            ToolFormat::Pythonic => &[],
            ToolFormat::DeepSeek => &[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁sep｜>",
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::parts::Part;
    use super::*;
    use crate::tools::{Listed, Named};
    use proptest::prelude::*;

    /// Reads a text cut into `pieces`.
    fn read(mut format: Box<dyn Format>, pieces: &[&str]) -> Vec<Part> {
        let mut out = Parts::new(vec!["f".to_owned(), "get_weather".to_owned()], u32::MAX);
        let (mut input, mut found) = (String::new(), Vec::new());
        for piece in pieces {
            input.push_str(piece);
            while format.step(&mut input, false, &mut out) {}
            found.extend(out.take());
        }
        while format.step(&mut input, true, &mut out) {}
        out.text(&input);
        out.end();
        found.extend(out.take());
        joined(found)
    }

    /// Neighbours of the same kind as one.
    fn joined(parts: Vec<Part>) -> Vec<Part> {
        let mut joined: Vec<Part> = Vec::new();
        for part in parts {
            match (joined.last_mut(), part) {
                (Some(Part::Text(last)), Part::Text(more)) => last.push_str(&more),
                (Some(Part::Arguments(last)), Part::Arguments(more)) => last.push_str(&more),
                (_, part) => joined.push(part),
            }
        }
        joined
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    fn call(name: &str, arguments: &str) -> [Part; 2] {
        [Part::Call(name.to_owned()), Part::Arguments(arguments.to_owned())]
    }

    /// What models write, and what it says.
    fn cases() -> Vec<(ToolFormat, &'static str, Vec<Part>)> {
        use ToolFormat::*;
        let paris = call("get_weather", r#"{"city": "Paris"}"#);
        let empty = call("f", "{}");
        let both = [call("get_weather", r#"{"city": "Paris"}"#), call("f", r#"{"a": [1, {"b": "}"}]}"#)].concat();
        vec![
            (Hermes, "Hello <b> there. ", vec![text("Hello <b> there. ")]),
            (
                Hermes,
                "I look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>",
                [vec![text("I look.")], paris.to_vec()].concat(),
            ),
            (
                Hermes,
                "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>\n\
                 <tool_call>{\"arguments\": {\"a\": [1, {\"b\": \"}\"}]}, \"name\": \"f\"}</tool_call>\n",
                both.clone(),
            ),
            (Hermes, "<tool_call>{\"name\": \"f\"}</tool_call>", empty.to_vec()),
            (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}</tool_call>", empty.to_vec()),
            (
                Hermes,
                "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call> x",
                vec![text("<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call> x")],
            ),
            (Hermes, "<tool_call>none</tool_call>", vec![text("<tool_call>none</tool_call>")]),
            (Hermes, "a <tool_c", vec![text("a <tool_c")]),
            (Hermes, "<tool_call>{\"name\": \"f\", \"argum", vec![text("<tool_call>{\"name\": \"f\", \"argum")]),
            (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b", call("f", "{\"a\": \"b").to_vec()),
            (Llama3Json, "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}", paris.to_vec()),
            (
                Llama3Json,
                "<|python_tag|>{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}; \
                 {\"name\": \"f\", \"parameters\": {\"a\": [1, {\"b\": \"}\"}]}}",
                both.clone(),
            ),
            (Llama3Json, "{\"a\": 1}", vec![text("{\"a\": 1}")]),
            (Llama3Json, "It is {\"name\": \"f\"}", vec![text("It is {\"name\": \"f\"}")]),
            (Llama3Json, "<|python_tag|>print(1)", vec![text("<|python_tag|>print(1)")]),
            (
                Mistral,
                "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}]",
                paris.to_vec(),
            ),
            (
                Mistral,
                "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}, \
                 {\"name\": \"f\", \"arguments\": {\"a\": [1, {\"b\": \"}\"}]}}]",
                both.clone(),
            ),
            (
                Mistral,
                "[TOOL_CALLS]get_weather{\"city\": \"Paris\"}[TOOL_CALLS]f[ARGS]{\"a\": [1, {\"b\": \"}\"}]}",
                both.clone(),
            ),
            (Mistral, "[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{\"city\": \"Paris\"}", paris.to_vec()),
            (Mistral, "[TOOL_CALLS]rm{\"a\": 1}", vec![text("[TOOL_CALLS]rm{\"a\": 1}")]),
            (Mistral, "[TOOL_CALLS][1, 2]", vec![text("[TOOL_CALLS][1, 2]")]),
            (Mistral, "[TOOL", vec![text("[TOOL")]),
            (Pythonic, "[get_weather(city='Paris')]", paris.to_vec()),
            (Pythonic, " [get_weather(city=\"Paris\"), f(a=[1, {'b': '}'}])]", both.clone()),
            (Pythonic, "[f()]", empty.to_vec()),
            (
                Pythonic,
                "[f(a=True, b=None, c=-1.5, d='it\\'s \\\"x\\\"', e=(1, 2,))]",
                call("f", r#"{"a": true, "b": null, "c": -1.5, "d": "it's \"x\"", "e": [1, 2]}"#).to_vec(),
            ),
            (Pythonic, "[1, 2]", vec![text("[1, 2]")]),
            (Pythonic, "[rm(a=1)]", vec![text("[rm(a=1)]")]),
            (Pythonic, "See [f(a=1)]", vec![text("See [f(a=1)]")]),
            (
                DeepSeek,
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Paris\"}\n\
                 ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                paris.to_vec(),
            ),
            (
                DeepSeek,
                "Yes.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜>\
                 <｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": [1, {\"b\": \"}\"}]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                [vec![text("Yes.")], both].concat(),
            ),
            (DeepSeek, "<｜tool▁calls▁begin｜>what", vec![text("<｜tool▁calls▁begin｜>what")]),
        ]
    }

    #[test]
    fn every_format_is_read_whole_and_letter_by_letter() {
        for (format, answer, expected) in cases() {
            assert_eq!(read(format.reader(), &[answer]), expected, "{format:?} {answer:?}");
            let letters: Vec<String> = answer.chars().map(String::from).collect();
            let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
            assert_eq!(read(format.reader(), &letters), expected, "{format:?} {answer:?} by letters");
        }
    }

    #[test]
    fn what_is_forced_is_read() {
        let two = r#"[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "f", "parameters": {}}]"#;
        let expected = [call("get_weather", r#"{"city": "Paris"}"#), call("f", "{}")].concat();
        assert_eq!(read(Box::new(Listed::default()), &[two]), expected);
        assert_eq!(read(Box::new(Named::new("f")), &["{\"a\"", ": 1}"]), call("f", r#"{"a": 1}"#));
    }

    #[test]
    fn calls_beyond_the_first_are_dropped_where_one_is_wanted() {
        let mut out = Parts::new(vec!["f".to_owned()], 1);
        let mut input = "<tool_call>{\"name\": \"f\"}</tool_call>".repeat(3);
        let mut format = ToolFormat::Hermes.reader();
        while format.step(&mut input, true, &mut out) {}
        assert_eq!(out.take(), call("f", "{}"));
    }

    #[test]
    fn templates_tell_their_format_or_nothing() {
        for (source, expected) in [
            ("{{ '<tool_call>' }}", Some(ToolFormat::Hermes)),
            ("<tool_call>\n<function={{ name }}>", None),
            ("{{ '[TOOL_CALLS]' }}", Some(ToolFormat::Mistral)),
            ("<｜tool▁calls▁begin｜>", Some(ToolFormat::DeepSeek)),
            ("<|python_tag|>", Some(ToolFormat::Llama3Json)),
            ("{{ messages }}", None),
        ] {
            assert_eq!(ToolFormat::of_template(source), expected, "{source}");
        }
    }

    proptest! {
        /// However an answer is cut, and whatever it is, it is read the same and ends.
        #[test]
        fn cuts_change_nothing(
            words in proptest::collection::vec(prop_oneof![
                Just("<tool_call>"), Just("</tool_call>"), Just("{\"name\": \"f\""), Just(", \"arguments\": "), Just("{"),
                Just("}"), Just("["), Just("]"), Just("[TOOL_CALLS]"), Just("f"), Just("(a="), Just(")"), Just("'x'"),
                Just("<｜tool▁calls▁begin｜>"), Just("<｜tool▁call▁begin｜>"), Just("<｜tool▁sep｜>"), Just(" "), Just("é"),
                Just("<|python_tag|>"), Just("\""), Just("\\"), Just(","), Just(";"), Just("12"),
            ], 0..14),
            cut in 1usize..7,
        ) {
            let answer: String = words.concat();
            let letters: Vec<char> = answer.chars().collect();
            let pieces: Vec<String> = letters.chunks(cut).map(|piece| piece.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            for (_, format) in ToolFormat::NAMES {
                prop_assert_eq!(read(format.reader(), &pieces), read(format.reader(), &[&answer]), "{:?}", format);
            }
        }
    }
}
