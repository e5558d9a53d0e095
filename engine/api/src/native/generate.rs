//! `/v1/generate`.

use crate::body::Body;
use crate::error::FieldError;
use crate::fields::Fields;
use crate::generation::{FinishReason, GenerationFields};
use crate::prompts;
use serde::{Deserialize, Serialize};

/// A prompt to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// A served name; the first one if absent.
    pub model: Option<String>,
    /// What to continue.
    pub prompt: String,
    /// How to generate.
    pub generation: GenerationFields,
}

impl GenerateRequest {
    /// Reads a body; any field it cannot honour is refused by name.
    pub fn from_body(body: &Body<'_>) -> Result<GenerateRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.optional("model", "the name of a served model")?;
        let prompt = prompts::take_text(&mut fields, "prompt")?.ok_or_else(|| fields.missing("prompt", "a string"))?;
        let generation = GenerationFields::take(&mut fields)?;
        if generation.stream.is_some() {
            let message = "`stream` is not supported here: /v1/completions streams";
            return Err(FieldError::invalid("stream", message));
        }
        let several = [("n", generation.n), ("best_of", generation.best_of)];
        let asked = several.into_iter().find(|(_, count)| count.is_some_and(|count| count > 1)).map(|(name, _)| name);
        if let Some(name) = asked.or(generation.prompt_logprobs.map(|_| "prompt_logprobs")) {
            return Err(FieldError::invalid(name, format!("`{name}` is not supported here; use /v1/completions")));
        }
        fields.finish(&[])?;
        Ok(GenerateRequest { model, prompt, generation })
    }
}

/// The whole continuation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateResponse {
    /// Names the request in logs.
    pub id: String,
    /// The name of the model.
    pub model: String,
    /// What was generated.
    pub text: String,
    /// How much.
    pub tokens: TokenCounts,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// How long it took.
    pub timings: Timings,
}

/// Tokens of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCounts {
    /// In the prompt.
    pub prompt: u32,
    /// Of these, found in the prefix cache.
    pub cached: u32,
    /// Generated.
    pub generated: u32,
}

/// How long one request took, milliseconds, from its arrival at the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// To the first token.
    pub time_to_first_token_ms: f64,
    /// Between tokens after the first, on average; 0 for a single one.
    pub time_per_output_token_ms: f64,
    /// To the last token.
    pub total_ms: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_enough_and_streaming_is_elsewhere() {
        let request =
            GenerateRequest::from_body(&Body::new(r#"{"prompt":"a","max_tokens":3,"temperature":0,"top_p":1}"#))
                .unwrap();
        assert_eq!((request.model, request.prompt.as_str(), request.generation.max_tokens), (None, "a", Some(3)));
        let error = GenerateRequest::from_body(&Body::new(r#"{"prompt":"a","stream":true}"#)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stream"));
    }
}
