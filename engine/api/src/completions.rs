//! `/v1/completions`.

use crate::body::Body;
use crate::error::FieldError;
use crate::fields::Fields;
use crate::generation::{FinishReason, GenerationFields, StopReason, take_top};
use crate::logprobs::{CompletionLogprobs, PromptLogprobs};
use crate::prompts;
pub use crate::prompts::Prompt;
use crate::unsupported::{COMMON, COMPLETIONS};
use crate::usage::Usage;
use serde::{Deserialize, Serialize};

/// Prompts in one request.
pub const MAX_PROMPTS: usize = 64;

/// A completion request with everything in it that the engine acts on.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// A served name.
    pub model: String,
    /// 1 to [`MAX_PROMPTS`]; each becomes as many choices as were asked for, one prompt after the other.
    pub prompts: Vec<Prompt>,
    /// How to generate, the same for every prompt.
    pub generation: GenerationFields,
}

impl CompletionRequest {
    /// Reads a body; any field it cannot honour is refused by name.
    pub fn from_body(body: &Body<'_>) -> Result<CompletionRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.required("model", "the name of a served model")?;
        let cut = fields.has("truncate_prompt_tokens");
        let prompts = prompts::take(&mut fields, "prompt", MAX_PROMPTS, cut)?;
        let generation = GenerationFields {
            logprobs: take_top(&mut fields, "logprobs")?,
            echo: fields.optional("echo", "true or false")?.unwrap_or(false),
            ..GenerationFields::take(&mut fields)?
        };
        fields.finish(&[COMMON, COMPLETIONS])?;
        Ok(CompletionRequest { model, prompts, generation })
    }
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// Names the request in logs.
    pub id: String,
    /// Always `text_completion`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The name the client used.
    pub model: String,
    /// What answers depend on besides the request.
    pub system_fingerprint: String,
    /// One or more per prompt, in their order.
    pub choices: Vec<CompletionChoice>,
    /// Token counts over all prompts.
    pub usage: Usage,
}

/// The continuation of one prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompletionChoice {
    /// Position among all choices.
    pub index: u32,
    /// The text.
    pub text: String,
    /// Only if asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What the client named that ended it.
    pub stop_reason: Option<StopReason>,
    /// Only if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// One event of a streamed answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompletionChunk<'a> {
    /// The same in every event of an answer.
    pub id: &'a str,
    /// Always `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The name the client used.
    pub model: &'a str,
    /// What answers depend on besides the request.
    pub system_fingerprint: &'a str,
    /// One, or none in the event that carries the usage.
    pub choices: &'a [CompletionChunkChoice<'a>],
    /// Only with `include_usage`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// What an event adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompletionChunkChoice<'a> {
    /// Position among all choices.
    pub index: u32,
    /// More text.
    pub text: &'a str,
    /// Only if asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// Set in the last event of this prompt.
    pub finish_reason: Option<FinishReason>,
    /// What the client named that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(prompt: &str) -> Result<Vec<Prompt>, FieldError> {
        let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        CompletionRequest::from_body(&Body::new(&body)).map(|request| request.prompts)
    }

    #[test]
    fn other_prompts_are_refused_by_name() {
        let many = format!("[{}]", vec!["\"a\""; MAX_PROMPTS + 1].join(","));
        for bad in ["[]", "{}", "7", "[-1]", "[\"a\",1]", many.as_str()] {
            assert_eq!(prompts(bad).unwrap_err().param.as_deref(), Some("prompt"), "{bad}");
        }
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let extras =
            [r#""echo":"yes""#, r#""logprobs":21"#, r#""logprobs":true"#, r#""suffix":"x""#, r#""messages":[]"#];
        for extra in extras {
            let body = format!(r#"{{"model":"m","prompt":"a",{extra}}}"#);
            let error = CompletionRequest::from_body(&Body::new(&body)).unwrap_err();
            assert!(extra.contains(error.param.as_deref().unwrap()), "{extra}: {error}");
        }
    }
}
