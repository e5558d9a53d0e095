//! Text Generation Inference's dialect: `/generate`, `/generate_stream`, and both behind `/`.

use crate::body::Body;
use crate::error::FieldError;
use crate::fields::Fields;
use crate::generation::{GenerationFields, MAX_ENDS};
use crate::prompts;
use crate::structure::{Form, Structure};
use crate::unsupported::TGI;
use serde::{Deserialize, Serialize};

/// A prompt to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// What to continue.
    pub inputs: String,
    /// Answer as server-sent events; only `/` asks.
    pub stream: bool,
    /// Keep only so many tokens of the prompt, the last ones.
    pub truncate: Option<u32>,
    /// Begin the text with the prompt.
    pub return_full_text: bool,
    /// Say more than the text.
    pub details: bool,
    /// How to generate.
    pub generation: GenerationFields,
}

impl GenerateRequest {
    /// Reads a body; any parameter it cannot honour is refused by name.
    pub fn from_body(body: &Body<'_>) -> Result<GenerateRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let raw = fields.raw("inputs").ok_or_else(|| fields.missing("inputs", "a string"))?;
        let stream = fields.optional("stream", "true or false")?.unwrap_or(false);
        let mut parameters = fields.object("parameters")?.unwrap_or_else(|| fields.none("parameters"));
        // Of one that is to be cut only the end has to fit.
        let inputs = match parameters.has("truncate") {
            true => fields.read_as("inputs", raw, "a string")?,
            false => prompts::read_text(&fields, "inputs", raw, "a string")?,
        };
        fields.finish(&[])?;
        let request = GenerateRequest {
            inputs,
            stream,
            truncate: parameters.optional("truncate", "a whole number of tokens")?,
            return_full_text: parameters.optional("return_full_text", "true or false")?.unwrap_or(false),
            details: parameters.optional("details", "true or false")?.unwrap_or(false),
            generation: take_generation(&mut parameters)?,
        };
        parameters.finish(&[TGI])?;
        Ok(request)
    }
}

/// Greedy, unless sampling is asked for or any of its parameters is given.
fn take_generation(parameters: &mut Fields<'_>) -> Result<GenerationFields, FieldError> {
    let mut generation = GenerationFields {
        temperature: parameters.optional("temperature", "a number")?,
        top_p: parameters.optional("top_p", "a number")?,
        top_k: parameters.optional("top_k", "a whole number")?,
        seed: parameters.optional("seed", "a whole number of 64 bits")?,
        max_tokens: parameters.optional("max_new_tokens", "a whole number of tokens")?,
        stop: parameters.list("stop", MAX_ENDS, "a list of strings")?.unwrap_or_default(),
        typical_p: parameters.optional("typical_p", "a number")?,
        repetition_penalty: parameters.optional("repetition_penalty", "a number")?,
        frequency_penalty: parameters.optional("frequency_penalty", "a number")?,
        structure: take_grammar(parameters)?,
        ..GenerationFields::default()
    };
    let asked: bool = parameters.optional("do_sample", "true or false")?.unwrap_or(false);
    let implied = generation.temperature.is_some() || generation.top_p.is_some() || generation.top_k.is_some();
    if !asked && !implied {
        generation.temperature = Some(0.0);
    }
    Ok(generation)
}

/// `{"type": "json" | "regex", "value": …}`.
fn take_grammar(parameters: &mut Fields<'_>) -> Result<Option<Structure>, FieldError> {
    const FIELD: &str = "parameters.grammar";
    let Some(mut grammar) = parameters.object("grammar")? else { return Ok(None) };
    let kind: String = grammar.required("type", "json or regex")?;
    let form = match kind.as_str() {
        "json" => {
            let schema = grammar.free("value", "a JSON schema")?;
            Form::Json(schema.ok_or_else(|| grammar.missing("value", "a JSON schema"))?)
        }
        "regex" => Form::Regex(grammar.required("value", "a regular expression")?),
        _ => {
            let message = format!("`{FIELD}.type` is {kind:?}; it must be json or regex");
            return Err(FieldError::invalid(format!("{FIELD}.type"), message));
        }
    };
    grammar.finish(&[])?;
    Ok(Some(Structure { field: FIELD, form }))
}

/// The whole continuation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateResponse {
    /// What was generated.
    pub generated_text: String,
    /// Where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
}

/// More than the text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Details {
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// How many tokens.
    pub generated_tokens: u32,
    /// As the client gave it.
    pub seed: Option<i64>,
    /// Always empty: the prompt's tokens are not repeated.
    pub prefill: Vec<Token>,
    /// What was generated, one by one.
    pub tokens: Vec<Token>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The token limit.
    Length,
    /// The model ended it.
    EosToken,
    /// A stop string.
    StopSequence,
}

/// One token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// What it adds to the text.
    pub text: String,
    /// What the model thought of it, of its own distribution; absent for a token that ends the answer.
    pub logprob: Option<f32>,
    /// It ends the answer and says nothing.
    pub special: bool,
}

/// One event of a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StreamResponse {
    /// Counts tokens from 1.
    pub index: u32,
    /// What is new.
    pub token: Token,
    /// All of the text, in the last event.
    pub generated_text: Option<String>,
    /// In the last event.
    pub details: Option<StreamDetails>,
}

/// What the last event says of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StreamDetails {
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// How many tokens.
    pub generated_tokens: u32,
    /// As the client gave it.
    pub seed: Option<i64>,
    /// Tokens of the prompt.
    pub input_length: u32,
}

/// The body of every response that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// For people.
    pub error: String,
    /// `validation`, `overloaded`, `generation`, …
    pub error_type: String,
}

/// `/info`: what is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// The first served name.
    pub model_id: String,
    /// Always absent: the file is the revision.
    pub model_sha: Option<String>,
    /// Longest sequence, prompt and answer together.
    pub max_total_tokens: u32,
    /// Longest prompt.
    pub max_input_tokens: u32,
    /// Most stop strings.
    pub max_stop_sequences: u32,
    /// Version of the engine.
    pub version: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(parameters: &str) -> Result<GenerateRequest, FieldError> {
        GenerateRequest::from_body(&Body::new(&format!(r#"{{"inputs":"a","parameters":{parameters}}}"#)))
    }

    #[test]
    fn it_is_greedy_until_sampling_is_asked_for() {
        let temperature = |parameters: &str| request(parameters).unwrap().generation.temperature;
        assert_eq!(temperature("{}"), Some(0.0));
        assert_eq!(temperature(r#"{"do_sample":true}"#), None);
        assert_eq!(temperature(r#"{"top_p":0.9}"#), None);
        assert_eq!(temperature(r#"{"temperature":0.7}"#), Some(0.7));
    }

    #[test]
    fn parameters_are_refused_with_their_path() {
        for (parameters, param) in [
            (r#"{"watermark":true}"#, "parameters.watermark"),
            (r#"{"best_of":2}"#, "parameters.best_of"),
            (r#"{"max_new_tokens":-1}"#, "parameters.max_new_tokens"),
            (r#"{"no_such":1}"#, "parameters.no_such"),
        ] {
            assert_eq!(request(parameters).unwrap_err().param.as_deref(), Some(param), "{parameters}");
        }
        let defaults = r#"{"best_of":1,"watermark":false,"typical_p":null,"repetition_penalty":1.0,"stop":["x"]}"#;
        assert_eq!(request(defaults).unwrap().generation.stop, ["x"]);
    }
}
