//! The form of an answer that may call, where tools are strict: text is free, and a call keeps its tool's schema.
//!
//! What begins a call in a model's format may be a control token or a text. After a control token free text has ended by
//! itself; before a text it ends with the first that is written.

use super::format::ToolFormat;
use super::grammar::schema;
use crate::structure::with_whitespace;
use crate::text::vocabulary::Vocabulary;
use serde_json::{Value, json};
use windlass_engine_api::error::FieldError;
use windlass_engine_api::structure::{Form, Structure};
use windlass_engine_api::tools::{Tool, Tools};

/// What the answer is held to, if one of the tools that it may call is strict.
pub fn strict(
    tools: &Tools,
    format: ToolFormat,
    template: &str,
    vocabulary: &Vocabulary,
) -> Result<Option<Structure>, FieldError> {
    if !tools.offered.iter().any(|tool| tool.strict) {
        return Ok(None);
    }
    let writer = Writer { tools, vocabulary };
    let form = match format {
        ToolFormat::Hermes => writer.hermes(),
        ToolFormat::Llama3Json => writer.llama(),
        ToolFormat::Mistral => writer.mistral(),
        ToolFormat::DeepSeek => writer.deepseek(template),
        ToolFormat::Pythonic => return Err(not_json()),
    };
    Ok(Some(Structure { field: "tools", form: Form::Grammar(form + &writer.arguments()) }))
}

fn not_json() -> FieldError {
    let message = "`strict` tools cannot be left to this model, which writes calls in Python: send `tool_choice` as \
                   required or with a name, or leave `strict` out";
    FieldError::invalid("tools", message)
}

/// Writes grammars as `llguidance` reads them.
struct Writer<'a> {
    tools: &'a Tools,
    vocabulary: &'a Vocabulary,
}

