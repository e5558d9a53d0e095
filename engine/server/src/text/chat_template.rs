//! Renders a conversation to a prompt with the checkpoint's own Jinja template, inside limits.
//!
//! The template is part of the model; one that a request brings is never run. Fuel bounds its instructions and
//! [`MAX_PROMPT_BYTES`] its output, so a hostile file costs a request an error, not the server its time.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use std::io;
use windlass_engine_api::chat::{Message, Role};

/// Instructions one rendering may execute: a few dozen per message are usual, and these take under 100 ms.
const FUEL: u64 = 500_000;
/// Longest template, bytes.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Longest prompt, bytes.
const MAX_PROMPT_BYTES: usize = 64 << 20;

/// A template ready to render.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_text: String,
    eos_text: String,
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
        environment
            .add_template_owned("chat", source.to_owned())
            .map_err(|error| TemplateError::Invalid(error.to_string()))?;
        Ok(ChatTemplate { environment, bos_text: bos_text.to_owned(), eos_text: eos_text.to_owned() })
    }

    /// The prompt for `messages`, ending where the assistant begins to speak.
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        let template = self.environment.get_template("chat").map_err(failed)?;
        let mut prompt = Bounded(Vec::new());
        let values = context! {
            messages => messages.iter().map(value).collect::<Vec<Value>>(),
            add_generation_prompt => true,
            bos_token => self.bos_text.as_str(),
            eos_token => self.eos_text.as_str(),
            tools => (),
            documents => (),
        };
        template.render_captured_to(values, &mut prompt).map_err(failed)?;
        String::from_utf8(prompt.0).map_err(|error| TemplateError::Failed(error.to_string()))
    }
}

/// A message as templates read it.
fn value(message: &Message) -> Value {
    let role = match message.role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
    };
    let fields = [("role", Some(role)), ("content", Some(&message.content)), ("name", message.name.as_deref())];
    Value::from_pairs(fields.into_iter().filter_map(|(name, value)| Some((name, value?))))
}

/// What templates may use: the Jinja dialect they are written in, two functions, and Python's string methods.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(FUEL));
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

    fn say(role: Role, content: &str) -> Message {
        Message { role, content: content.to_owned(), name: None }
    }

    fn render(source: &str) -> Result<String, TemplateError> {
        ChatTemplate::new(source, "<s>", "</s>")?.render(&[say(Role::User, "hi"), say(Role::Assistant, "ho")])
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
