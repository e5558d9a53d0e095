//! A request's form as a grammar, within limits of size.

use super::chain;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use windlass_engine_api::structure::{Form, Structure};

/// Longest form as text.
const MAX_BYTES: usize = 256 << 10;
/// Most texts to choose from.
const MAX_CHOICES: usize = 1024;
/// White space between the parts of JSON: some, so that it can be indented, and an end to it, so that a weak model does
/// not fill its answer with it.
const WHITESPACE: &str = "[ \\n\\r\\t]{0,16}";

/// A form as `llguidance` compiles it, and by which it is found again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// A JSON schema.
    Schema(String),
    /// A grammar.
    Lark(String),
}

/// Checks the size and says it as a source.
pub(super) fn of(structure: Structure) -> Result<Source, String> {
    let source = match structure.form {
        Form::Json(schema) => Source::Schema(with_whitespace(schema)?.to_string()),
        Form::Regex(regex) => Source::Lark(GrammarWithLexer::from_regex(&regex).lark_grammar.unwrap_or_default()),
        Form::Choice(choices) => Source::Lark(choice(&choices)?),
        Form::Grammar(grammar) => Source::Lark(grammar),
    };
    let bytes = source.text().len();
    if bytes > MAX_BYTES {
        return Err(format!("it has {bytes} bytes and at most {MAX_BYTES} are compiled"));
    }
    chain::check(&source)?;
    Ok(source)
}

impl Source {
    fn text(&self) -> &str {
        let (Source::Schema(text) | Source::Lark(text)) = self;
        text
    }

    /// The same for `llguidance`.
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar, String> {
        match self {
            Source::Schema(schema) => {
                serde_json::from_str(schema).map(TopLevelGrammar::from_json_schema).map_err(|error| error.to_string())
            }
            Source::Lark(grammar) => Ok(TopLevelGrammar::from_lark(grammar.clone())),
        }
    }
}

/// A schema that allows a little white space between the parts of its JSON.
pub(crate) fn with_whitespace(schema: Value) -> Result<Value, String> {
    match schema {
        Value::Object(mut schema) => {
            schema.insert(
                "x-guidance".to_owned(),
                json!({"whitespace_flexible": true, "whitespace_pattern": WHITESPACE}),
            );
            Ok(Value::Object(schema))
        }
        Value::Bool(_) => Ok(schema),
        _ => Err("a JSON schema is an object or a boolean".to_owned()),
    }
}

fn choice(choices: &[String]) -> Result<String, String> {
    if choices.is_empty() || choices.len() > MAX_CHOICES {
        return Err(format!("it has {} texts to choose from; it must have 1 to {MAX_CHOICES}", choices.len()));
    }
    if choices.iter().any(String::is_empty) {
        return Err("one of the texts to choose from is empty".to_owned());
    }
    // Lark writes strings as JSON does.
    let texts: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
    Ok(format!("start: {}", texts.join(" | ")))
}
