//! Refusals and failures as HTTP: a status, OpenAI's envelope, and when to come back.

use crate::answer::Interrupted;
use crate::dialogue::DialogueError;
use crate::driver::NotAccepted;
use crate::failure::bounded;
use crate::structure::StructureError;
use crate::tenants::OverLimit;
use crate::text::chat_template::TemplateError;
use crate::text::tokenizer::EncodeError;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use windlass_engine_api::error::{ErrorBody, ErrorEnvelope, FieldError};
use windlass_engine_core::request::RejectReason;

/// A response that is not a success.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    body: ErrorBody,
    retry_after_seconds: Option<u32>,
    /// Said where the status alone would mislead: clients retry every 5xx.
    retry: Option<bool>,
}

/// OpenAI's clients ask it before they look at the status.
pub const SHOULD_RETRY: &str = "x-should-retry";
/// Messages quote what the client sent, which may be anything.
const MAX_MESSAGE_CHARS: usize = 1000;
/// Paths of fields, too.
const MAX_PARAM_CHARS: usize = 200;
const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";

impl ApiError {
    /// An error with this status; `code` is the stable word for programs.
    pub fn new(status: StatusCode, code: &str, message: impl Into<String>) -> ApiError {
        let kind = match status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => SERVER,
            _ => INVALID,
        };
        let body = ErrorBody {
            message: bounded(message.into(), MAX_MESSAGE_CHARS),
            kind: kind.to_owned(),
            param: None,
            code: Some(code.to_owned()),
            retry: None,
        };
        ApiError { status, body, retry_after_seconds: None, retry: None }
    }

    /// A client error.
    pub fn bad_request(code: &str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, code, message)
    }

    /// The status it is answered with.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Names the field that is wrong.
    pub fn param(mut self, param: &str) -> ApiError {
        self.body.param = Some(bounded(param.to_owned(), MAX_PARAM_CHARS));
        self
    }

    /// Tells when another attempt makes sense.
    pub fn retry_after(mut self, seconds: u32) -> ApiError {
        self.retry_after_seconds = Some(seconds);
        self
    }

    /// The request was not admitted; `prompt` is the field that holds the prompt.
    pub fn rejected(reason: &RejectReason, retry_after_seconds: u32, prompt: &str) -> ApiError {
        let message = reason.to_string();
        match reason {
            RejectReason::QueueFull { .. } => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message);
                error.retry_after(retry_after_seconds)
            }
            RejectReason::TooSlow { .. } => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_slow", message);
                error.retry_after(retry_after_seconds)
            }
            RejectReason::TooLong { .. } => ApiError::bad_request("context_length_exceeded", message).param(prompt),
            RejectReason::TooMany { .. } => ApiError::bad_request("invalid_value", message).param("n"),
            RejectReason::TooManyTokens { .. } => ApiError::bad_request("invalid_value", message).param(prompt),
            RejectReason::NeverFits { .. } => ApiError::bad_request("invalid_value", message).param("max_tokens"),
            RejectReason::EmptyPrompt | RejectReason::UnknownToken { .. } => {
                ApiError::bad_request("invalid_value", message).param(prompt)
            }
        }
    }

    /// The server is about to stop.
    pub fn shutting_down() -> ApiError {
        let message = "the server is shutting down; send the request again";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", message).retry_after(1)
    }

    /// The server sleeps. Waking takes seconds, and somebody else has to ask for it.
    pub fn asleep() -> ApiError {
        let message = "the server is asleep; send the request again when it is awake";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "asleep", message).retry_after(10)
    }

    /// The envelope, for the inside of a stream, where there is no status or header to say whether to retry.
    pub fn envelope(self) -> ErrorEnvelope {
        let retry = Some(self.retry.unwrap_or(self.retry_after_seconds.is_some()));
        ErrorEnvelope { error: ErrorBody { retry, ..self.body } }
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> ApiError {
        let mut converted = ApiError::bad_request(error.code, error.message);
        converted.body.param = error.param.map(|param| bounded(param, MAX_PARAM_CHARS));
        converted
    }
}

