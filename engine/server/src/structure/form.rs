//! A request's form as a grammar, within limits of size.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};
use windlass_engine_api::structure::{Form, Structure};

/// Longest form as text.
const MAX_BYTES: usize = 256 << 10;
/// Most texts to choose from.
const MAX_CHOICES: usize = 1024;
/// White space between the parts of JSON: some, so that it can be indented, and an end to it, so that a weak model does
/// not fill its answer with it.
const WHITESPACE: &str = "[ \\n\\r\\t]{0,16}";

/// What is compiled, and by what it is found again.
pub(super) struct Compilable {
    pub(super) key: String,
    pub(super) grammar: TopLevelGrammar,
}

/// Checks the size and says it as a grammar.
pub(super) fn of(structure: Structure) -> Result<Compilable, String> {
    let (kind, text) = match &structure.form {
        Form::Json(schema) => ("json", schema.to_string()),
        Form::Regex(regex) => ("regex", regex.clone()),
        Form::Choice(choices) => ("choice", json!(choices).to_string()),
        Form::Grammar(grammar) => ("grammar", grammar.clone()),
    };
    if text.len() > MAX_BYTES {
        return Err(format!("it has {} bytes and at most {MAX_BYTES} are compiled", text.len()));
    }
    let grammar = match structure.form {
        Form::Json(schema) => TopLevelGrammar::from_json_schema(with_whitespace(schema)?),
        Form::Regex(regex) => TopLevelGrammar::from_regex(&regex),
        Form::Choice(choices) => TopLevelGrammar::from_lark(choice(&choices)?),
        Form::Grammar(grammar) => TopLevelGrammar::from_lark(grammar),
    };
    Ok(Compilable { key: format!("{kind}:{text}"), grammar })
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