impl Writer<'_> {
    fn hermes(&self) -> String {
        let call = format!("WHITE? call WHITE? {}", self.mark("</tool_call>"));
        self.around("<tool_call>", &call) + &self.objects("arguments")
    }

    /// An answer that begins with a brace is calls. Later ones need the tag.
    fn llama(&self) -> String {
        let tag = self.mark("<|python_tag|>");
        let more = if self.tools.parallel { "(\";\" WHITE? call)*" } else { "" };
        format!(
            "start: WHITE? calls | TEXT? ({tag} WHITE? calls)?\ncalls: call {more}\n\
             TEXT: /\\s*[^{{\\s](?s:.*)/ & ~(ANY \"<|python_tag|>\" ANY)\nANY: /(?s:.*)/\n"
        ) + &self.objects("parameters")
    }

    /// Vocabularies with a mark before arguments write a call after each beginning; older ones write a list.
    fn mistral(&self) -> String {
        match self.vocabulary.find("[ARGS]") {
            Some(_) => self.around("[TOOL_CALLS]", "call") + &self.calls("", &self.mark("[ARGS]"), ""),
            None => {
                let more = if self.tools.parallel { "(\", \" call)*" } else { "" };
                self.around("[TOOL_CALLS]", &format!("WHITE? \"[\" call {more} \"]\"")) + &self.objects("arguments")
            }
        }
    }

    /// Templates of V3 and R1 write arguments between fences.
    fn deepseek(&self, template: &str) -> String {
        let [begin, end, separator] =
            ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"].map(|mark| self.mark(mark));
        let more = if self.tools.parallel { "(WHITE? call)*" } else { "" };
        let then = format!("call {more} WHITE? {}", self.mark("<｜tool▁calls▁end｜>"));
        let calls = match template.contains("```json") {
            true => self.calls(
                &format!("{begin} \"function\" {separator}"),
                r#""\n```json\n""#,
                &format!(r#""\n```" {end}"#),
            ),
            false => self.calls(&begin, &separator, &end),
        };
        self.around("<｜tool▁calls▁begin｜>", &then) + &calls
    }

    /// Free text, and `then` after each `begin` in it.
    fn around(&self, begin: &str, then: &str) -> String {
        let times = if self.tools.parallel { "*" } else { "?" };
        match self.control(begin) {
            Some(token) => format!("start: TEXT? ({token} {then} TEXT?){times}\nTEXT: /(?s:.+)/\n"),
            None => {
                let begin = json!(begin);
                format!(
                    "start: (begin {then}){times} TEXT?\nbegin[lazy]: ANY {begin}\n\
                     TEXT: /(?s:.+)/ & ~(ANY {begin} ANY)\nANY: /(?s:.*)/\n"
                )
            }
        }
    }

    /// Calls that are JSON objects, with arguments of this name.
    fn objects(&self, arguments: &str) -> String {
        let object = |(index, tool): (usize, &Tool)| {
            let head = json!(format!("{{\"name\": {}, \"{arguments}\": ", json!(tool.name)));
            format!("call_{index}: {head} arguments_{index} \"}}\"\n")
        };
        self.alternatives() + &self.tools.offered.iter().enumerate().map(object).collect::<String>()
    }

    /// Calls that are a name and arguments, with these parts around.
    fn calls(&self, before: &str, between: &str, after: &str) -> String {
        let call = |(index, tool): (usize, &Tool)| {
            format!("call_{index}: {before} {} {between} arguments_{index} {after}\n", json!(tool.name))
        };
        self.alternatives() + &self.tools.offered.iter().enumerate().map(call).collect::<String>()
    }

    fn alternatives(&self) -> String {
        let calls: Vec<String> = (0..self.tools.offered.len()).map(|index| format!("call_{index}")).collect();
        format!("call: {}\nWHITE: /[ \\n]{{1,4}}/\n", calls.join(" | "))
    }

    /// Each tool's schema is a grammar of its own; a tool that is not strict takes any object.
    fn arguments(&self) -> String {
        let rule = |(index, tool): (usize, &Tool)| {
            let schema = if tool.strict { schema(tool) } else { json!({"type": "object"}) };
            format!("arguments_{index}: %json {}\n", with_whitespace(schema).unwrap_or(Value::Bool(true)))
        };
        self.tools.offered.iter().enumerate().map(rule).collect()
    }

    /// A word of the format, as a token or as text.
    fn mark(&self, word: &str) -> String {
        self.control(word).unwrap_or_else(|| json!(word).to_string())
    }

    fn control(&self, word: &str) -> Option<String> {
        let token = self.vocabulary.find(word).filter(|token| self.vocabulary.piece(*token).is_empty())?;
        Some(format!("<[{token}]>"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::structure::compiled;
    use crate::text::tokenizer::Tokenizer;
    use std::time::Duration;
    use windlass_checkpoint::{Checkpoint, testing::real_model};
    use windlass_engine_core::request::TokenId;

    const MINUTE: Duration = Duration::from_secs(60);

    fn tools(parallel: bool) -> Tools {
        let city = json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
            "additionalProperties": false});
        let tool =
            |name: &str, parameters, strict| Tool { name: name.to_owned(), description: None, parameters, strict };
        Tools {
            offered: vec![tool("weather", city, true), tool("log", json!({"type": "object"}), false)],
            choice: windlass_engine_api::tools::ToolChoice::Auto,
            parallel,
        }
    }

    /// A model's tokenizer, which has none of the formats' words as control tokens.
    fn model() -> Option<Tokenizer> {
        let file = Checkpoint::open(&real_model()?).unwrap();
        Some(crate::start::tokenizer(&file).unwrap())
    }

    /// The part of `text` that the form allows, and whether an answer may end there.
    fn allowed(tokenizer: &Tokenizer, structure: &Structure, text: &str) -> (String, bool) {
        let constraint = compiled(tokenizer, structure.clone()).constraint(None);
        let tokens = tokenizer.encode(text).unwrap();
        let holds = |count: &usize| constraint.allowed(&tokens[..*count], MINUTE).unwrap().contains(tokens[*count]);
        let count = (0..tokens.len()).find(|count| !holds(count)).unwrap_or(tokens.len());
        let end = tokenizer.special().ends[0];
        let pieces: Vec<u8> =
            tokens[..count].iter().flat_map(|token: &TokenId| tokenizer.vocabulary().piece(*token)).copied().collect();
        (String::from_utf8(pieces).unwrap(), constraint.allowed(&tokens[..count], MINUTE).unwrap().contains(end))
    }

    #[test]
    fn text_is_free_and_calls_keep_their_schemas_in_every_format_of_json() {
        let Some(model) = model() else { return };
        let hermes = |arguments: &str| {
            format!("So.\n<tool_call>\n{{\"name\": \"weather\", \"arguments\": {arguments}}}\n</tool_call>")
        };
        let llama = |arguments: &str| format!("{{\"name\": \"weather\", \"parameters\": {arguments}}}");
        let mistral = |arguments: &str| format!("[TOOL_CALLS][{{\"name\": \"weather\", \"arguments\": {arguments}}}]");
        let deepseek = |arguments: &str| {
            format!(
                "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            )
        };
        type Written = fn(&str) -> String;
        let cases: [(ToolFormat, Written); 4] = [
            (ToolFormat::Hermes, hermes),
            (ToolFormat::Llama3Json, llama),
            (ToolFormat::Mistral, mistral),
            (ToolFormat::DeepSeek, deepseek),
        ];
        for (format, written) in cases {
            let structure = strict(&tools(true), format, "", model.vocabulary()).unwrap().unwrap();
            for text in ["Plain <b> text, [1] {2}.\n\"name\": é", &written("{\"city\": \"Rome\"}")] {
                assert_eq!(allowed(&model, &structure, text), (text.to_owned(), true), "{format:?}");
            }
            let (kept, ends) = allowed(&model, &structure, &written("{\"city\": \"Oslo\"}"));
            assert!(kept.ends_with("{\"city\": \"") && !ends, "{format:?}: {kept}");
            let (kept, _) = allowed(&model, &structure, &written("{\"town\": \"Rome\"}"));
            assert!(kept.ends_with("{\"") && !kept.contains("town"), "{format:?}: {kept}");
        }
    }

    #[test]
    fn several_calls_follow_each_other_only_where_they_may_and_loose_tools_take_any_object() {
        let Some(model) = model() else { return };
        let call = "<tool_call>\n{\"name\": \"log\", \"arguments\": {\"any\": [1, {}]}}\n</tool_call>";
        let two = [call, "\n", call].concat();
        for (parallel, expected) in [(true, two.len()), (false, call.len() + "\n<tool_call".len())] {
            let structure = strict(&tools(parallel), ToolFormat::Hermes, "", model.vocabulary()).unwrap().unwrap();
            let (kept, _) = allowed(&model, &structure, &two);
            assert!(
                kept.len() <= expected && kept.len() > call.len() && (kept.len() == two.len()) == parallel,
                "{kept}"
            );
        }
        let unknown = "<tool_call>\n{\"name\": \"rm\", \"arguments\": {}}\n</tool_call>";
        let structure = strict(&tools(true), ToolFormat::Hermes, "", model.vocabulary()).unwrap().unwrap();
        assert!(!allowed(&model, &structure, unknown).0.contains("rm"));
    }

    #[test]
    fn nothing_is_held_where_nothing_is_strict_and_python_is_refused() {
        let vocabulary = Vocabulary::default();
        let mut loose = tools(true);
        loose.offered.iter_mut().for_each(|tool| tool.strict = false);
        assert_eq!(strict(&loose, ToolFormat::Pythonic, "", &vocabulary).unwrap(), None);
        let refusal = strict(&tools(true), ToolFormat::Pythonic, "", &vocabulary).unwrap_err();
        assert!(refusal.message.contains("strict"), "{}", refusal.message);
    }
}
