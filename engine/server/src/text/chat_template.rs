//! Renders a conversation to a prompt with the checkpoint's own Jinja template, inside limits.
//!
//! The template is part of the model; one that a request brings is never run. Fuel bounds its instructions and
//! [`MAX_PROMPT_BYTES`] its output, so a hostile file costs a request an error, not the server its time.

use super::python_json;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use std::collections::{BTreeMap, HashSet};
use std::io;
use windlass_engine_api::chat::{Conversation, Message, Role};
use windlass_engine_api::tools::{ToolCall, Tools};

/// Instructions one rendering may execute: a few dozen per message are usual, and these take under 100 ms.
const FUEL: u64 = 500_000;
/// Longest template, bytes.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Longest prompt, bytes.
const MAX_PROMPT_BYTES: usize = 64 << 20;

/// A template ready to render.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// Names that it looks up.
    variables: HashSet<String>,
    bos_text: String,
    eos_text: String,
}

/// Variables that are the engine's to set.
const OWN_VARIABLES: &[&str] =
    &["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "chat_template", "tokenize"];

/// How a call's arguments are given: most templates want an object, some the text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Arguments {
    Object,
    Text,
}

/// A conversation that the template refuses, or a template that is not usable.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The source is no template.
    #[error("the chat template of this model is not valid: {0}")]
    Invalid(String),
    /// The template called `raise_exception`: roles in an order the model was not trained on, say.
    #[error("the chat template of this model refuses the conversation: {0}")]
    Refused(String),
    /// It failed on this conversation, or reached a limit.
    #[error("the chat template of this model failed: {0}")]
    Failed(String),
}

impl ChatTemplate {
    /// Compiles `source`; `bos_text` and `eos_text` are what templates call `bos_token` and `eos_token`.
    pub fn new(source: &str, bos_text: &str, eos_text: &str) -> Result<ChatTemplate, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            let message = format!("it has {} bytes and at most {MAX_TEMPLATE_BYTES} are read", source.len());
            return Err(TemplateError::Invalid(message));
        }
        let mut environment = environment().map_err(|error| TemplateError::Invalid(error.to_string()))?;
        let invalid = |error: Error| TemplateError::Invalid(error.to_string());
        environment.add_template_owned("chat", source.to_owned()).map_err(invalid)?;
        let variables = environment.get_template("chat").map_err(invalid)?.undeclared_variables(false);
        let (bos_text, eos_text) = (bos_text.to_owned(), eos_text.to_owned());
        Ok(ChatTemplate { environment, source: source.to_owned(), variables, bos_text, eos_text })
    }

    /// As it is written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether it looks at a variable.
    pub fn knows(&self, variable: &str) -> bool {
        self.variables.contains(variable)
    }

    /// Whether a client may set a variable.
    pub fn takes(&self, variable: &str) -> bool {
        self.knows(variable) && !OWN_VARIABLES.contains(&variable)
    }

    /// The prompt, ending where the assistant begins to speak or goes on.
    pub fn render(&self, conversation: &Conversation) -> Result<String, TemplateError> {
        let calls = conversation.messages.iter().any(|message| !message.tool_calls.is_empty());
        let prompt = match self.render_with(conversation, Arguments::Object) {
            Err(TemplateError::Failed(_)) if calls => self.render_with(conversation, Arguments::Text),
            rendered => rendered,
        }?;
        match conversation.messages.last().filter(|_| conversation.rendering.continue_final_message) {
            Some(last) => continued(prompt, last),
            None => Ok(prompt),
        }
    }

    fn render_with(&self, conversation: &Conversation, arguments: Arguments) -> Result<String, TemplateError> {
        let Conversation { messages, tools, rendering } = conversation;
        let template = self.environment.get_template("chat").map_err(failed)?;
        let mut prompt = Bounded(Vec::new());
        // Templates ask whether it is none.
        let (tools, none) = (tools.as_ref().map(tools_value), Value::from(()));
        let mut values: BTreeMap<&str, Value> =
            rendering.variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))).collect();
        values.extend([
            ("messages", messages.iter().map(|message| value(message, arguments)).collect()),
            ("add_generation_prompt", rendering.add_generation_prompt.into()),
            ("bos_token", self.bos_text.as_str().into()),
            ("eos_token", self.eos_text.as_str().into()),
            ("tools", tools.unwrap_or(none)),
            (
                "documents",
                match rendering.documents.as_slice() {
                    [] => ().into(),
                    documents => Value::from(Serde(documents)),
                },
            ),
        ]);
        template.render_captured_to(Value::from_pairs(values), &mut prompt).map_err(failed)?;
        String::from_utf8(prompt.0).map_err(|error| TemplateError::Failed(error.to_string()))
    }
}

