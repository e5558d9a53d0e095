//! Any bytes as a request's body, by every dialect.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_engine_api::body::{Body, Limits};
use windlass_engine_api::chat::ChatRequest;
use windlass_engine_api::completions::CompletionRequest;
use windlass_engine_api::encoders::{EmbeddingsRequest, RerankRequest, ScoreRequest};
use windlass_engine_api::error::FieldError;
use windlass_engine_api::native::{DetokenizeRequest, GenerateRequest, TokenizeRequest};
use windlass_engine_api::tgi;

/// What a server of a small model sets.
const LIMITS: Limits = Limits { prompt_tokens: 64, prompt_bytes: 512, ignore_unknown_fields: false };

fuzz_target!(|bytes: &[u8]| {
    for ignore_unknown_fields in [false, true] {
        let body = Body::new(bytes).within(Limits { ignore_unknown_fields, ..LIMITS });
        told(ChatRequest::from_body(&body).map(drop));
        told(CompletionRequest::from_body(&body).map(drop));
        told(EmbeddingsRequest::from_body(&body).map(drop));
        told(ScoreRequest::from_body(&body).map(drop));
        told(RerankRequest::from_body(&body).map(drop));
        told(GenerateRequest::from_body(&body).map(drop));
        told(TokenizeRequest::from_body(&body).map(drop));
        told(DetokenizeRequest::from_body(&body).map(drop));
        told(tgi::GenerateRequest::from_body(&body).map(drop));
    }
});

/// A refusal says something, and of nothing else than a field or the body.
fn told(read: Result<(), FieldError>) {
    if let Err(error) = read {
        assert!(!error.message.is_empty() && !error.code.is_empty());
    }
}
