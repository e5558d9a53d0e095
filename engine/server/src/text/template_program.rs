//! A chat template as a program: compiled, and run on a conversation, inside limits.
//!
//! Fuel bounds its instructions and [`MAX_PROMPT_BYTES`] its output. What it makes in between, and how long one
//! instruction may take, nothing here bounds: it runs in a process of its own, which is watched
//! ([`super::renderer_process`]).

use super::chat_template::TemplateError;
use super::python_json;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use std::collections::HashSet;
use std::io;

/// Instructions one rendering may execute: a few dozen per message are usual, and these take under 100 ms.
const FUEL: u64 = 500_000;
/// Longest template, bytes.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Longest prompt, bytes: that of a request's body.
const MAX_PROMPT_BYTES: usize = 32 << 20;

/// A template ready to run.
pub struct Program {
    environment: Environment<'static>,
}

impl Program {
    /// Compiles `source`.
    pub fn new(source: &str) -> Result<Program, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            let message = format!("it has {} bytes and at most {MAX_TEMPLATE_BYTES} are read", source.len());
            return Err(TemplateError::Invalid(message));
        }
        let invalid = |error: Error| TemplateError::Invalid(error.to_string());
        let mut environment = environment().map_err(invalid)?;
        environment.add_template_owned("chat", source.to_owned()).map_err(invalid)?;
        Ok(Program { environment })
    }

    /// Names that it looks up.
    pub fn variables(&self) -> HashSet<String> {
        self.environment.get_template("chat").map(|template| template.undeclared_variables(false)).unwrap_or_default()
    }

    /// What it writes, given an object of variables.
    pub fn run(&self, variables: &serde_json::Map<String, serde_json::Value>) -> Result<String, TemplateError> {
        let template = self.environment.get_template("chat").map_err(failed)?;
        let mut prompt = Bounded(Vec::new());
        template.render_captured_to(Value::from(Serde(variables)), &mut prompt).map_err(failed)?;
        String::from_utf8(prompt.0).map_err(|error| TemplateError::Failed(error.to_string()))
    }
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