fn tools_value(tools: &Tools) -> Value {
    tools.offered.iter().map(|tool| Value::from(Serde(tool.to_json()))).collect()
}

/// A prompt up to the end of its last message.
fn continued(mut prompt: String, last: &Message) -> Result<String, TemplateError> {
    let text = last.content.trim();
    match prompt.rfind(text).filter(|_| !text.is_empty()) {
        Some(at) => {
            prompt.truncate(at + text.len());
            Ok(prompt)
        }
        None => {
            Err(TemplateError::Refused("the last message is not to be found in the prompt to go on with".to_owned()))
        }
    }
}

/// A message as templates read it.
fn value(message: &Message, arguments: Arguments) -> Value {
    let role = match message.role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    let fields = [
        ("role", Some(role)),
        ("content", Some(message.content.as_str())),
        ("name", message.name.as_deref()),
        ("tool_call_id", message.tool_call_id.as_deref()),
        ("reasoning_content", message.reasoning.as_deref()),
    ];
    let fields = fields.into_iter().filter_map(|(name, value)| Some((name, Value::from(value?))));
    let calls: Vec<Value> = message.tool_calls.iter().map(|call| call_value(call, arguments)).collect();
    let calls = (!calls.is_empty()).then(|| ("tool_calls", Value::from(calls)));
    Value::from_pairs(fields.chain(calls))
}

fn call_value(call: &ToolCall, arguments: Arguments) -> Value {
    let text = call.function.arguments.as_str();
    let arguments = match (arguments, serde_json::from_str::<serde_json::Value>(text)) {
        (Arguments::Object, Ok(object)) => Value::from(Serde(object)),
        _ => Value::from(text),
    };
    let function = [("name", Value::from(call.function.name.as_str())), ("arguments", arguments)];
    let function = Value::from_pairs(function);
    Value::from_pairs([("id", Value::from(call.id.as_str())), ("type", "function".into()), ("function", function)])
}

/// What templates may use: the Jinja dialect they are written in, two functions, and Python's string methods.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(FUEL));
    environment.add_filter("tojson", python_json::filter);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSED}{message}")))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
        jiff::fmt::strtime::format(&format, &jiff::Zoned::now())
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
    });
    Ok(environment)
}

/// Marks an error as the template's own refusal.
const REFUSED: &str = "\u{1}";

fn failed(error: Error) -> TemplateError {
    match error.detail().and_then(|detail| detail.strip_prefix(REFUSED)) {
        Some(message) => TemplateError::Refused(message.to_owned()),
        None => TemplateError::Failed(error.to_string()),
    }
}

