//! `/tokenize` and `/detokenize`.

use crate::http::api::Api;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::text::detokenize::Detokenizer;
use crate::text::tokenizer::Tokenizer;
use axum::Json;
use axum::extract::State;
use std::sync::Arc;
use windlass_engine_api::error::FieldError;
use windlass_engine_api::native::{
    DetokenizeRequest, DetokenizeResponse, TokenizeInput, TokenizeRequest, TokenizeResponse,
};
use windlass_engine_core::request::TokenId;

/// A text or a conversation as tokens.
pub async fn tokenize(State(api): State<Arc<Api>>, body: JsonBody) -> Result<Json<TokenizeResponse>, ApiError> {
    let (request, _room) = api.door.read(body, TokenizeRequest::from_body).await?;
    let TokenizeRequest { model, input, return_token_strs } = request;
    api.door.model_or_first(model)?;
    let tokens = match input {
        TokenizeInput::Messages(conversation) => crate::http::openai::prompt(&api, &conversation).await?.0,
        TokenizeInput::Prompt { text, add_special_tokens } => {
            api.check_length(&text, "prompt")?;
            let encode = if add_special_tokens { Tokenizer::encode_prompt } else { Tokenizer::encode };
            api.tokenize(text, encode).await?
        }
    };
    let vocabulary = api.tokenizer.vocabulary();
    let spell = |token: &TokenId| String::from_utf8_lossy(vocabulary.piece(*token)).into_owned();
    Ok(Json(TokenizeResponse {
        count: tokens.len(),
        max_model_len: api.door.max_model_tokens,
        token_strs: return_token_strs.then(|| tokens.iter().map(spell).collect()),
        tokens,
    }))
}

/// Tokens as text.
pub async fn detokenize(State(api): State<Arc<Api>>, body: JsonBody) -> Result<Json<DetokenizeResponse>, ApiError> {
    let (request, _room) = api.door.read(body, DetokenizeRequest::from_body).await?;
    let DetokenizeRequest { model, tokens } = request;
    api.door.model_or_first(model)?;
    let vocabulary = api.tokenizer.vocabulary();
    if let Some(token) = tokens.iter().find(|token| **token >= vocabulary.len()) {
        let message = format!("`tokens` has {token}; the model's tokens are below {}", vocabulary.len());
        return Err(FieldError::invalid("tokens", message).into());
    }
    let (mut detokenizer, mut prompt) = (Detokenizer::default(), String::new());
    tokens.iter().for_each(|token| detokenizer.push(vocabulary.piece(*token), &mut prompt));
    detokenizer.finish(&mut prompt);
    Ok(Json(DetokenizeResponse { prompt }))
}