impl From<NotAccepted> for ApiError {
    fn from(error: NotAccepted) -> ApiError {
        match error {
            NotAccepted::Busy => {
                let message = "more requests arrive than can be looked at; try again later";
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message).retry_after(1)
            }
            NotAccepted::Gone => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "engine_failed", "the engine has ended")
            }
        }
    }
}

impl From<Interrupted> for ApiError {
    fn from(error: Interrupted) -> ApiError {
        let message = error.to_string();
        let retry = match error {
            Interrupted::Unsatisfiable(_) => return ApiError::bad_request("unsatisfiable", message),
            Interrupted::TooSlow(_) => return ApiError::bad_request("structure_too_slow", message),
            Interrupted::Failed(_) => false,
            Interrupted::GivenUp(_) => true,
        };
        let converted = ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "interrupted", message);
        ApiError { retry: Some(retry), ..converted }
    }
}

impl From<OverLimit> for ApiError {
    fn from(over: OverLimit) -> ApiError {
        if let OverLimit::Answers { .. } = over {
            return ApiError::bad_request("invalid_value", over.to_string()).param("n");
        }
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, over.reason(), over.to_string());
        error.retry_after(over.retry_after_seconds())
    }
}

impl From<StructureError> for ApiError {
    fn from(error: StructureError) -> ApiError {
        match error {
            StructureError::Invalid { field, .. } | StructureError::TooSlow { field } => {
                ApiError::bad_request("invalid_structure", error.to_string()).param(field)
            }
            StructureError::NoProcess(_) => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", error.to_string())
            }
            StructureError::Busy => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", error.to_string()).retry_after(1)
            }
        }
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> ApiError {
        let message = error.to_string();
        match error {
            TemplateError::Busy => ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message).retry_after(1),
            TemplateError::NoProcess(_) => {
                let error = ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message);
                ApiError { retry: Some(true), ..error.retry_after(1) }
            }
            // The model's own was found valid before there were requests.
            TemplateError::Invalid(_) => ApiError::bad_request("invalid_value", message).param("chat_template"),
            TemplateError::Refused(_) | TemplateError::Failed(_) => {
                ApiError::bad_request("invalid_conversation", message).param("messages")
            }
        }
    }
}

impl From<DialogueError> for ApiError {
    fn from(error: DialogueError) -> ApiError {
        match error {
            DialogueError::NoTemplate => ApiError::bad_request("no_chat_template", error.to_string()),
            DialogueError::Template(error) => error.into(),
            DialogueError::Field(error) => error.into(),
        }
    }
}

impl From<EncodeError> for ApiError {
    fn from(error: EncodeError) -> ApiError {
        ApiError::bad_request("invalid_prompt", error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(ErrorEnvelope { error: self.body })).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_seconds {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(retry) = self.retry {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static(if retry { "true" } else { "false" }));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_machine_did_is_not_the_clients_fault() {
        let response = ApiError::from(TemplateError::NoProcess("it was killed".to_owned())).into_response();
        assert_eq!(
            (response.status().as_u16(), &response.headers()[SHOULD_RETRY]),
            (500, &HeaderValue::from_static("true"))
        );
        assert_eq!(ApiError::from(TemplateError::Failed("it is slow".to_owned())).status().as_u16(), 400);
    }

    #[test]
    fn an_interrupted_answer_says_whether_to_ask_again() {
        let why = || "why".to_owned();
        for (interrupted, status, retry) in [
            (Interrupted::Unsatisfiable(why()), 400, None),
            (Interrupted::TooSlow(why()), 400, None),
            (Interrupted::Failed(why()), 500, Some("false")),
            (Interrupted::GivenUp(why()), 500, Some("true")),
        ] {
            let error = ApiError::from(interrupted);
            assert_eq!(error.clone().envelope().error.retry, Some(retry == Some("true")));
            let response = error.into_response();
            let told = response.headers().get(SHOULD_RETRY).map(|value| value.to_str().unwrap());
            assert_eq!((response.status().as_u16(), told), (status, retry));
        }
    }
}