/// A buffer that refuses to grow beyond [`MAX_PROMPT_BYTES`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_PROMPT_BYTES {
            return Err(io::Error::other(format!("the prompt is longer than {MAX_PROMPT_BYTES} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use serde_json::json;
    use windlass_engine_api::chat::Rendering;
    use windlass_engine_api::tools::{FunctionCall, Tool, ToolChoice};

    fn render_all(source: &str, messages: &[Message], rendering: &Rendering) -> Result<String, TemplateError> {
        let tool =
            Tool { name: "f".to_owned(), description: None, parameters: json!({"type": "object"}), strict: false };
        let tools = Some(Tools { offered: vec![tool], choice: ToolChoice::Auto, parallel: true });
        let (messages, rendering) = (messages.to_vec(), rendering.clone());
        ChatTemplate::new(source, "<s>", "</s>")?.render(&Conversation { messages, tools, rendering })
    }

    fn render(source: &str) -> Result<String, TemplateError> {
        let messages = vec![Message::new(Role::User, "hi"), Message::new(Role::Assistant, "ho")];
        let (tools, rendering) = (None, Rendering::default());
        ChatTemplate::new(source, "<s>", "</s>")?.render(&Conversation { messages, tools, rendering })
    }

    fn called() -> Message {
        let function = FunctionCall { name: "f".to_owned(), arguments: "{\"a\": \"é<\"}".to_owned() };
        let call = ToolCall { id: "c1".to_owned(), kind: "function".to_owned(), function };
        Message { tool_calls: vec![call], ..Message::new(Role::Assistant, "") }
    }

    #[test]
    fn tools_and_calls_reach_the_template_as_python_writes_them() {
        let source = "{{ tools[0] | tojson }}{% for call in messages[0].tool_calls %} {{ call.id }} \
            {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}";
        let expected = "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}} \
            c1 f {\"a\": \"é<\"}";
        assert_eq!(render_all(source, &[called()], &Rendering::default()).unwrap(), expected);
        // Some templates put the text together themselves.
        let source = "{{ '<' + messages[0].tool_calls[0].function.arguments + '>' }}";
        assert_eq!(render_all(source, &[called()], &Rendering::default()).unwrap(), "<{\"a\": \"é<\"}>");
    }

    #[test]
    fn clients_set_variables_and_go_on_with_messages() {
        let source = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if think %}T{% endif %}\
            {% if add_generation_prompt %}>{% endif %}";
        let messages = [Message::new(Role::User, "a"), Message::new(Role::Assistant, "Once upon ")];
        let think = serde_json::from_value(json!({"think": true})).unwrap();
        let thinking = Rendering { variables: think, ..Rendering::default() };
        assert_eq!(render_all(source, &messages, &thinking).unwrap(), "[a][Once upon ]T>");
        let on = Rendering { add_generation_prompt: false, continue_final_message: true, ..Rendering::default() };
        assert_eq!(render_all(source, &messages, &on).unwrap(), "[a][Once upon");
        let template = ChatTemplate::new(source, "", "").unwrap();
        assert!(template.takes("think") && !template.takes("messages") && !template.takes("other"));
    }

    #[test]
    fn templates_see_what_they_are_written_for() {
        let source = "{{ bos_token }}{% for message in messages %}\n\
            {% if message['role'] == 'user' %}U:{{ message.content.strip().upper() }}{% else %}A:{{ message.content }}{% endif %}\n\
            {% endfor %}{% if add_generation_prompt and not tools %}>{% endif %}{{ eos_token }}";
        assert_eq!(render(source).unwrap(), "<s>U:HIA:ho></s>");
    }

    #[test]
    fn a_refusal_carries_the_templates_words() {
        let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
        assert!(matches!(error, TemplateError::Refused(message) if message == "roles must alternate"));
    }

    #[test]
    fn hostile_templates_end_in_an_error() {
        for source in [
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}x{% endfor %}{% endfor %}{% endfor %}",
            "{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{{ messages.__class__.__mro__ }}{{ undefined_function() }}",
            "{% include '/etc/passwd' %}",
            "{% for message in messages %}",
        ] {
            assert!(render(source).is_err(), "{source}");
        }
        assert!(ChatTemplate::new(&"x".repeat(MAX_TEMPLATE_BYTES + 1), "", "").is_err());
    }

    #[test]
    fn the_date_is_formatted_as_asked() {
        let year = render("{{ strftime_now('%Y') }}").unwrap();
        assert!(year.parse::<u32>().is_ok_and(|year| year >= 2024), "{year}");
    }
}
