//! What an answer must look like: `response_format`, `structured_outputs`, and vLLM's older `guided_*`.

use crate::error::FieldError;
use crate::fields::Fields;
use crate::unsupported::STRUCTURE;
use serde_json::{Value, json};

/// Texts to choose an answer from.
const MAX_CHOICES: usize = 4096;

/// A form for the answer, and the field that asked for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Structure {
    /// The request's field.
    pub field: &'static str,
    /// The form.
    pub form: Form,
}

/// A form for an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// JSON that a schema describes.
    Json(Value),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of a grammar in Lark's notation.
    Grammar(String),
}

impl Structure {
    /// Takes the fields; at most one of them may be there.
    pub fn take(fields: &mut Fields<'_>) -> Result<Option<Structure>, FieldError> {
        let found = [
            take_response_format(fields)?,
            take_structured_outputs(fields)?,
            take_form(fields, "json", "guided_json")?,
            take_form(fields, "regex", "guided_regex")?,
            take_form(fields, "choice", "guided_choice")?,
            take_form(fields, "grammar", "guided_grammar")?,
        ];
        let mut found = found.into_iter().flatten();
        match (found.next(), found.next()) {
            (Some(first), Some(second)) => {
                let message = format!("`{}` does not go with `{}`; send one of them", second.field, first.field);
                Err(FieldError::invalid(second.field, message))
            }
            (first, _) => Ok(first),
        }
    }
}

fn take_response_format(fields: &mut Fields<'_>) -> Result<Option<Structure>, FieldError> {
    const FIELD: &str = "response_format";
    let Some(mut format) = fields.object(FIELD)? else { return Ok(None) };
    let kind: String = format.required("type", "text, json_object or json_schema")?;
    let schema = match kind.as_str() {
        "text" => None,
        "json_object" => Some(any_object()),
        "json_schema" => Some(take_json_schema(&mut format)?),
        _ => {
            let message = format!("`{FIELD}.type` is {kind:?}; it must be text, json_object or json_schema");
            return Err(FieldError::invalid(format!("{FIELD}.type"), message));
        }
    };
    format.finish(&[])?;
    Ok(schema.map(|schema| Structure { field: FIELD, form: Form::Json(schema) }))
}

fn take_json_schema(format: &mut Fields<'_>) -> Result<Value, FieldError> {
    let named = format.object("json_schema")?;
    let mut named = named.ok_or_else(|| format.missing("json_schema", "an object with a schema"))?;
    let _name: Option<String> = named.optional("name", "a string")?;
    let _description: Option<String> = named.optional("description", "a string")?;
    // Every answer fits the schema exactly, asked or not.
    let _strict: Option<bool> = named.optional("strict", "true or false")?;
    let schema = named.free("schema", "a JSON schema")?.unwrap_or_else(any_object);
    named.finish(&[])?;
    Ok(schema)
}

fn take_structured_outputs(fields: &mut Fields<'_>) -> Result<Option<Structure>, FieldError> {
    const FIELD: &str = "structured_outputs";
    let Some(mut outputs) = fields.object(FIELD)? else { return Ok(None) };
    let object = outputs.optional::<bool>("json_object", "true or false")?.unwrap_or(false);
    let object = object.then(|| Structure { field: FIELD, form: Form::Json(any_object()) });
    let mut found = vec![object];
    for name in ["json", "regex", "choice", "grammar"] {
        found.push(take_form(&mut outputs, name, name)?);
    }
    outputs.finish(&[STRUCTURE])?;
    let mut found = found.into_iter().flatten();
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(Some(Structure { field: FIELD, ..one })),
        _ => {
            let message = "`structured_outputs` must have exactly one of json, json_object, regex, choice and grammar";
            Err(FieldError::invalid(FIELD, message))
        }
    }
}

/// Takes the field called `field`, which says what the answer is as `kind`.
fn take_form(fields: &mut Fields<'_>, kind: &str, field: &'static str) -> Result<Option<Structure>, FieldError> {
    let form = match kind {
        "json" => take_schema(fields, field)?.map(Form::Json),
        "regex" => fields.optional(field, "a regular expression")?.map(Form::Regex),
        "choice" => fields.list(field, MAX_CHOICES, "a list of strings")?.map(Form::Choice),
        _ => fields.optional(field, "a grammar in Lark's notation")?.map(Form::Grammar),
    };
    Ok(form.map(|form| Structure { field, form }))
}

/// A schema may be written into a string.
fn take_schema(fields: &mut Fields<'_>, field: &str) -> Result<Option<Value>, FieldError> {
    match fields.free(field, "a JSON schema")? {
        Some(Value::String(text)) => fields.written(field, &text).map(Some),
        schema => Ok(schema),
    }
}

fn any_object() -> Value {
    json!({"type": "object"})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::Body;

    fn take(body: Value) -> Result<Option<Structure>, FieldError> {
        Structure::take(&mut Fields::parse(&Body::new(&body.to_string())).unwrap())
    }

    #[test]
    fn every_way_to_ask_is_understood() {
        let schema = json!({"type": "integer"});
        let json = |schema: &Value| Form::Json(schema.clone());
        let cases = [
            (json!({"response_format": {"type": "json_object"}}), json(&any_object())),
            (
                json!({"response_format": {"type": "json_schema",
                    "json_schema": {"name": "n", "strict": true, "schema": schema}}}),
                json(&schema),
            ),
            (json!({"guided_json": schema}), json(&schema)),
            (json!({"guided_json": "{\"type\": \"integer\"}"}), json(&schema)),
            (json!({"guided_regex": "a+"}), Form::Regex("a+".into())),
            (json!({"guided_choice": ["a", "b"]}), Form::Choice(vec!["a".into(), "b".into()])),
            (json!({"structured_outputs": {"grammar": "start: \"a\""}}), Form::Grammar("start: \"a\"".into())),
            (json!({"structured_outputs": {"json_object": true}}), json(&any_object())),
        ];
        for (body, form) in cases {
            assert_eq!(take(body.clone()).unwrap().map(|structure| structure.form), Some(form), "{body}");
        }
        assert_eq!(take(json!({"response_format": {"type": "text"}})).unwrap(), None);
    }

    #[test]
    fn what_is_wrong_is_refused_by_name() {
        for (body, param) in [
            (json!({"response_format": {"type": "yaml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (json!({"response_format": {"type": "json_object", "x": 1}}), "response_format.x"),
            (json!({"guided_json": "{"}), "guided_json"),
            (json!({"guided_choice": "a"}), "guided_choice"),
            (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice"),
            (json!({"structured_outputs": {}}), "structured_outputs"),
            (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs"),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs.structural_tag"),
        ] {
            assert_eq!(take(body.clone()).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }
}
