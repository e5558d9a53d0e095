//! OpenAI's error envelope.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The body of every response that is not a success, and of the error event inside a broken stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorEnvelope {
    /// What went wrong.
    pub error: ErrorBody,
}

/// What went wrong, for people (`message`) and for programs (the rest).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// One or two sentences that name the field and what would be right.
    pub message: String,
    /// OpenAI's class of errors: `invalid_request_error`, `server_error`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// The request field that is wrong.
    pub param: Option<String>,
    /// A stable word for programs (`model_not_found`, …).
    pub code: Option<String>,
    /// Whether the same request may succeed later; only inside a stream, where no status says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<bool>,
}

/// A request field that is missing, of the wrong type, or asks for what the engine does not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// The field, with its path where it is nested (`messages[2].content`); `None` for the body as a whole.
    pub param: Option<String>,
    /// Full sentence for the client.
    pub message: String,
    /// `unsupported_parameter`, `unknown_parameter`, …
    pub code: &'static str,
}

impl FieldError {
    /// The body is no JSON object.
    pub fn body(message: impl Into<String>) -> FieldError {
        FieldError { param: None, message: message.into(), code: "invalid_json" }
    }

    /// The value of `param` is wrong.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> FieldError {
        FieldError { param: Some(param.into()), message: message.into(), code: "invalid_value" }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for FieldError {}
